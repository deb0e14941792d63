"""The queue: which run gets which device when, across workspaces, and what survives a killed queue."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

from orchestrator.backends import leases
from orchestrator.backends.base import Attempt, Request, Status
from orchestrator.backends.local import queue as queue_module
from orchestrator.backends.local.machine import local_machine
from orchestrator.backends.local.queue import LocalQueue
from orchestrator.backends.local.records import QueueFolder
from workloads.contract import State

from .conftest import UUIDS, Lab, alive, lab_processes, seen, wait_until


def devices_of_living_ranks(requests: list[Request]) -> list[str]:
    """GPU UUIDs in the environments of the ranks that live right now."""
    held: list[str] = []
    for request in requests:
        path = request.directory.path / "seen.0.json"
        if path.exists() and alive(seen(request)["pid"]):
            held += seen(request)["gpus"].split(",")
    return held


def test_two_workspaces_never_share_a_gpu(lab: Lab, other: Lab) -> None:
    """Four GPUs, two workspaces that submit at once, the queue of one killed -9 while runs go on, then restarted.

    No two living ranks ever have the same device, every run succeeds, and all devices are used.
    """
    specs = [(2, 0.6), (1, 0.4), (1, 0.8), (3, 0.3), (1, 0.2), (2, 0.5)]
    mine = lab.send(*[lab.spec(gpus=gpus, cpus_per_rank=0, sleep=sleep) for gpus, sleep in specs])
    theirs = other.send(*[other.spec(gpus=gpus, cpus_per_rank=0, sleep=sleep) for gpus, sleep in specs])
    everything = mine + theirs
    seen(mine[0])
    os.kill(lab.queue_pid(), signal.SIGKILL)
    killed_at = time.monotonic()
    most = 0
    restarted = False
    while not all(Status.read_exit(d.directory) for d in everything):
        held = devices_of_living_ranks(everything)
        assert len(held) == len(set(held)), "two living ranks hold one GPU"
        assert set(held) <= set(UUIDS)
        most = max(most, len(held))
        if not restarted and time.monotonic() - killed_at > 1.0:
            lab.executor.ensure_running()
            restarted = True
        assert time.monotonic() - killed_at < 40
        time.sleep(0.02)
    assert restarted
    assert most == 4
    assert [lab.wait_exit(d)[0].state for d in everything] == [State.SUCCEEDED] * 12


def test_runs_and_leases_survive_a_killed_queue(lab: Lab) -> None:
    """A rank that outlives the queue keeps its device; the next queue adopts it and starts what waits."""
    running, waiting = lab.send(lab.spec(gpus=4, cpus_per_rank=0, sleep=2.5), lab.spec(gpus=1, cpus_per_rank=0))
    rank = seen(running)
    os.kill(lab.queue_pid(), signal.SIGKILL)
    wait_until(lambda: not lab.executor.queue_alive)
    assert all(leases.is_held(leases.gpu_name(uuid)) for uuid in UUIDS)
    assert alive(rank["pid"])
    attempts = [Attempt(r.token, r.directory, State.PENDING) for r in (running, waiting)]
    assert [status.state for status in lab.executor.status(attempts)] == [State.RUNNING, State.PENDING]
    assert lab.executor.status(attempts)[1].reason == "no_queue"
    lab.executor.ensure_running()
    first, second = lab.wait_exit(running, waiting)
    assert first.state is second.state is State.SUCCEEDED
    assert seen(running)["pid"] == rank["pid"], "started once"
    assert seen(waiting)["time"] >= rank["time"] + 2.5


def test_a_run_without_queue_and_supervisor_is_lost(lab: Lab) -> None:
    """As after a reboot: no process is left, and the next status writes exit.json."""
    (run,) = lab.send(lab.spec(sleep=600))
    seen(run)
    os.kill(lab.queue_pid(), signal.SIGKILL)
    os.kill(seen(run)["session"], signal.SIGKILL)
    wait_until(lambda: not lab_processes(lab.domain))
    (found,) = lab.executor.status([Attempt(run.token, run.directory, State.RUNNING)])
    assert (found.state, found.reason) == (State.LOST, "supervisor_lost")
    ended = Status.read_exit(run.directory)
    assert ended is not None
    assert ended.state is State.LOST
    assert QueueFolder(lab.runs).tokens(QueueFolder(lab.runs).running) == set()


def test_a_claimed_entry_without_a_supervisor_is_started(lab: Lab) -> None:
    """The queue was killed between its claim and the supervisor's start; the next one starts it after a while."""
    request = lab.request(lab.spec())
    lab.executor.submit([request])
    assert QueueFolder(lab.runs).claim(request.token)
    with mock.patch.object(queue_module, "CLAIM_AGE_S", 0.0):
        LocalQueue(QueueFolder(lab.runs), local_machine(), frozenset()).run()
    assert lab.wait_exit(request)[0].state is State.SUCCEEDED


def test_an_attempt_submitted_twice_runs_once(lab: Lab) -> None:
    """The command that continues a killed submit cannot know which attempts that submitted."""
    (run,) = lab.send(lab.spec())
    lab.wait_exit(run)
    first = seen(run)
    lab.executor.submit([run])
    lab.executor.ensure_running()
    wait_until(lambda: not lab_processes(lab.domain))
    assert seen(run) == first
    assert "was started before: dropped" in (lab.runs / "queue/log.txt").read_text()
