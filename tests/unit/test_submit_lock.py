"""Submits of several login nodes on one runs folder: the first one works, and the others see it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.backends import leases, submit_lock
from orchestrator.backends.base import Observation
from orchestrator.backends.exit_status import unsubmitted_status
from orchestrator.backends.processes import Host
from workloads.contract import State

HERE, OTHER = Host("login1", "boot-1", "net-1"), Host("login2", "boot-2", "net-1")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Host], None]:
    """Switch to another host, which has its own leases."""

    def go(host: Host) -> None:
        monkeypatch.setattr(Host, "here", classmethod(lambda cls: host))
        monkeypatch.setenv(leases.DOMAIN_VARIABLE, f"{tmp_path} {host.name}")

    go(HERE)
    return go


def test_a_submit_is_visible_while_it_lasts(on: Callable[[Host], None], tmp_path: Path) -> None:
    """On its own host and on others; then the folder is free again."""
    with submit_lock.acquire(tmp_path) as first:
        assert first and submit_lock.holder(tmp_path) == ""
        with submit_lock.acquire(tmp_path) as second:
            assert not second, "a second submit on this host"
        on(OTHER)
        assert submit_lock.holder(tmp_path) == "login1"
        submitting = Observation(recorded=State.SUBMITTING, submit_host=submit_lock.holder(tmp_path))
        assert unsubmitted_status(submitting).message == "a submit on login1 is at work on it"
        with submit_lock.acquire(tmp_path) as third:
            assert not third, "a submit on another host"
        on(HERE)
    assert submit_lock.holder(tmp_path) is None
    on(OTHER)
    assert submit_lock.holder(tmp_path) is None
    with submit_lock.acquire(tmp_path) as last:
        assert last
    assert list((tmp_path / "queue" / "submits").iterdir()) == []


def test_the_file_of_a_killed_submit_counts_for_a_while(on: Callable[[Host], None], tmp_path: Path) -> None:
    """From another host it looks like a submit that waits; its own host is not blocked."""
    killed = submit_lock.acquire(tmp_path)
    with killed:
        (left,) = (tmp_path / "queue" / "submits").iterdir()
        content = left.read_bytes()
    left.write_bytes(content)
    with submit_lock.acquire(tmp_path) as same_host:
        assert same_host
    left.write_bytes(content)
    a_moment_ago = time.time() - 1
    os.utime(left, (a_moment_ago, a_moment_ago))
    on(OTHER)
    with submit_lock.acquire(tmp_path) as too_early:
        assert not too_early
    long_ago = time.time() - submit_lock.TRUSTED_S - 1
    os.utime(left, (long_ago, long_ago))
    assert submit_lock.holder(tmp_path) is None
    with submit_lock.acquire(tmp_path) as later:
        assert later


def test_of_two_that_start_at_once_one_works(on: Callable[[Host], None], tmp_path: Path) -> None:
    """The first one sees the second one's file too, and is not stopped by it."""
    with submit_lock.acquire(tmp_path):
        (file,) = (tmp_path / "queue" / "submits").iterdir()
        content = file.read_bytes()
    file.write_bytes(content)
    in_a_moment = time.time() + 5
    os.utime(file, (in_a_moment, in_a_moment))
    on(OTHER)
    with submit_lock.acquire(tmp_path) as first:
        assert first and submit_lock.holder(tmp_path) == "login1"


def test_a_damaged_file_is_another_host_without_a_name(on: Callable[[Host], None], tmp_path: Path) -> None:
    (tmp_path / "queue" / "submits").mkdir(parents=True)
    (tmp_path / "queue" / "submits" / "x.json").write_text("{")
    assert submit_lock.holder(tmp_path) == "another host"
