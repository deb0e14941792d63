"""The callable that submitit runs on every rank: ``workloads.job.entry.run``. Imports frameworks after all checks.

By hand, under any launcher: ``python -m workloads.job.entry RUN_DIR ATTEMPT``.

The launcher sees the end of an attempt as an :class:`ExitCode`. A rank that fails must end quickly, so that the others
do not wait for it: it writes what it knows and skips exit handlers, which may wait for collective calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import socket
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from workloads import registry
from workloads.contract import RANK_LOST, RunResult, State
from workloads.contract.flat import flat
from workloads.errors import InputError, JobError, OrchestrateError
from workloads.files import array_record
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.job import slurm_owner
from workloads.job.context import Events, Interrupted, Job, Rank, StopSignals, print_error
from workloads.job.watchdog import Pulse
from workloads.job.world import World, check, visible_gpus
from workloads.measurement import timing
from workloads.provenance import code_snapshot

ENGINES = {
    "torch": "workloads.engines.torch_loop",
    registry.TENSORFLOW: "workloads.engines.tf_loop",
    registry.NO_FRAMEWORK: "workloads.engines.probe",
}
"""Framework of a strategy -> the module whose ``train`` runs it."""

ROOT_CAUSE_WAIT_S = 3.0
"""A rank that lost its peer waits this long for the peer's own error message."""


class ExitCode(IntEnum):
    """Exit codes of a rank. The watchdog also exits with 1; it leaves a non-empty ``hang.<rank>.txt``."""

    SUCCEEDED = 0
    FAILED = 1
    OUT_OF_MEMORY = 71
    UNWRITABLE = 74
    """Trained, but the result could not be written; it is on standard error."""
    INTERRUPTED = 75
    """SIGTERM, SIGINT or SIGUSR2; another attempt continues from the last checkpoint."""
    WRONG_HARDWARE = 78


def run(run_dir: str, attempt: int) -> None:
    """Execute one attempt on this rank; returns on success and exits the process otherwise.

    Args:
        run_dir: the run's folder, which holds ``spec.json``.
        attempt: number of the attempt; its folder is created if missing.
    """
    directory = RunDir(Path(run_dir))
    folder = directory.attempt(attempt).create()
    stop_signals = StopSignals()
    stop_signals.install()
    # CUDA numbers the fastest GPU first by default; this order equals nvidia-smi's (CUDA C++ guide, CUDA_DEVICE_ORDER).
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if why := slurm_owner.claim(folder):
        print_error(f"this job does not execute the attempt: {why}")
        _exit(ExitCode.SUCCEEDED)
    world, age_s = World.from_environment(), timing.process_age_s()
    rank = Rank(
        run=directory,
        attempt=folder,
        world=world,
        events=Events(folder.events(world.rank)),
        stop_signals=stop_signals,
        result=RunResult(run_id=directory.run_id, attempt=attempt, state=State.RUNNING, started_at=_time(age_s)),
    )
    rank.events.write(
        "start",
        pid=os.getpid(),
        host=socket.gethostname(),
        rank=world.rank,
        argv=sys.argv,
        logs=[_target_of(stream) for stream in (1, 2)],
        **slurm_owner.facts(),
    )
    try:
        _execute(rank)
    except Interrupted as received:
        stop_signals.record_only = True
        rank.events.write("interrupt", signal=str(received), epoch=rank.result.epochs_done)
        print_error(f"stopped by {received}; the last checkpoint is kept")
        _exit(ExitCode.INTERRUPTED)
    except BaseException as error:
        stop_signals.record_only = True
        _exit(_fail(rank, error))
    rank.result.state, rank.result.ended_at = State.SUCCEEDED, _time()
    if world.rank == 0 and not write_result(folder, rank.result):
        _exit(ExitCode.UNWRITABLE)
    rank.events.write("end", state=State.SUCCEEDED.value)
    rank.events.close()


def run_task(array: str) -> None:
    """Execute the attempt of this task of a Slurm array, whose folder is ``array``, as :func:`run` does."""
    (attempt,) = array_record.create_run_folders(Path(array), [int(os.environ["SLURM_ARRAY_TASK_ID"])])
    run(str(attempt.path.parent.parent), attempt.number)


