"""The engine of the strategy ``probe``: looks, meets the other ranks, counts epochs, can fail. No framework."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from workloads import provenance, registry, rendezvous
from workloads.errors import JobError
from workloads.job import Job, say
from workloads.rundir import read_json, write_json
from workloads.world import check_distinct

MEET_TIMEOUT_S = 60.0
_TICK_S = 0.05
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Sight:
    """What one rank sees."""

    node: int
    host: str
    cores: list[int]
    devices: list[str]


def train(job: Job) -> None:
    """Check what this rank was given, meet the others, and count through the epochs.

    Raises:
        WrongHardwareError: two ranks share a device.
        JobError: the ranks do not find each other.
        Interrupted: the job was told to end.
    """
    config = job.spec.train
    options = _options(config.strategy_options)
    seen = _meet(job, _look(job))
    if job.spec.expect.gpus_per_node:
        check_distinct((s.node, _own_device(s, i, seen)) for i, s in enumerate(seen))
    result = job.result
    about = provenance.collect()
    result.world_size = job.world.size
    result.cpus_seen = len({(s.node, core) for s in seen for core in s.cores})
    result.devices_seen = len({(s.node, device) for s in seen for device in s.devices}) or None
    result.device_name = about["cpu_model"]
    result.provenance = about | {"nodes": job.world.nodes, "submitted_code_digest": job.spec.code_digest}
    job.events.write("world", world_size=job.world.size, nodes=job.world.nodes, ranks=[asdict(s) for s in seen])
    result.startup_s = provenance.process_age_s()
    job.orders.deferred = True
    done = _resume(job)
    times_s = []
    job.pulse.epochs = config.epochs
    for epoch in range(done + 1, config.epochs + 1):
        job.pulse.beat("train")
        started = time.monotonic()
        _wait(job, float(options["epoch_s"]))
        if options["fault"] != "none" and epoch == options["fault_epoch"] and job.world.rank == options["fault_rank"]:
            _fail(str(options["fault"]), job)
        times_s.append(time.monotonic() - started)
        job.pulse.epoch = result.epochs_done = epoch
        if job.world.rank == 0:
            job.events.write("epoch", epoch=epoch, steps=0, epoch_time_s=times_s[-1])
            write_json(job.run.checkpoint, {"epoch": epoch})
            job.events.write("checkpoint", epoch=epoch)
    result.epochs_done = config.epochs
    result.train_time_s = sum(times_s)
    result.epoch_time_s = median(times_s[1:] or times_s or [0.0])
    result.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.total_time_s = provenance.process_age_s()


def _options(given: dict[str, Any]) -> dict[str, Any]:
    declaration = registry.strategies()["probe"]
    return {option.name: option.default for option in declaration.options} | given


def _look(job: Job) -> Sight:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ROCR_VISIBLE_DEVICES") or ""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    devices = [device for device in visible.split(",") if device] if job.spec.expect.gpus_per_node else []
    return Sight(job.world.node, name, sorted(os.sched_getaffinity(0)), devices)


def _own_device(sight: Sight, rank: int, seen: list[Sight]) -> str:
    """The device a rank would compute on; as many names as ranks where the site shows none."""
    local_rank = sum(s.node == sight.node for s in seen[:rank])
    return sight.devices[local_rank % len(sight.devices)] if sight.devices else str(local_rank)


def _meet(job: Job, own: Sight) -> list[Sight]:
    """Every rank's sight, by rank: each tells rank 0, which tells all."""
    world = job.world
    if world.size == 1:
        return [own]
    if world.rank == 0:
        return _host(job, own)
    address, port = rendezvous.find(job.attempt.rendezvous, world, MEET_TIMEOUT_S)
    with (
        socket.create_connection((address, port), timeout=MEET_TIMEOUT_S) as connection,
        connection.makefile("rw", encoding="utf-8") as stream,
    ):
        stream.write(json.dumps([world.rank, asdict(own)]) + "\n")
        stream.flush()
        try:
            return [Sight(**sight) for sight in json.loads(stream.readline())]
        except (OSError, ValueError) as error:
            raise JobError(f"rank {world.rank} heard nothing from rank 0: Connection reset by peer") from error


def _host(job: Job, own: Sight) -> list[Sight]:
    seen = {0: own}
    waiting = []
    deadline = time.monotonic() + MEET_TIMEOUT_S
    with socket.create_server(("", 0), backlog=job.world.size) as server:
        port = server.getsockname()[1]
        rendezvous.publish(job.attempt.rendezvous, job.world, port, rendezvous.own_addresses(job.world))
        while len(seen) < job.world.size:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
                connection.settimeout(MEET_TIMEOUT_S)
                stream = connection.makefile("rw", encoding="utf-8")
                line = stream.readline()
            except TimeoutError as error:
                missing = sorted(set(range(job.world.size)) - seen.keys())
                raise JobError(f"ranks {missing} did not come within {MEET_TIMEOUT_S:.0f} s") from error
            if not line:  # somebody tried whether this address answers
                connection.close()
                continue
            rank, sight = json.loads(line)
            seen[rank] = Sight(**sight)
            waiting.append((connection, stream))
        answer = json.dumps([asdict(seen[rank]) for rank in range(job.world.size)]) + "\n"
        for connection, stream in waiting:
            stream.write(answer)
            stream.flush()
            stream.close()
            connection.close()
    return [seen[rank] for rank in range(job.world.size)]


def _resume(job: Job) -> int:
    """Epochs that an earlier attempt, or this one before it was requeued, has done."""
    try:
        done = int(read_json(job.run.checkpoint)["epoch"])
    except FileNotFoundError:
        job.run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        return 0
    if done:
        job.result.resumed_from_epoch = job.result.epochs_done = done
        job.events.write("resume", epoch=done)
    return done


def _wait(job: Job, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        job.orders.obey()
        job.pulse.beat()
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(_TICK_S, left))


def _fail(fault: str, job: Job) -> None:
    say(f"rank {job.world.rank}: {fault} on purpose")
    if fault == "crash":
        raise RuntimeError("crash on purpose")
    if fault == "exit":
        os._exit(3)
    held = []
    while True:
        if fault == "memory":
            held.append(b"\1" * _BLOCK_BYTES)
            job.pulse.beat()
        time.sleep(0.01)
