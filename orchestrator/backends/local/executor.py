"""Local mode's executor: puts attempts into the queue, starts the queue process, cancels attempts.

Any command may be killed between any two lines here; ``orchestrator.submission.submitter`` describes how the next one
continues.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.backends import leases, processes
from orchestrator.backends.base import CANCELLED, Attempt, ForcedCancel, Receipt, Request, Status
from orchestrator.backends.local.machine import local_machine
from orchestrator.backends.local.observe import LocalObserver, SupervisorState, dead_supervisor
from orchestrator.backends.local.records import (
    DEFAULT_JOB,
    Entry,
    QueueFolder,
    check_runs_folder,
    claim_start,
    inherited_variables,
    supervisor_host,
)
from orchestrator.backends.local.status import status_of
from orchestrator.cluster.resources import fitting_gpus
from orchestrator.parallel_io import for_each
from workloads.contract import State

QUEUE_START_TIMEOUT_S = 60.0


class LocalExecutor:
    """Executes attempts on this machine."""

    cancel_wait_s = 20.0
    """A supervisor ends its run in less time, unless it is stopped or cannot write to a full disk."""

    def __init__(self, runs: Path, *, job: str = DEFAULT_JOB) -> None:
        self._folder = QueueFolder(runs)
        self._job = job

    @property
    def queue_alive(self) -> bool:
        return leases.is_held(leases.queue_name(self._folder.runs))

    def capacity(self) -> int | None:
        """Return None: the queue has no limit."""
        return None

    def submit(self, requests: Sequence[Request], *, wait: bool = True) -> list[Receipt]:  # noqa: ARG002
        """Put attempts into the queue, in order."""
        self._folder.create()
        for_each(Request.materialize, requests)
        machine = local_machine()
        environ = inherited_variables(os.environ)
        environ.pop(processes.TOKEN_VARIABLE, None)
        now = time.time()
        for number, request in enumerate(requests):
            expect = request.spec.expect
            gpus = fitting_gpus(machine.gpus, request.spec.train.hardware.kind)
            entry = Entry(
                token=request.token,
                run_id=request.spec.run_id,
                attempt=request.number,
                order=(now, number),
                python=sys.executable,
                working_directory=str(Path.cwd()),
                environ=environ,
                gpus=tuple(machine.gpus[index].uuid for index in gpus),
                cores=machine.cores,
                num_gpus=expect.gpus_per_node,
                num_ranks=expect.ranks,
                cpus_per_rank=expect.cpus_per_rank,
                job=self._job,
            )
            self._folder.put(entry)
        return [Receipt(request.token, State.PENDING, reason="queued") for request in requests]

    def supersede(self, attempts: Sequence[Attempt]) -> None:
        """Do nothing: a local attempt starts at most once."""

    def ensure_running(self) -> None:
        """Start the queue process if there is work and none runs. Raise CommandError if it does not start."""
        has_work = self._folder.tokens(self._folder.pending) or self._folder.tokens(self._folder.running)
        if not has_work or self.queue_alive:
            return
        check_runs_folder(self._folder.runs)
        # The process forks into the background, so this command returns once the queue holds its lease.
        argv = [sys.executable, "-P", "-m", "orchestrator.backends.local.queue", str(self._folder.runs)]
        environ = {k: v for k, v in os.environ.items() if k != processes.TOKEN_VARIABLE}
        answer = processes.run_command(*argv, timeout_s=QUEUE_START_TIMEOUT_S, environ=environ, outlives_us=True)
        if not answer.ok:
            raise answer.error()

    def status(self, attempts: Sequence[Attempt], *, fresh: bool = False) -> list[Status]:  # noqa: ARG002
        """Return the status of each attempt. Writes ``exit.json`` of a lost one, as nobody else is left to do so."""
        found = self._status(attempts)
        doubtful = [index for index, status in enumerate(found) if status.state is State.LOST]
        # Observe lost ones twice: their files may have been moved during the first time.
        again = self._status([attempts[index] for index in doubtful]) if doubtful else []
        for index, status in zip(doubtful, again, strict=True):
            found[index] = status
            attempt = attempts[index]
            if status.state is State.LOST and Status.read_exit(attempt.directory) is None:
                processes.kill_attempt(attempt.token)
                claim_start(attempt.directory)
                status.write_exit(attempt.directory)
                self._folder.finish(attempt.token)
        return found

    def _status(self, attempts: Sequence[Attempt]) -> list[Status]:
        observer = LocalObserver(self._folder)
        return [status_of(observer.observe(attempt)) for attempt in attempts]

    def cancel(self, attempts: Sequence[Attempt]) -> None:
        """Cancel attempts: those in the queue end now, running ones are ended by their supervisors."""
        self._folder.create()
        live = [attempt for attempt in attempts if Status.read_exit(attempt.directory) is None]
        # All requests go first: a full disk still takes these empty files, but no exit.json.
        for attempt in live:
            self._folder.request_cancel(attempt.token)
            self._folder.withdraw(attempt.token)
        for attempt in live:
            # Whoever claims the start decides: we do, and it never starts, or its supervisor, which sees the request. A
            # living supervisor may have lost its claim together with the attempt's folder.
            is_claimed = attempt.token in self._folder.tokens(self._folder.running)
            has_supervisor = is_claimed and leases.is_held(leases.supervisor_name(attempt.token))
            if not has_supervisor and claim_start(attempt.directory):
                replace(CANCELLED, message="cancelled before it started").write_exit(attempt.directory)
                self._folder.finish(attempt.token)

    def force_cancel(self, attempts: Sequence[Attempt]) -> list[ForcedCancel]:
        """End attempts whose supervisor does not respond: SIGKILL to it and its ranks on this machine."""
        return [self._force_cancel(attempt) for attempt in attempts]

    def _force_cancel(self, attempt: Attempt) -> ForcedCancel:
        token, directory = attempt.token, attempt.directory
        silent = f"did not respond within {self.cancel_wait_s:.0f} s"
        message = ""
        if supervisor := processes.find_supervisor(token):
            who = f"its supervisor, pid {supervisor} on this host, {silent}"
            if not processes.kill_supervised(token, supervisor):
                blocked = f"{who}; SIGKILL did not end all of its processes: the kernel blocks them"
                return ForcedCancel(token, False, blocked, "check orchestrate status until they have ended")
            message = f"{who}, so it and its ranks were killed"
            # The kernel's do_exit() frees the memory, and so /proc/PID/cmdline, before it closes the sockets.
            deadline = time.monotonic() + 5.0
            while leases.is_held(leases.supervisor_name(token)) and time.monotonic() < deadline:
                time.sleep(0.02)
        elif Status.read_exit(directory) is None and (place := self._unreachable_place(attempt)):
            message = f"its supervisor {place} {silent}, and its processes cannot be reached from here"
            return ForcedCancel(token, False, message, f"run orchestrate cancel {place}")
        # On a full disk this cannot be written; then the cancel request itself shows how the attempt ended.
        with contextlib.suppress(OSError):
            if Status.read_exit(directory) is None:
                claim_start(directory)
                CANCELLED.write_exit(directory)
            self._folder.finish(token)
        return ForcedCancel(token, True, message)

    def _unreachable_place(self, attempt: Attempt) -> str:
        """Return where a supervisor lives whose process is not visible here; empty if it has ended."""
        host, here = supervisor_host(attempt.directory), processes.Host.here()
        if leases.is_held(leases.supervisor_name(attempt.token)):
            return f"in another container on {here.name}"
        if host is not None and dead_supervisor(host, here) is SupervisorState.ELSEWHERE:
            return f"on {host.name}"
        return ""
