"""The process that looks after one run in local mode: starts its ranks, ends them together, writes how it ended.

Started by the queue, one a run, as ``python -m orchestrator.backends.local.supervisor``, in a session of its own. It
works without the queue: nothing here reads what only the queue knows. Pickle, logs and job id are submitit's; starting,
watching and ending the ranks is ours, because submitit's own controller shares the caller's process group, gives every
job the same GPUs, and waits for the peers of a dead rank until the time limit.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from submitit.core.utils import JobPaths
from submitit.local.local import LocalExecutor, LocalJob

from orchestrator.backends import processes
from orchestrator.backends.exit_status import (
    Ending,
    Exit,
    conclude,
    describe_exit,
    first_failure,
    hung_ranks,
    read_result_or_none,
)
from orchestrator.backends.local.records import Entry, Order, QueueFolder, check_runs_folder, claim_start
from workloads.contract import RunSpec, State
from workloads.files.json_file import read_json, write_json
from workloads.files.run_dir import AttemptDir, RunDir
from workloads.provenance import code_snapshot

log = logging.getLogger(__name__)

POLL_S = 0.2
PEER_GRACE_S = 2.0
"""After a rank died, its peers may say what they know before they are stopped."""
EARLY_EXIT_S = 4.0
"""A rank that left without an error and without saying it was done is dead to its peers after this long."""
STOP_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL. With the others above: a dead rank ends its run in less than 10 s."""
HANG_MARGIN_S = 10.0
"""The rank's own watchdog, which can tell where it is stuck, goes first by this much, or less for a short time-out."""
WARNING_S = 5.0
"""SIGUSR2 comes this long before the time limit, or a tenth of the limit for short ones. A rank ends at it between two
steps and loses no more than at the limit itself, so an early warning would only shorten the run."""
WRITE_RETRY_S = 60.0
"""How long the verdict is tried to be written on a full disk."""

