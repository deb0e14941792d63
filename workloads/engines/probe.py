"""The engine of the strategy ``probe``: checks devices, connects the ranks, counts epochs, can fail on purpose."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from workloads import registry
from workloads.errors import JobError
from workloads.files.json_file import read_json, write_json
from workloads.job import rendezvous
from workloads.job.context import Job, print_error
from workloads.job.world import check_distinct
from workloads.measurement import timing
from workloads.provenance import code_snapshot, job_facts

CONNECT_TIMEOUT_S = 60.0
_TICK_S = 0.05
_BLOCK_BYTES = 8 << 20
_HELD_S = 3.0
"""Longer than the interval at which Slurm samples a job's memory where it does so every second."""


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank sees."""

    node: int
    host: str
    cores: list[int]
    devices: list[str]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the run over all its attempts, as in its checkpoint."""

    epoch: int = 0
    epoch_times_s: list[float] = field(default_factory=list)
    total_time_s: float = 0.0


def train(job: Job) -> None:
    """Check what this rank was given, connect to the others, and count epochs.

    Raises:
        WrongHardwareError: two ranks share a device.
        JobError: the ranks cannot connect.
        Interrupted: a signal asked the job to end.
    """
    config = job.spec.train
    options: dict[str, Any] = registry.strategies()["probe"].options_with_defaults(config.strategy_options)
    connections = _Connections(job)
    seen = [RankView(**view) for view in connections.exchange(asdict(_look(job)))]
    if job.spec.expect.gpus_per_node:
        check_distinct((s.node, _own_device(s, i, seen)) for i, s in enumerate(seen))
    result = job.result
    about = job_facts.collect(code_snapshot.run_code_digest(job.spec))
    result.world_size = job.world.size
    result.cpus_seen = len({(s.node, core) for s in seen for core in s.cores})
    result.devices_seen = len({(s.node, device) for s in seen for device in s.devices}) or None
    result.device_name = about["cpu_model"]
    result.provenance = about | {"nodes": job.world.nodes, "submitted_code_digest": job.spec.code_digest}
    if options["look_at_data"] and job.world.rank == 0:
        _look_at_data(job)
    job.events.write("world", world_size=job.world.size, nodes=job.world.nodes, ranks=[asdict(s) for s in seen])
    result.startup_s = timing.process_age_s()
    job.stop_signals.deferred = True
    before = _resume(job, connections)
    done, times_s = before.epoch, list(before.epoch_times_s)
    job.pulse.epochs = config.epochs
    for epoch in range(done + 1, config.epochs + 1):
        job.pulse.beat("train")
        started = time.monotonic()
        _wait(job, float(options["epoch_s"]))
        if options["fault"] != "none" and epoch == options["fault_epoch"] and job.world.rank == options["fault_rank"]:
            _fail(str(options["fault"]), int(options["fault_mb"]), job)
        times_s.append(time.monotonic() - started)
        job.pulse.epoch = result.epochs_done = epoch
        if job.world.rank == 0:
            job.events.write("epoch", epoch=epoch, steps=0, epoch_time_s=times_s[-1])
            total_time_s = before.total_time_s + timing.process_age_s()
            write_json(job.run.checkpoint, asdict(Progress(epoch, times_s, total_time_s)))
            job.events.write("checkpoint", epoch=epoch)
    job.stop_signals.deferred = False
    # The run succeeds only if all ranks come this far.
    connections.exchange(config.epochs)
    connections.close()
    result.epochs_done = config.epochs
    result.train_time_s = sum(times_s)
    result.epoch_time_s = median(times_s[1:] or times_s or [0.0])
    result.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.total_time_s = before.total_time_s + timing.process_age_s()


def _look(job: Job) -> RankView:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ROCR_VISIBLE_DEVICES") or ""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    devices = [device for device in visible.split(",") if device] if job.spec.expect.gpus_per_node else []
    return RankView(job.world.node, name, sorted(os.sched_getaffinity(0)), devices)


def _look_at_data(job: Job) -> None:
    """Write an event with what is wrong with the run's data set on this node."""
    name = job.spec.train.dataset
    declaration = registry.find(registry.datasets(), name)
    root = Path(job.spec.data_root) if job.spec.data_root else None
    problems = declaration.check(root, name) if declaration is not None else []
    job.events.write("data", dataset=name, problems=[asdict(problem) for problem in problems])


