"""The callable that submitit runs on every rank: ``workloads.job.entry.run``. Frameworks come after the hardware check.

By hand, under any launcher: ``python -m workloads.job.entry RUN_DIR ATTEMPT``.

How an attempt ends, as the launcher sees it, is an :class:`ExitCode`. What a rank that fails owes the others is speed:
it writes what it knows and leaves at once, past exit handlers that might wait for a collective call that never comes.
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

from workloads import registry
from workloads.contract import RANK_LOST, RunResult, State
from workloads.errors import InputError, JobError, OrchestrateError
from workloads.files import array_record
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.job import slurm_owner
from workloads.job.context import Events, Interrupted, Job, StopSignals, print_error
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
"""A rank whose peer vanished gives the peer's own account of it so long to appear."""


class ExitCode(IntEnum):
    """Exit codes of a rank. The watchdog's is 1 too: it leaves a ``hang.<rank>.txt`` that is not empty."""

    SUCCEEDED = 0
    FAILED = 1
    OUT_OF_MEMORY = 71
    UNWRITABLE = 74
    """Trained, but the result could not be written; it is on standard error."""
    INTERRUPTED = 75
    """SIGTERM, SIGINT or SIGUSR2; another attempt goes on from the last checkpoint."""
    WRONG_HARDWARE = 78


def run(run_dir: str, attempt: int) -> None:
    """Carry out one attempt on this rank; returns when it succeeded and never returns when it did not.

    Args:
        run_dir: the run's folder, where ``spec.json`` is.
        attempt: its number; the folder is made when it is not there.
    """
    place = RunDir(Path(run_dir))
    folder = place.attempt(attempt).create()
    stop_signals = StopSignals()
    stop_signals.install()
    # Device numbers shall mean the same to nvidia-smi and CUDA where GPUs of several kinds share a node.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if why := slurm_owner.claim(folder):
        print_error(f"nothing to do: {why}")
        _leave(ExitCode.SUCCEEDED)
    world = World.from_environment()
    events = Events(folder.events(world.rank))
    result = RunResult(run_id=place.run_id, attempt=attempt, state=State.RUNNING, started_at=_started_at())
    events.write(
        "start",
        pid=os.getpid(),
        host=socket.gethostname(),
        rank=world.rank,
        argv=sys.argv,
        logs=[_target_of(stream) for stream in (1, 2)],
        **slurm_owner.facts(),
    )
    try:
        _carry_out(place, folder, world, events, stop_signals, result)
    except Interrupted as order:
        stop_signals.record_only()
        events.write("interrupt", signal=str(order), epoch=result.epochs_done)
        print_error(f"told to end by {order}; the last checkpoint stays")
        _leave(ExitCode.INTERRUPTED)
    except BaseException as error:
        stop_signals.record_only()
        _leave(_fail(error, folder, world, events, stop_signals, result))
    result.state = State.SUCCEEDED
    result.ended_at = _now()
    if world.rank == 0 and not write_result(folder, result):
        _leave(ExitCode.UNWRITABLE)
    events.write("end", state=State.SUCCEEDED.value)
    events.close()


def run_task(array: str) -> None:
    """Carry out the attempt of this task of a Slurm array on this rank, as :func:`run` does.

    Args:
        array: the array's folder, where its record and specs are.
    """
    (attempt,) = array_record.create_run_folders(Path(array), [int(os.environ["SLURM_ARRAY_TASK_ID"])])
    run(str(attempt.path.parent.parent), attempt.number)


def _carry_out(
    place: RunDir, folder: AttemptDir, world: World, events: Events, stop_signals: StopSignals, result: RunResult
) -> None:
    try:
        spec = place.read_spec()
    except (OSError, ValueError) as error:
        raise JobError("the run's spec cannot be read", where=str(place.spec), why=str(error)) from error
    about = code_snapshot.check(_runs_folder(place), spec.snapshot, thorough=world.local_rank == 0)
    result.provenance |= about
    check(
        world,
        spec.expect,
        cpus=len(os.sched_getaffinity(0)),
        gpus=visible_gpus() if spec.expect.gpus_per_node else None,
    )
    strategy = registry.find(registry.strategies(), spec.train.strategy)
    if strategy is None:
        raise InputError(
            f"no strategy is named {spec.train.strategy!r} in {sys.executable}",
            hint="install the package that brings it where jobs run",
        )
    with Pulse(folder, world.rank, spec.execution.hang_timeout_s) as pulse:
        engine = importlib.import_module(ENGINES[strategy.framework])
        pulse.beat()
        engine.train(
            Job(
                spec=spec,
                run=place,
                attempt=folder,
                world=world,
                events=events,
                pulse=pulse,
                stop_signals=stop_signals,
                result=result,
            )
        )
        pulse.phase = "done"
    result.provenance |= about
    if escaped := code_snapshot.imported_outside(_runs_folder(place), spec.snapshot):
        result.provenance["unfrozen"] = escaped
        print_error(f"imported, and not part of what was frozen at submit: {', '.join(escaped)}")