def _execute(rank: Rank) -> None:
    """Check code, hardware and strategy, then train."""
    try:
        spec = rank.run.read_spec()
    except (OSError, ValueError) as error:
        raise JobError("the run's spec cannot be read", where=str(rank.run.spec), why=str(error)) from error
    code = code_snapshot.check(rank.run.runs, spec.snapshot, thorough=rank.world.local_rank == 0)
    rank.result.provenance |= code
    gpus = visible_gpus() if spec.expect.gpus_per_node else None
    check(rank.world, spec.expect, cpus=len(os.sched_getaffinity(0)), gpus=gpus)
    strategy = registry.find(registry.strategies(), spec.train.strategy)
    if strategy is None:
        what = f"{sys.executable} has no strategy named {spec.train.strategy!r}"
        raise InputError(what, hint="install the package that provides it where jobs run")
    with Pulse(rank.attempt, rank.world.rank, spec.execution.hang_timeout_s) as pulse:
        engine = importlib.import_module(ENGINES[strategy.framework])
        pulse.beat()
        engine.train(Job(spec=spec, pulse=pulse, **flat(rank)))
        pulse.phase = "done"
    rank.result.provenance |= code
    if outside := code_snapshot.imported_outside(rank.run.runs, spec.snapshot):
        rank.result.provenance["unfrozen"] = outside
        print_error(f"imported, but not part of the submitted code: {', '.join(outside)}")


def write_result(folder: AttemptDir, result: RunResult) -> bool:
    """Write ``result.json``, on a full disk without long lists; where that fails too, print it and return False."""
    digests = {k: v for k, v in result.provenance.items() if k in ("code_digest", "packages_digest")}
    message = result.message[:200]
    short = dataclasses.replace(result, per_class=[], memory_by_rank=[], provenance=digests, message=message)
    for version in (result, short):
        try:
            folder.write_result(version)
            return True
        except OSError as error:
            problem = str(error)
    print_error(
        f"{folder.result}: the result cannot be written: {problem}\n"
        f"  fix: free disk space, then orchestrate retry; the measured values are:\n{json.dumps(short.to_json())}"
    )
    return False


def _fail(rank: Rank, error: BaseException) -> ExitCode:
    """Record a failure and return the exit code for it."""
    state, reason, code = classify(error)
    if reason == RANK_LOST:
        _wait_for_root_cause(rank)
        if rank.stop_signals.signal is not None:
            rank.events.write("interrupt", signal=rank.stop_signals.signal, epoch=rank.result.epochs_done)
            return ExitCode.INTERRUPTED
    # Errors of ours explain themselves; a traceback helps with all others.
    is_ours = isinstance(error, OrchestrateError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    print_error(f"rank {rank.world.rank}: {message}" if is_ours else trace)
    rank.events.write("error", failure_class=reason, message=message, traceback=trace, rank=rank.world.rank)
    if not _has_better_result(rank.attempt, reason):
        result = rank.result
        result.state, result.reason, result.ended_at = state, reason, _time()
        result.message = f"rank {rank.world.rank}: {message}"
        write_result(rank.attempt, result)
    rank.events.write("end", state=state.value)
    return code


def _has_better_result(folder: AttemptDir, reason: str) -> bool:
    """Whether to keep another rank's result: it came first, and reports more than a lost peer."""
    try:
        written = folder.read_result()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return reason == RANK_LOST or written.reason != RANK_LOST


def classify(error: BaseException) -> tuple[State, str, ExitCode]:
    """Return state, failure class and exit code for the error that ended a rank."""
    text = str(error)
    if isinstance(error, OrchestrateError):
        reason = error.failure_class if isinstance(error, JobError) else "input"
        if reason == "wrong_hardware":
            return State.WRONG_HARDWARE, reason, ExitCode.WRONG_HARDWARE
        return State.FAILED, reason, ExitCode.FAILED
    # By name, because the frameworks that define these errors may not be installed.
    if type(error).__name__ == "OutOfMemoryError" or re.search(r"CUDA error: out of memory|STATUS_ALLOC_FAILED", text):
        return State.OUT_OF_MEMORY, "device_memory", ExitCode.OUT_OF_MEMORY
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return State.OUT_OF_MEMORY, "host_memory", ExitCode.OUT_OF_MEMORY
    lost = r"gloo/transport|Connection (closed|reset) by peer|remote process exited|Broken pipe"
    if type(error).__name__ == "HorovodInternalError" or re.search(lost, text):
        return State.FAILED, RANK_LOST, ExitCode.FAILED
    return State.FAILED, "program_error", ExitCode.FAILED


def _wait_for_root_cause(rank: Rank) -> None:
    """Wait until the lost peer has written its error, or until a signal shows that the whole job is stopping."""
    deadline = time.monotonic() + ROOT_CAUSE_WAIT_S
    while time.monotonic() < deadline and rank.stop_signals.signal is None and not rank.attempt.result.exists():
        time.sleep(0.05)


def _exit(code: ExitCode) -> NoReturn:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _time(seconds_ago: float = 0.0) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds")


def _target_of(descriptor: int) -> str:
    """Return the path of the file that standard output or error is; otherwise the kernel's name for it."""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
