"""The order of the queue: its rounds in this process, with sleeping processes as supervisors."""

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
from orchestrator.backends.local.queue import LocalQueue
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
        self.queue = LocalQueue(self.folder, Machine(gpus=(), cores=(0,), hostname="here"), frozenset(GPUS))

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
    desk.queue.run_once()
    assert desk.running() == {"a", "b"}
    assert desk.folder.waiting_reasons() == {"c".ljust(16, "0"): "waits for 2 GPUs (0 of 4 free)"}


def test_small_runs_overtake_a_large_one_for_a_while(desk: Desk) -> None:
    small = desk.put("a", 1, order=1)
    desk.put("large", 4, order=2)
    desk.put("b", 1, order=3)
    desk.queue.run_once()
    assert desk.running() == {"a", "b"}
    desk.end(small)
    desk.put("c", 1, order=4)
    desk.queue.run_once()
    assert desk.running() == {"b", "c"}


def test_a_large_run_does_not_starve(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """After OVERTAKE_S free devices are reserved for it, and smaller ones that came later wait."""
    monkeypatch.setattr(queue_module, "OVERTAKE_S", 0.0)
    small = desk.put("a", 1, order=1)
    large = desk.put("large", 4, order=2)
    desk.queue.run_once()
    desk.put("late", 1, order=3)
    desk.queue.run_once()
    assert desk.running() == {"a"}
    assert desk.folder.waiting_reasons()[large] == "waits for 4 GPUs (0 of 4 free), is next"
    desk.end(small)
    desk.queue.run_once()
    assert desk.running() == {"large"}
    desk.end(large)
    desk.queue.run_once()
    assert desk.running() == {"late"}


def test_only_one_queue_of_the_machine_reserves_devices(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that each reserve half of what the other needs would wait forever."""
    monkeypatch.setattr(queue_module, "OVERTAKE_S", 0.0)
    permit = leases.acquire("reservation")
    assert permit is not None
    taken = leases.acquire(leases.gpu_name("GPU-a"))
    desk.put("large", 4, order=1)
    for _ in range(3):
        desk.queue.run_once()
    assert not leases.is_held(leases.gpu_name("GPU-b"))
    permit.release()
    for _ in range(2):
        desk.queue.run_once()
    assert leases.is_held(leases.gpu_name("GPU-b"))
    assert taken is not None
    taken.release()
    desk.queue.run_once()
    assert desk.running() == {"large"}
    assert not leases.is_held("reservation")


def test_a_withdrawn_run_releases_its_reservation(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "OVERTAKE_S", 0.0)
    taken = leases.acquire(leases.gpu_name("GPU-a"))
    assert taken is not None
    large = desk.put("large", 4, order=1)
    for _ in range(3):
        desk.queue.run_once()
    assert leases.is_held(leases.gpu_name("GPU-b"))
    desk.folder.withdraw(large)
    desk.queue.run_once()
    assert not leases.is_held(leases.gpu_name("GPU-b"))
    assert not leases.is_held("reservation")


def test_a_run_stays_on_the_gpus_its_submit_could_see(desk: Desk) -> None:
    """Submitted under CUDA_VISIBLE_DEVICES=2: waits for that one though others are free."""
    first = desk.put("a", 1, order=1, allowed=("GPU-c",))
    desk.put("b", 1, order=2, allowed=("GPU-c",))
    desk.queue.run_once()
    assert desk.running() == {"a"}
    assert leases.is_held(leases.gpu_name("GPU-c"))
    assert not leases.is_held(leases.gpu_name("GPU-a"))
    desk.end(first)
    desk.queue.run_once()
    assert desk.running() == {"b"}


def test_an_impossible_need_is_reported_and_blocks_no_other_run(desk: Desk) -> None:
    never = desk.put("never", 5, order=1)
    desk.put("a", 1, order=2)
    desk.queue.run_once()
    assert desk.running() == {"a"}
    assert desk.folder.waiting_reasons()[never] == "needs 5 GPUs, and may use 4 of this machine"


def test_missing_devices_are_replaced(desk: Desk) -> None:
    """Submitted from an allocation that has ended: the devices that the new queue sees replace the old ones."""
    desk.put("a", 1, order=1, allowed=("GPU-gone",))
    none = desk.put("none", 1, order=2, allowed=())
    here = Machine(gpus=(Gpu(0, "GPU-d", "A100", 0),), cores=(0,), hostname="here")
    desk.queue = LocalQueue(desk.folder, here, frozenset(GPUS))
    desk.queue.run_once()
    assert desk.running() == {"a"}
    assert leases.is_held(leases.gpu_name("GPU-d"))
    # CUDA_VISIBLE_DEVICES="" meant none, and still does.
    assert desk.folder.waiting_reasons()[none] == "needs 1 GPU, and may use 0 of this machine"


def test_a_damaged_entry_is_dropped(desk: Desk) -> None:
    (desk.folder.pending / "0123.json").write_text('{"token": ')
    (desk.folder.pending / "4567.json").write_text("[1]")
    desk.put("a", 1, order=1)
    desk.queue.run_once()
    assert desk.running() == {"a"}
    assert desk.folder.tokens(desk.folder.pending) == set()
