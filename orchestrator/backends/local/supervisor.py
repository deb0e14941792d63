"""The process that supervises one run in local mode: starts its ranks, ends them together, writes how they ended.

The queue starts one per run, as ``python -m orchestrator.backends.local.supervisor``, in its own session. It does not
need the queue afterwards. Pickle, logs and job id are submitit's; starting, watching and ending the ranks is ours, as
submitit's own controller (submitit 1.5, ``submitit/local/local.py``) shares the caller's process group, gives every job
the same GPUs, and waits for the peers of a dead rank until the time limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core.utils import JobPaths
from submitit.local.local import LocalExecutor, LocalJob

from orchestrator.backends import processes
from orchestrator.backends.base import CANCELLED, Status
from orchestrator.backends.exit_status import (
    INTERRUPTED_EXIT,
    conclude,
    describe_exit,
    first_failure,
    hung_ranks,
    read_tail,
    result_status,
)
from orchestrator.backends.local.records import Entry, QueueFolder, SupervisorArgs, check_runs_folder, claim_start
from workloads.contract import RunSpec, State
from workloads.files.json_file import read_object_or_empty, write_json
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.provenance import code_snapshot

log = logging.getLogger(__name__)

POLL_S = 0.2
PEER_GRACE_S = 2.0
"""After a rank died, its peers have this long to record what they know before they are stopped."""
EARLY_EXIT_S = 4.0
"""A rank that exited with code 0 and not in phase ``done`` counts as dead after this long."""
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL. Together with the others above: a dead rank ends its run in less than 10 s."""
HANG_MARGIN_S = 10.0
"""The rank's own watchdog, which can write where it hangs, fires first by this much, or less for a short time-out."""
WARNING_S = 5.0
"""SIGUSR2 comes this long before the time limit, or a tenth of the limit for short ones. A rank ends on it between two
steps and loses no more than at the limit itself, so an earlier warning would only shorten the run."""
WRITE_RETRY_S = 60.0
"""How long to retry writing exit.json on a full disk."""