def _own_device(view: RankView, rank: int, seen: list[RankView]) -> str:
    """Return the device that a rank would compute on; a distinct name per rank where no device is visible."""
    local_rank = sum(s.node == view.node for s in seen[:rank])
    return view.devices[local_rank % len(view.devices)] if view.devices else str(local_rank)


class _Connections:
    """JSON lines between rank 0 and every other rank, for as long as the run lasts."""

    def __init__(self, job: Job) -> None:
        self._world = job.world
        self._streams: dict[int, TextIO] = {}
        """By rank: on rank 0 all other ranks, on them rank 0."""
        if self._world.rank:
            address, port = rendezvous.find(job.attempt.rendezvous, job.world, CONNECT_TIMEOUT_S)
            self._streams[0] = self._open(socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S))
            self._write(0, self._world.rank)
        elif self._world.size > 1:
            self._host(job)

    def exchange(self, own: Any) -> list[Any]:
        """Return every rank's value, by rank. Collective.

        Raises:
            ConnectionError: a rank has ended.
        """
        if self._world.rank:
            self._write(0, own)
            return list(self._read(0))
        values = [own, *(self._read(rank) for rank in range(1, self._world.size))]
        for rank in self._streams:
            self._write(rank, values)
        return values

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _host(self, job: Job) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        with socket.create_server(("", 0), backlog=job.world.size) as server:
            addresses = rendezvous.own_addresses(job.world)
            rendezvous.publish(job.attempt.rendezvous, job.world, server.getsockname()[1], addresses)
            while len(self._streams) < job.world.size - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, job.world.size)) - self._streams.keys())
                    raise JobError(f"ranks {missing} did not come within {CONNECT_TIMEOUT_S:.0f} s") from error
                stream = self._open(connection)
                # A connection without a line is a rank that tests whether it reaches this address (job/rendezvous.py).
                if line := stream.readline():
                    self._streams[int(line)] = stream

    def _open(self, connection: socket.socket) -> TextIO:
        connection.settimeout(None)  # from now on the watchdog ends a hang
        stream = connection.makefile("rw", encoding="utf-8")
        connection.close()  # the stream keeps the socket open
        return stream

    def _write(self, rank: int, value: Any) -> None:
        try:
            self._streams[rank].write(json.dumps(value) + "\n")
            self._streams[rank].flush()
        except OSError as error:
            raise self._lost(rank) from error

    def _read(self, rank: int) -> Any:
        try:
            return json.loads(self._streams[rank].readline())
        except (OSError, ValueError) as error:
            raise self._lost(rank) from error

    def _lost(self, rank: int) -> Exception:
        # workloads/job/entry.py recognizes a lost peer by these words.
        return ConnectionError(f"rank {self._world.rank} lost rank {rank}: Connection closed by peer")


def _resume(job: Job, connections: _Connections) -> Progress:
    """Return the progress of earlier attempts, or of this one before Slurm requeued it, as rank 0 reads it."""
    job.run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    own = read_json(job.run.checkpoint) if job.run.checkpoint.exists() else {}
    before = Progress(**connections.exchange(own)[0])
    if before.epoch:
        job.result.resumed_from_epoch = job.result.epochs_done = before.epoch
        job.events.write("resume", epoch=before.epoch)
    return before


def _wait(job: Job, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        job.stop_signals.raise_if_stopped()
        job.pulse.beat()
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(_TICK_S, left))


def _fail(fault: str, most_mb: int, job: Job) -> None:
    """Fail on purpose; returns only after taking as much memory as requested."""
    print_error(f"rank {job.world.rank}: {fault} on purpose")
    if fault == "crash":
        raise RuntimeError("crash on purpose")
    if fault == "exit":
        os._exit(3)
    blocks: list[bytes] = []
    taken_at = 0.0
    while not taken_at or time.monotonic() - taken_at < _HELD_S:
        if fault == "memory":
            job.pulse.beat()
            if not taken_at:
                blocks.append(b"\1" * _BLOCK_BYTES)
                if most_mb and len(blocks) * _BLOCK_BYTES >= most_mb << 20:
                    taken_at = time.monotonic()
        time.sleep(0.01)