def _runs_folder(place: RunDir) -> Path:
    return place.path.parent.parent


def write_result(folder: AttemptDir, result: RunResult) -> bool:
    """Write ``result.json``; on a full disk without its bulky parts.

    Returns:
        False when that fails too; then the numbers are on standard error.
    """
    digests: dict[str, object] = {
        k: result.provenance[k] for k in ("code_digest", "packages_digest") if k in result.provenance
    }
    short = dataclasses.replace(
        result, per_class=[], memory_by_rank=[], provenance=digests, message=result.message[:200]
    )
    problem: OSError | None = None
    for version in (result, short):
        try:
            folder.write_result(version)
            return True
        except OSError as error:
            problem = error
    print_error(
        f"{folder.result}: the result cannot be written: {problem}\n"
        f"  fix: make room, then orchestrate retry; this is what was measured:\n{json.dumps(short.to_json())}"
    )
    return False


def _fail(
    error: BaseException, folder: AttemptDir, world: World, events: Events, stop_signals: StopSignals, result: RunResult
) -> ExitCode:
    """Put a failure on record and print_error how to exit."""
    state, reason, code = classify(error)
    if reason == RANK_LOST:
        _wait_for_root_cause(folder, stop_signals)
        if stop_signals.signal is not None:
            events.write("interrupt", signal=stop_signals.signal, epoch=result.epochs_done)
            return ExitCode.INTERRUPTED
    message = str(error) if isinstance(error, OrchestrateError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    # What the user did is told in a sentence; a traceback is for what we did.
    print_error(f"rank {world.rank}: {message}" if isinstance(error, OrchestrateError) else trace)
    events.write("error", failure_class=reason, message=message, traceback=trace, rank=world.rank)
    if not _knows_better(folder, reason):
        result.state, result.reason, result.ended_at = state, reason, _now()
        result.message = f"rank {world.rank}: {message}"
        write_result(folder, result)
    events.write("end", state=state.value)
    return code


def _knows_better(folder: AttemptDir, reason: str) -> bool:
    """Whether the result that another rank has written stands: it was first, and did not only see its peer go."""
    try:
        written = folder.read_result()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return reason == RANK_LOST or written.reason != RANK_LOST


def classify(error: BaseException) -> tuple[State, str, ExitCode]:
    """State, failure class and exit code for what ended a rank."""
    text = str(error)
    if isinstance(error, OrchestrateError):
        reason = error.failure_class if isinstance(error, JobError) else "input"
        if reason == "wrong_hardware":
            return State.WRONG_HARDWARE, reason, ExitCode.WRONG_HARDWARE
        return State.FAILED, reason, ExitCode.FAILED
    # By name, because the frameworks that define them may not be there.
    if type(error).__name__ == "OutOfMemoryError" or re.search(r"CUDA error: out of memory|STATUS_ALLOC_FAILED", text):
        return State.OUT_OF_MEMORY, "device_memory", ExitCode.OUT_OF_MEMORY
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return State.OUT_OF_MEMORY, "host_memory", ExitCode.OUT_OF_MEMORY
    if type(error).__name__ == "HorovodInternalError" or re.search(
        r"gloo/transport|Connection (closed|reset) by peer|remote process exited|Broken pipe", text
    ):
        return State.FAILED, RANK_LOST, ExitCode.FAILED
    return State.FAILED, "program_error", ExitCode.FAILED


def _wait_for_root_cause(folder: AttemptDir, stop_signals: StopSignals) -> None:
    """When a peer vanished, either it failed and is about to print_error why, or the whole job was told to end."""
    deadline = time.monotonic() + ROOT_CAUSE_WAIT_S
    while time.monotonic() < deadline and stop_signals.signal is None and not folder.result.exists():
        time.sleep(0.05)


def _leave(code: ExitCode) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _started_at() -> str:
    return (datetime.now(UTC) - timedelta(seconds=timing.process_age_s())).isoformat(timespec="seconds")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _target_of(descriptor: int) -> str:
    """Where standard output or error goes; a file's path when it is one."""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