_LAUNCHER_VARIABLES = re.compile(
    r"(SLURM|OMPI|PMIX?|TORCHELASTIC)_.*|((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""Variables of a launcher around this process; the ranks would take them for their own."""


class _PickleExecutor(LocalExecutor):
    """submitit's local executor without its processes: writes the pickle under the id of this process."""

    def _submit_command(self, command: str) -> LocalJob[Any]:  # noqa: ARG002 (submitit's signature)
        tasks = list(range(self._num_tasks()))
        return LocalJob(folder=self.folder, job_id=str(os.getpid()), tasks=tasks)


def main() -> None:
    """Run one attempt to its end and write ``exit.json``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    os.umask(os.umask(0) | 0o002)
    arguments = SupervisorArgs(**json.loads(sys.argv[1]))
    folder = QueueFolder(Path(arguments.runs))
    entry = folder.read(folder.running, arguments.token)
    directory = entry.directory(folder.runs)
    if not claim_start(directory):
        log.info("attempt %s of run %s was started before: dropped", entry.attempt, entry.run_id)
        folder.finish(arguments.token)
        return
    try:
        check_runs_folder(folder.runs, directory)
        spec = RunDir.of(folder.runs, entry.run_id).read_spec()
        status = _Supervisor(arguments, entry, spec, folder).run()
    except Exception as error:
        log.exception("could not start")
        processes.kill_attempt(arguments.token, session=os.getpid())
        status = Status(State.FAILED, "start_failed", f"the run could not be started: {error}")
    if _write_exit(status, directory, on_failure=partial(folder.mark_unreported, arguments.token)):
        folder.finish(arguments.token)


class _Supervisor:
    """The ranks of one attempt, from their start to their end."""

    def __init__(self, arguments: SupervisorArgs, entry: Entry, spec: RunSpec, folder: QueueFolder) -> None:
        self._arguments, self._entry, self._spec, self._folder = arguments, entry, spec, folder
        self._directory = entry.directory(folder.runs)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._job_id = str(os.getpid())
        self._started = time.monotonic()
        self._exited_at: dict[int, float] = {}
        """Rank -> when its exit was first seen."""
        self._progress_seen: dict[int, tuple[int, float]] = {}
        """Rank -> modification time of its progress file, and when that was first seen."""
        self._stop_signal: str = ""
        self._warned = False
        self._oom_kills = processes.num_oom_kills()

    def run(self) -> Status:
        """Start the ranks and wait for their end."""
        # Before the pickle is written, so that a signal meanwhile is not lost.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        command = self._prepare()
        try:
            if self._why_cancelled() is None:
                self._start(command)
            stopped = self._watch()
            self._stop()
        finally:
            if not processes.kill_attempt(self._arguments.token, session=os.getpid()):
                log.warning("SIGKILL did not end all processes of this run; its devices stay leased until they end")
        num_ranks = self._entry.num_ranks
        return conclude(
            exit_codes=[rank.poll() for rank in self._ranks],
            stopped=stopped,
            result=result_status(self._directory),
            failure=first_failure(self._directory, num_ranks),
            hung=hung_ranks(self._directory, num_ranks),
            oom_killed=self._oom_kills is not None and (processes.num_oom_kills() or 0) > self._oom_kills,
            last_line=self._last_error_line(),
        )

    def _prepare(self) -> list[str]:
        """Let submitit write the pickle; return the command that loads and calls it."""
        module, _, function = self._entry.job.partition(":")
        job = getattr(importlib.import_module(module), function)
        executor = _PickleExecutor(self._directory.job_folder, python=shlex.quote(self._entry.python))
        limit_min = self._spec.execution.time_limit_s / 60
        executor.update_parameters(tasks_per_node=self._entry.num_ranks, timeout_min=limit_min)
        executor.submit(job, str(RunDir.of(self._folder.runs, self._entry.run_id).path), self._entry.attempt)
        lost = {"token": self._arguments.token, "target": "local", "attempt": self._entry.attempt}
        submission = read_object_or_empty(self._directory.submission) or lost
        write_json(self._directory.submission, {**submission, "job_id": self._job_id})
        return shlex.split(executor._submitit_command_str)

    def _start(self, command: Sequence[str]) -> None:
        parent = os.getpid()
        per_rank = self._entry.cpus_per_rank
        directory = self._entry.working_directory
        for rank in range(self._entry.num_ranks):
            cores = self._arguments.cores[rank * per_rank : (rank + 1) * per_rank]
            paths = JobPaths(self._directory.job_folder, self._job_id, rank)
            with open(paths.stdout, "ab") as stdout, open(paths.stderr, "ab") as stderr:
                process = subprocess.Popen(
                    command,
                    env=self._environment(rank),
                    cwd=directory if Path(directory).is_dir() else self._folder.runs,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=self._arguments.leases,
                    process_group=0,
                    preexec_fn=partial(_set_up_rank, parent, cores),
                )
            self._ranks.append(process)
        self._started = time.monotonic()

    def _environment(self, rank: int) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not _LAUNCHER_VARIABLES.fullmatch(k)}
        path = code_snapshot.pythonpath(self._folder.runs, self._spec.snapshot, inherited.get("PYTHONPATH", ""))
        return inherited | {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": self._job_id,
            "SUBMITIT_LOCAL_NTASKS": str(self._entry.num_ranks),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(rank),
            "SUBMITIT_LOCAL_TIMEOUT_S": str(self._spec.execution.time_limit_s),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(self._arguments.gpus),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(max(1, self._entry.cpus_per_rank)),
            "PYTHONPATH": path,
            # Without it a db.py in the user's working directory would shadow our package.
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            # submitit's notes on its pickles would be the first and last lines of every log.
            "SUBMITIT_LOG_LEVEL": inherited.get("SUBMITIT_LOG_LEVEL", "WARNING"),
            processes.TOKEN_VARIABLE: self._arguments.token,
        }

    def _watch(self) -> Status | None:
        """Wait until all ranks have ended; return why the run must end now, if it must."""
        checks = (self._why_cancelled, self._dead_rank, self._time_limit, self._hang)
        while True:
            for rank, process in enumerate(self._ranks):
                if process.poll() is not None:
                    self._exited_at.setdefault(rank, time.monotonic())
            if len(self._exited_at) == len(self._ranks) and self._ranks:
                obeyed = any(self._obeyed_warning(rank.returncode) for rank in self._ranks)
                return self._timeout_status() if obeyed else None
            for check in checks:
                if stopped := check():
                    return stopped
            time.sleep(POLL_S)

    def _stop(self) -> None:
        """Send SIGTERM to the ranks that live, SIGKILL to those that survive it; ``run`` kills their children."""
        left = [rank for rank in self._ranks if rank.poll() is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in left:
                rank.send_signal(number)
            deadline = time.monotonic() + STOP_GRACE_S
            while left and time.monotonic() < deadline:
                time.sleep(POLL_S / 4)
                left = [rank for rank in left if rank.poll() is None]

    def _why_cancelled(self) -> Status | None:
        if self._folder.is_cancelled(self._arguments.token):
            return CANCELLED
        if self._stop_signal:
            why = f"the supervisor received {self._stop_signal}: a shutdown, the end of an allocation, or a kill"
            return Status(State.CANCELLED, "signal", why)
        return None

    def _dead_rank(self) -> Status | None:
        """Check for ranks that exited while others run on: those would wait for them forever."""
        now = time.monotonic()
        for rank, at in self._exited_at.items():
            code = self._ranks[rank].returncode
            if self._obeyed_warning(code):
                return self._timeout_status()
            if code != 0 and now - at >= PEER_GRACE_S:
                why = f"rank {rank} {describe_exit(code)}, so the others were stopped"
                return Status(State.FAILED, "program_error", why)
            is_early = code == 0 and now - at >= EARLY_EXIT_S
            if is_early and read_object_or_empty(self._directory.progress(rank)).get("phase") != "done":
                return Status(State.FAILED, "rank_left", f"rank {rank} exited while the others were running")
        return None

    def _time_limit(self) -> Status | None:
        limit_s = self._spec.execution.time_limit_s
        elapsed_s = time.monotonic() - self._started
        if elapsed_s >= limit_s:
            return self._timeout_status()
        if not self._warned and elapsed_s >= limit_s - min(WARNING_S, limit_s / 10):
            self._warned = True
            for rank in self._ranks:
                # Not to the process group: data loader workers have no handler and would die.
                rank.send_signal(signal.SIGUSR2)
        return None

    def _obeyed_warning(self, code: int | None) -> bool:
        """Whether a rank ended because of our SIGUSR2, with its handler or before it had one."""
        return self._warned and code in {INTERRUPTED_EXIT, -signal.SIGUSR2}

    def _timeout_status(self) -> Status:
        limit_s = self._spec.execution.time_limit_s
        return Status(State.TIMEOUT, "time_limit", f"it reached its time limit of {limit_s} s")

    def _hang(self) -> Status | None:
        timeout_s = self._spec.execution.hang_timeout_s
        allowed_s = timeout_s + min(HANG_MARGIN_S, 1.0 + timeout_s / 10)
        for rank in range(len(self._ranks)) if timeout_s else ():
            if rank not in self._exited_at and time.monotonic() - self._last_progress(rank) >= allowed_s:
                return Status(State.FAILED, "hang", f"rank {rank} made no progress for {timeout_s} s")
        return None

    def _last_progress(self, rank: int) -> float:
        """Return when a rank's progress file last changed, by the monotonic clock.

        Only a change of the file's time counts, not its value: a file server may have set it, and this machine's clock
        may jump.
        """
        written, seen_at = self._progress_seen.get(rank, (None, self._started))
        with contextlib.suppress(OSError):
            now = self._directory.progress(rank).stat().st_mtime_ns
            if now != written:
                seen_at = time.monotonic()
                self._progress_seen[rank] = (now, seen_at)
        return seen_at

    def _note_signal(self, number: int, frame: object) -> None:  # noqa: ARG002 (signal's signature)
        self._stop_signal = signal.Signals(number).name

    def _last_error_line(self) -> str:
        """Return the last line of the error log of the rank that failed first; a killed one could not write any."""
        failed = [rank for rank in self._exited_at if self._ranks[rank].returncode not in {0, None, -signal.SIGKILL}]
        if not failed:
            return ""
        stderr = JobPaths(self._directory.job_folder, self._job_id, failed[0]).stderr
        return (read_tail(stderr).strip().splitlines() or [""])[-1].strip()


def _set_up_rank(parent: int, cores: Sequence[int]) -> None:
    """Between fork and exec: let the rank die with the supervisor and run on its own cores, if it has any."""
    processes.die_with_parent(parent)
    if cores:
        os.sched_setaffinity(0, cores)


def _write_exit(status: Status, directory: AttemptDir, *, on_failure: Callable[[], None]) -> bool:
    """Write ``exit.json``; on a full disk call ``on_failure`` and retry, False after :data:`WRITE_RETRY_S`."""
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    deadline = time.monotonic() + WRITE_RETRY_S
    while True:
        try:
            status.write_exit(directory.create(), ended_at=ended_at)  # somebody may have removed the folder meanwhile
        except OSError as error:
            log.warning("cannot write %s: %s", directory.exit, error)
            on_failure()
            if time.monotonic() > deadline:
                return False
            time.sleep(1.0)
        else:
            return True


if __name__ == "__main__":
    main()