_LAUNCHERS = re.compile(
    r"(SLURM|OMPI|PMIX?|TORCHELASTIC)_.*|((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""Variables of launchers that this process may have been started under; they would mislead the ranks."""


class _Executor(LocalExecutor):
    """submitit's local executor whose job is this very process: its pickles and file names, our processes."""

    def _submit_command(self, command: str) -> LocalJob[Any]:  # noqa: ARG002 (submitit's signature)
        tasks = list(range(self._num_tasks()))
        return LocalJob(folder=self.folder, job_id=str(os.getpid()), tasks=tasks)

    @property
    def command(self) -> list[str]:
        """What each rank runs."""
        return shlex.split(self._submitit_command_str)


def main() -> None:
    """Run one attempt to its end and write the verdict."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    os.umask(os.umask(0) | 0o002)
    order = Order(**json.loads(sys.argv[1]))
    folder = QueueFolder(Path(order.runs))
    entry = folder.read(folder.running, order.token)
    attempt = entry.attempt_dir(folder.runs)
    if not claim_start(attempt):
        log.info("attempt %s of run %s was started before: dropped", entry.attempt, entry.run_id)
        folder.finish(order.token)
        return
    try:
        check_runs_folder(folder.runs, attempt)
        spec = RunDir.of(folder.runs, entry.run_id).read_spec()
        ended = _Controller(order, entry, spec, folder, attempt).run()
    except Exception as error:
        log.exception("could not start")
        processes.kill_attempt(order.token, session=os.getpid())
        ended = Exit(State.FAILED, "start_failed", f"the run could not be started: {error}")
    if _write_persistently(ended, attempt, partial(folder.mark_unreported, order.token)):
        folder.finish(order.token)


class _Controller:
    """The ranks of one attempt, from start to verdict."""

    def __init__(self, order: Order, entry: Entry, spec: RunSpec, folder: QueueFolder, attempt: AttemptDir) -> None:
        self._order, self._entry, self._spec, self._folder, self._attempt = order, entry, spec, folder, attempt
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._job_id = str(os.getpid())
        self._started = time.monotonic()
        self._exited_at: dict[int, float] = {}
        """Rank -> when it was first seen to be gone."""
        self._signs: dict[int, tuple[int, float]] = {}
        """Rank -> time of its progress file, and when we saw it come."""
        self._stop_signal: str = ""
        self._warned = False
        self._oom_kills = processes.num_oom_kills()

    def run(self) -> Exit:
        """Start the ranks and wait for their end, of their own or by us."""
        # Before the pickle is made, so that a signal in between is not lost.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        command = self._prepare()
        ending: Ending | None = None
        try:
            if self._cancelled() is None:
                self._start(command)
            ending = self._watch()
            self._stop()
        finally:
            strays_gone = processes.kill_attempt(self._order.token, session=os.getpid())
        if not strays_gone:
            log.warning("processes of this run could not be killed; its devices stay leased until they end")
        codes = [rank.poll() for rank in self._ranks]
        return conclude(
            exit_codes=codes,
            ending=ending,
            result=read_result_or_none(self._attempt),
            failure=first_failure(self._attempt, self._entry.num_ranks),
            hung=hung_ranks(self._attempt, self._entry.num_ranks),
            oom_killed=self._oom_kills is not None and (processes.num_oom_kills() or 0) > self._oom_kills,
            last_words=self._last_words(),
        )

    def _prepare(self) -> list[str]:
        """Let submitit write the pickle; returns the command that loads and runs it."""
        module, _, function = self._entry.job.partition(":")
        job = getattr(importlib.import_module(module), function)
        executor = _Executor(self._attempt.job_folder, python=shlex.quote(self._entry.python))
        executor.update_parameters(
            tasks_per_node=self._entry.num_ranks, timeout_min=self._spec.execution.time_limit_s / 60
        )
        executor.submit(job, str(RunDir.of(self._folder.runs, self._entry.run_id).path), self._entry.attempt)
        self._record_job_id()
        return executor.command

    def _record_job_id(self) -> None:
        try:
            submission = read_json(self._attempt.submission)
        except (OSError, ValueError):
            submission = {"token": self._order.token, "target": "local", "attempt": self._entry.attempt}
        write_json(self._attempt.submission, {**submission, "job_id": self._job_id})

    def _start(self, command: Sequence[str]) -> None:
        parent = os.getpid()
        per_rank = self._entry.cpus_per_rank
        directory = self._entry.working_directory
        for rank in range(self._entry.num_ranks):
            cores = self._order.cores[rank * per_rank : (rank + 1) * per_rank]
            with self._log_files(rank) as (stdout, stderr):
                self._ranks.append(
                    subprocess.Popen(
                        command,
                        env=self._environment(rank),
                        cwd=directory if Path(directory).is_dir() else self._folder.runs,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        pass_fds=self._order.leases,
                        process_group=0,
                        preexec_fn=partial(_settle_rank, parent, cores),
                    )
                )
        self._started = time.monotonic()

    @contextlib.contextmanager
    def _log_files(self, rank: int) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        paths = JobPaths(self._attempt.job_folder, self._job_id, rank)
        with open(paths.stdout, "ab") as stdout, open(paths.stderr, "ab") as stderr:
            yield stdout, stderr

    def _environment(self, rank: int) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not _LAUNCHERS.fullmatch(k)}
        entry, limit_s = self._entry, self._spec.execution.time_limit_s
        return inherited | {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": self._job_id,
            "SUBMITIT_LOCAL_NTASKS": str(entry.num_ranks),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(rank),
            "SUBMITIT_LOCAL_TIMEOUT_S": str(limit_s),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(self._order.gpus),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(max(1, entry.cpus_per_rank)),
            "PYTHONPATH": code_snapshot.pythonpath(
                self._folder.runs, self._spec.snapshot, inherited.get("PYTHONPATH", "")
            ),
            # A user's own db.py in the working directory must not stand in for ours.
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            # Its notes on pickles would stand first and last in every log.
            "SUBMITIT_LOG_LEVEL": inherited.get("SUBMITIT_LOG_LEVEL", "WARNING"),
            processes.TOKEN_VARIABLE: self._order.token,
        }

    def _watch(self) -> Ending | None:
        """Wait until all ranks have ended; why the run must end now, when it must."""
        reasons: tuple[Callable[[], Ending | None], ...] = (
            self._cancelled,
            self._rank_died,
            self._out_of_time,
            self._silent,
        )
        while True:
            for rank, process in enumerate(self._ranks):
                if process.poll() is not None:
                    self._exited_at.setdefault(rank, time.monotonic())
            if len(self._exited_at) == len(self._ranks) and self._ranks:
                return self._over_time() if any(self._heeded_warning(rank.returncode) for rank in self._ranks) else None
            for reason in reasons:
                if ending := reason():
                    return ending
            time.sleep(POLL_S)

    def _stop(self) -> None:
        """SIGTERM to the ranks that are left, SIGKILL to what then still is; their children go with the attempt."""
        left = [rank for rank in self._ranks if rank.poll() is None]
        for number, grace_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
            for rank in left:
                rank.send_signal(number)
            deadline = time.monotonic() + grace_s
            while left and time.monotonic() < deadline:
                time.sleep(POLL_S / 4)
                left = [rank for rank in left if rank.poll() is None]

    def _cancelled(self) -> Ending | None:
        if self._folder.is_cancelled(self._order.token):
            return Ending(State.CANCELLED, "cancelled", "stopped by orchestrate cancel")
        if self._stop_signal:
            return Ending(
                State.CANCELLED,
                "signal",
                f"the supervisor got {self._stop_signal}: a shutdown, the end of an allocation, or somebody's kill",
            )
        return None

    def _rank_died(self) -> Ending | None:
        """One rank gone while others go on: they would wait for it for ever."""
        now = time.monotonic()
        for rank, at in self._exited_at.items():
            code = self._ranks[rank].returncode
            if self._heeded_warning(code):
                return self._over_time()
            if code != 0 and now - at >= PEER_GRACE_S:
                return Ending(
                    State.FAILED, "program_error", f"rank {rank} {describe_exit(code)}, so the others were stopped"
                )
            if code == 0 and now - at >= EARLY_EXIT_S and not self._is_done(rank):
                return Ending(State.FAILED, "rank_left", f"rank {rank} left while the others went on")
        return None

    def _is_done(self, rank: int) -> bool:
        return _progress(self._attempt, rank).get("phase") == "done"

    def _out_of_time(self) -> Ending | None:
        limit_s = self._spec.execution.time_limit_s
        elapsed_s = time.monotonic() - self._started
        if elapsed_s >= limit_s:
            return self._over_time()
        if not self._warned and elapsed_s >= limit_s - min(WARNING_S, limit_s / 10):
            self._warned = True
            for rank in self._ranks:
                # Not to the group: data loader workers would die of it.
                rank.send_signal(signal.SIGUSR2)
        return None

    def _heeded_warning(self, code: int | None) -> bool:
        """Whether a rank ended because of our SIGUSR2: as told, or before it could listen."""
        return self._warned and code in {os.EX_TEMPFAIL, -signal.SIGUSR2}

    def _over_time(self) -> Ending:
        return Ending(State.TIMEOUT, "time_limit", f"its time limit of {self._spec.execution.time_limit_s} s was over")

    def _silent(self) -> Ending | None:
        timeout_s = self._spec.execution.hang_timeout_s
        if timeout_s == 0:
            return None
        allowed_s = timeout_s + min(HANG_MARGIN_S, 1.0 + timeout_s / 10)
        for rank in range(len(self._ranks)):
            if rank not in self._exited_at and time.monotonic() - self._last_sign(rank) >= allowed_s:
                return Ending(State.FAILED, "hang", f"rank {rank} made no progress for {timeout_s} s")
        return None

    def _last_sign(self, rank: int) -> float:
        """When the time of a rank's progress file last changed, by a clock that nobody sets: the time itself may come
        from another machine's, and this one's may jump."""
        written, seen_at = self._signs.get(rank, (None, self._started))
        with contextlib.suppress(OSError):
            now = self._attempt.progress(rank).stat().st_mtime_ns
            if now != written:
                seen_at = time.monotonic()
                self._signs[rank] = (now, seen_at)
        return seen_at

    def _note_signal(self, number: int, frame: object) -> None:  # noqa: ARG002 (signal's signature)
        self._stop_signal = signal.Signals(number).name

    def _last_words(self) -> str:
        """The last line of the error log of the rank that failed first, unless it was killed and could say nothing."""
        silent = {0, None, -signal.SIGKILL}
        failed = [rank for rank in self._exited_at if self._ranks[rank].returncode not in silent]
        if not failed:
            return ""
        stderr = JobPaths(self._attempt.job_folder, self._job_id, failed[0]).stderr
        with contextlib.suppress(OSError), open(stderr, "rb") as stream:
            return _last_line(stream)
        return ""


def _settle_rank(parent: int, cores: Sequence[int]) -> None:
    """In the rank, before it becomes Python: dies with the supervisor, runs on its own cores (anywhere without any)."""
    processes.die_with(parent)
    if cores:
        os.sched_setaffinity(0, cores)


def _progress(attempt: AttemptDir, rank: int) -> Mapping[str, Any]:
    try:
        data = read_json(attempt.progress(rank))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _last_line(stream: IO[bytes]) -> str:
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4096))
    lines = stream.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _write_persistently(ended: Exit, attempt: AttemptDir, say_so: Callable[[], None]) -> bool:
    """Write the verdict, waiting for room on a full disk; False when there was none for :data:`WRITE_RETRY_S`.

    Args:
        say_so: called while it cannot be written.
    """
    deadline = time.monotonic() + WRITE_RETRY_S
    while True:
        try:
            ended.write(attempt.create())  # it may have been removed meanwhile
        except OSError as error:
            log.warning("cannot write %s: %s", attempt.exit, error)
            say_so()
            if time.monotonic() > deadline:
                return False
            time.sleep(1.0)
        else:
            return True


if __name__ == "__main__":
    main()
