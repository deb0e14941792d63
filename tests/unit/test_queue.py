"""Who goes first: the queue's rounds in this process, with sleepers for supervisors."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends import leases
from orchestrator.backends.local import queue as queue_module
from orchestrator.backends.local.machine import Gpu, Machine
from orchestrator.backends.local.queue import Queue
from orchestrator.backends.local.records import Entry, QueueFolder

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


class Desk:
    """A queue and its entries; each supervisor is a process that sleeps until the test ends it."""

    def __init__(self, root: Path) -> None:
        self.folder = QueueFolder(root / "runs")
        self.folder.create()
        self.sleeper = root / "sleeper"
        self.sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
        self.sleeper.chmod(0o755)
        self.queue = Queue(self.folder, Machine(gpus=(), cores=(0,), hostname="here"), frozenset(GPUS))

    def put(self, name: str, gpus: int, order: int, allowed: tuple[str, ...] = GPUS) -> str:
        token = name.ljust(16, "0")
        self.folder.put(
            Entry(
                token=token,
                run_id="0123456789abcdef",
                attempt=1,
                order=(0.0, order),
                python=str(self.sleeper),
                working_directory="/",
                environ={leases.DOMAIN_VARIABLE: os.environ[leases.DOMAIN_VARIABLE]},
                gpus=allowed,
                cores=(0,),
                num_gpus=gpus,
                num_ranks=1,
                cpus_per_rank=0,
            )
        )
        return token

    def running(self) -> set[str]:
        """Names of what runs."""
        return {token.rstrip("0") for token, process in self._processes().items() if process.poll() is None}

    def end(self, token: str) -> None:
        process = self._processes()[token]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def _processes(self) -> dict[str, subprocess.Popen[bytes]]:
        return {t: p for t, p in self.queue._supervisors.items() if p is not None}

    def close(self) -> None:
        for process in self._processes().values():
            process.kill()
            process.wait()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    affinity = os.sched_getaffinity(0)
    monkeypatch.setenv(leases.DOMAIN_VARIABLE, str(tmp_path))
    desk = Desk(tmp_path)
    yield desk
    desk.close()
    os.sched_setaffinity(0, affinity)


def test_first_come_first_served(desk: Desk) -> None:
    desk.put("c", 2, order=3)
    desk.put("a", 2, order=1)
    desk.put("b", 2, order=2)
    desk.queue.turn()
    assert desk.running() == {"a", "b"}
    assert desk.folder.why_waiting() == {"c".ljust(16, "0"): "waits for 2 GPUs (0 of 4 free)"}


def test_small_ones_pass_a_large_one_for_a_while(desk: Desk) -> None:
    small = desk.put("a", 1, order=1)
    desk.put("large", 4, order=2)
    desk.put("b", 1, order=3)
    desk.queue.turn()
    assert desk.running() == {"a", "b"}
    desk.end(small)
    desk.put("c", 1, order=4)
    desk.queue.turn()
    assert desk.running() == {"b", "c"}


def test_a_large_one_does_not_wait_for_ever(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the patience, what becomes free is kept for it, and smaller ones that came later wait."""
    monkeypatch.setattr(queue_module, "PATIENCE_S", 0.0)
    small = desk.put("a", 1, order=1)
    large = desk.put("large", 4, order=2)
    desk.queue.turn()
    desk.put("late", 1, order=3)
    desk.queue.turn()
    assert desk.running() == {"a"}
    assert desk.folder.why_waiting()[large] == "waits for 4 GPUs (0 of 4 free), is next"
    desk.end(small)
    desk.queue.turn()
    assert desk.running() == {"large"}
    desk.end(large)
    desk.queue.turn()
    assert desk.running() == {"late"}


def test_only_one_queue_of_the_machine_keeps_devices(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that each kept half of what the other needs would wait for ever."""
    monkeypatch.setattr(queue_module, "PATIENCE_S", 0.0)
    permit = leases.acquire("reservation")
    assert permit is not None
    taken = leases.acquire(leases.gpu_name("GPU-a"))
    desk.put("large", 4, order=1)
    for _ in range(3):
        desk.queue.turn()
    assert not leases.is_held(leases.gpu_name("GPU-b"))
    permit.release()
    for _ in range(2):
        desk.queue.turn()
    assert leases.is_held(leases.gpu_name("GPU-b"))
    assert taken is not None
    taken.release()
    desk.queue.turn()
    assert desk.running() == {"large"}
    assert not leases.is_held("reservation")


def test_a_kept_run_that_is_withdrawn_gives_its_devices_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "PATIENCE_S", 0.0)
    taken = leases.acquire(leases.gpu_name("GPU-a"))
    assert taken is not None
    large = desk.put("large", 4, order=1)
    for _ in range(3):
        desk.queue.turn()
    assert leases.is_held(leases.gpu_name("GPU-b"))
    desk.folder.withdraw(large)
    desk.queue.turn()
    assert not leases.is_held(leases.gpu_name("GPU-b"))
    assert not leases.is_held("reservation")


def test_a_run_stays_on_the_gpus_its_submit_could_see(desk: Desk) -> None:
    """Submitted under CUDA_VISIBLE_DEVICES=2: waits for that one though others are free."""
    first = desk.put("a", 1, order=1, allowed=("GPU-c",))
    desk.put("b", 1, order=2, allowed=("GPU-c",))
    desk.queue.turn()
    assert desk.running() == {"a"}
    assert leases.is_held(leases.gpu_name("GPU-c"))
    assert not leases.is_held(leases.gpu_name("GPU-a"))
    desk.end(first)
    desk.queue.turn()
    assert desk.running() == {"b"}


def test_what_cannot_be_met_here_says_so_and_blocks_nobody(desk: Desk) -> None:
    never = desk.put("never", 5, order=1)
    desk.put("a", 1, order=2)
    desk.queue.turn()
    assert desk.running() == {"a"}
    assert desk.folder.why_waiting()[never] == "needs 5 GPUs, and may use 4 of this machine"


def test_devices_that_are_gone_are_made_up_for(desk: Desk) -> None:
    """Sent from an allocation that has ended: what the new queue's starter sees takes the place of the old devices."""
    desk.put("a", 1, order=1, allowed=("GPU-gone",))
    none = desk.put("none", 1, order=2, allowed=())
    here = Machine(gpus=(Gpu(0, "GPU-d", "A100", 0),), cores=(0,), hostname="here")
    desk.queue = Queue(desk.folder, here, frozenset(GPUS))
    desk.queue.turn()
    assert desk.running() == {"a"}
    assert leases.is_held(leases.gpu_name("GPU-d"))
    # CUDA_VISIBLE_DEVICES="" meant none, and still does.
    assert desk.folder.why_waiting()[none] == "needs 1 GPU, and may use 0 of this machine"


def test_a_damaged_entry_is_dropped(desk: Desk) -> None:
    (desk.folder.pending / "0123.json").write_text('{"token": ')
    (desk.folder.pending / "4567.json").write_text("[1]")
    desk.put("a", 1, order=1)
    desk.queue.turn()
    assert desk.running() == {"a"}
    assert desk.folder.tokens(desk.folder.pending) == set()
