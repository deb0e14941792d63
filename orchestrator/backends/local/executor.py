"""Local mode as the login side sees it: put attempts into the queue, look after it, ask for their end.

Every command may be killed between any two lines here; ``orchestrator.submission.submitter`` says how the next one
continues.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.backends import leases, processes
from orchestrator.backends.base import ForcedCancel, Receipt, Request, Status
from orchestrator.backends.exit_status import Exit
from orchestrator.backends.local.machine import local_machine
from orchestrator.backends.local.observe import LocalView, Supervisor, host_fate, started_on, verdict
from orchestrator.backends.local.records import (
    DEFAULT_JOB,
    Entry,
    QueueFolder,
    carried,
    check_runs_folder,
    claim_start,
    queue_name,
    supervisor_name,
)
from orchestrator.cluster.resources import fitting_gpus
from orchestrator.errors import CommandError
from orchestrator.parallel_io import for_each
from workloads.contract import State
from workloads.files.run_dir import AttemptDir

QUEUE_START_TIMEOUT_S = 60.0


class LocalExecutor:
    """Carries out attempts on this machine."""

    cancel_wait_s = 20.0
    """A supervisor needs less to end its run; one that takes longer is stopped, or has no room for its verdict."""

    def __init__(self, runs: Path, *, job: str = DEFAULT_JOB) -> None:
        self._folder = QueueFolder(runs)
        self._job = job

    @property
    def queue_alive(self) -> bool:
        return leases.is_held(queue_name(self._folder.runs))

    def capacity(self) -> int | None:
        """The queue takes any number."""
        return None

    def submit(self, requests: Sequence[Request], *, patient: bool = True) -> list[Receipt]:  # noqa: ARG002
        """Put attempts into the queue, in order."""
        self._folder.create()
        for_each(Request.materialize, requests)
        machine = local_machine()
        environ = carried(os.environ)
        environ.pop(processes.TOKEN_VARIABLE, None)
        now = time.time()
        for number, request in enumerate(requests):
            expect = request.spec.expect
            kind = request.spec.train.hardware.kind
            entry = Entry(
                token=request.token,
                run_id=request.spec.run_id,
                attempt=request.number,
                order=(now, number),
                python=sys.executable,
                working_directory=str(Path.cwd()),
                environ=environ,
                gpus=tuple(machine.gpus[index].uuid for index in fitting_gpus(machine.gpus, kind)),
                cores=machine.cores,
                num_gpus=expect.gpus_per_node,
                num_ranks=expect.ranks,
                cpus_per_rank=expect.cpus_per_rank,
                job=self._job,
            )
            self._folder.put(entry)
        return [Receipt(request.token, State.PENDING, reason="queued") for request in requests]

    def supersede(self, attempts: Sequence[tuple[AttemptDir, str]]) -> None:
        """An attempt starts at most once here."""

    def ensure_running(self) -> None:
        """Start the queue process when there is work and none runs.

        Raises:
            CommandError: it does not start.
        """
        if not self._folder.tokens(self._folder.pending) and not self._folder.tokens(self._folder.running):
            return
        if self.queue_alive:
            return
        check_runs_folder(self._folder.runs)
        # It forks into the background by itself, so this returns when it is there.
        argv = [sys.executable, "-P", "-m", "orchestrator.backends.local.queue", str(self._folder.runs)]
        environ = {k: v for k, v in os.environ.items() if k != processes.TOKEN_VARIABLE}
        try:
            done = subprocess.run(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=QUEUE_START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(argv, None, "", str(error)) from error
        if done.returncode != 0:
            raise CommandError(argv, done.returncode, done.stdout, done.stderr)

    def status(self, attempts: Iterable[tuple[AttemptDir, str, State]], *, fresh: bool = False) -> list[Status]:  # noqa: ARG002
        """The state of each attempt; a lost one gets its ``exit.json`` here, as nobody else is left to write it."""
        wanted = list(attempts)
        verdicts = self._verdicts(wanted)
        doubtful = [index for index, found in enumerate(verdicts) if found.state is State.LOST]
        # A second look, as files may have moved while we looked.
        for index, found in zip(doubtful, self._verdicts([wanted[i] for i in doubtful]), strict=True):
            verdicts[index] = found
            attempt, token, _ = wanted[index]
            if found.state is State.LOST and Exit.read(attempt) is None:
                self._record_loss(attempt, token, found)
        return verdicts

    def _verdicts(self, attempts: Sequence[tuple[AttemptDir, str, State]]) -> list[Status]:
        if not attempts:
            return []
        view = LocalView(self._folder, time.time())
        return [verdict(view.of(*attempt)) for attempt in attempts]

    def _record_loss(self, attempt: AttemptDir, token: str, found: Status) -> None:
        processes.kill_attempt(token)
        claim_start(attempt)
        Exit(found.state, found.reason, found.message).write(attempt)
        self._folder.finish(token)

    def cancel(self, attempts: Sequence[tuple[AttemptDir, str]]) -> None:
        """Ask for the end of attempts. What waits ends here and now, what runs is ended by its supervisor."""
        self._folder.create()
        going = [(attempt, token) for attempt, token in attempts if Exit.read(attempt) is None]
        # All are asked first: on a full disk that works, and writing what became of one does not.
        for _, token in going:
            self._folder.ask_cancel(token)
            self._folder.withdraw(token)
        for attempt, token in going:
            # Whoever claims the start decides: us, and it never starts, or its supervisor, which sees the request. One
            # that lives may have lost its claim with the attempt's folder.
            if not self._is_supervised(token) and claim_start(attempt):
                Exit(State.CANCELLED, "cancelled", "cancelled before it started").write(attempt)
                self._folder.finish(token)

    def force_cancel(self, attempts: Sequence[tuple[AttemptDir, str]]) -> list[ForcedCancel]:
        """End attempts whose supervisor does not answer: on this machine, it and its ranks get SIGKILL."""
        return [self._insist(attempt, token) for attempt, token in attempts]

    def _insist(self, attempt: AttemptDir, token: str) -> ForcedCancel:
        asked = f"was asked and has not answered in {self.cancel_wait_s:.0f} s"
        what = ""
        if supervisor := processes.find_supervisor(token):
            who = f"its supervisor, pid {supervisor} on this host, {asked}"
            if not processes.kill_supervised(token, supervisor):
                what = f"{who}; it and its ranks got SIGKILL, and not all are gone: stuck in the kernel"
                return ForcedCancel(token, False, what, "orchestrate status shows when they are gone")
            what = f"{who}, so it and its ranks were killed"
            self._wait_for_release(token)
        elif Exit.read(attempt) is None and (place := self._out_of_reach(attempt, token)):
            what = f"its supervisor {place} {asked}, and its processes are out of reach from here"
            return ForcedCancel(token, False, what, f"orchestrate cancel, {place}")
        # On a full disk this cannot be written; then the request itself tells how it ended.
        with contextlib.suppress(OSError):
            if Exit.read(attempt) is None:
                claim_start(attempt)
                Exit(State.CANCELLED, "cancelled", "stopped by orchestrate cancel").write(attempt)
            self._folder.finish(token)
        return ForcedCancel(token, True, what)

    def _wait_for_release(self, token: str) -> None:
        """A killed process lets go of its lease a moment after it is no more to be seen."""
        deadline = time.monotonic() + 5.0
        while leases.is_held(supervisor_name(token)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _out_of_reach(self, attempt: AttemptDir, token: str) -> str:
        """Where a supervisor lives that is none of the processes we see; empty when it is gone."""
        host, here = started_on(attempt), processes.Host.here()
        if leases.is_held(supervisor_name(token)):
            return f"in another container on {here.name}"
        elsewhere = host is not None and host_fate(host, here) is Supervisor.ELSEWHERE
        return f"on {host.name}" if host is not None and elsewhere else ""

    def _is_supervised(self, token: str) -> bool:
        """Whether a supervisor is at work, or just being started."""
        return token in self._folder.tokens(self._folder.running) and leases.is_held(supervisor_name(token))
