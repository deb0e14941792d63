"""Leases: one holder at most, held while any process that inherited them lives, visible without being acquired."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.backends import leases


@pytest.fixture(autouse=True)
def _own_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leases.DOMAIN_VARIABLE, str(tmp_path))


def test_one_holder_at_most() -> None:
    first = leases.acquire("gpu/GPU-1")
    assert first is not None
    assert leases.acquire("gpu/GPU-1") is None
    assert leases.acquire("gpu/GPU-2") is not None
    first.release()
    assert leases.acquire("gpu/GPU-1") is not None


def test_is_held_does_not_acquire() -> None:
    assert not leases.is_held("core/0")
    lease = leases.acquire("core/0")
    assert lease is not None
    assert leases.is_held("core/0")
    assert leases.is_held("core/0")
    lease.release()
    assert not leases.is_held("core/0")


def test_a_lease_lives_as_long_as_a_process_that_inherited_it() -> None:
    """Free only after the holder released it and its child was killed. A child without the socket holds nothing."""
    lease = leases.acquire("gpu/GPU-1")
    assert lease is not None
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    heir = subprocess.Popen(sleep, pass_fds=[lease.descriptor])
    stranger = subprocess.Popen(sleep)
    try:
        lease.release()
        assert leases.is_held("gpu/GPU-1")
        os.kill(heir.pid, signal.SIGKILL)
        heir.wait()
        assert not leases.is_held("gpu/GPU-1")
    finally:
        for process in (heir, stranger):
            process.kill()
            process.wait()


def test_domains_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leases.acquire("gpu/GPU-1") is not None
    monkeypatch.setenv(leases.DOMAIN_VARIABLE, "elsewhere" + str(os.getpid()))
    assert leases.acquire("gpu/GPU-1") is not None


def test_any_name_can_be_leased() -> None:
    """MIG names of old drivers are longer than the kernel's limit for addresses, paths hold anything."""
    for name in ("MIG-GPU-" + "a" * 200 + "/11/0", "queue/'ü\n\udcff"):
        lease = leases.acquire(name)
        assert lease is not None
        assert leases.is_held(name)
        lease.release()


def test_acquire_up_to_keeps_the_order() -> None:
    held = leases.acquire(leases.gpu_name("b"))
    assert held is not None
    names = [leases.gpu_name(uuid) for uuid in "abcd"]
    acquired = leases.acquire_up_to(names, 2)
    assert [lease.name for lease in acquired] == ["gpu/a", "gpu/c"]
    leases.release(acquired)
    assert not leases.is_held("gpu/a")
