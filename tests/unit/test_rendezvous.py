"""How ranks find each other: through a file, without a fixed port or resolvable host names."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from pathlib import Path

import pytest

from workloads.errors import JobError
from workloads.job import rendezvous
from workloads.job.world import World

RANK_1 = World.from_environment(
    {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "9",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
    }
)


def test_the_first_address_that_answers_is_taken(tmp_path: Path) -> None:
    """A name that does not resolve and an address nobody listens at are passed over."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        rendezvous.publish(tmp_path / "r.json", RANK_1, port, ["no-such-host.invalid", "127.0.0.2", "127.0.0.1"])
        assert rendezvous.find(tmp_path / "r.json", RANK_1, timeout_s=10) == ("127.0.0.1", port)


def test_the_address_of_an_earlier_launch_is_ignored(tmp_path: Path) -> None:
    """What another launch of the same attempt left is ignored until rank 0 of this one has spoken."""
    path = tmp_path / "r.json"
    with socket.create_server(("127.0.0.1", 0)) as stale, socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous.publish(path, dataclasses.replace(RANK_1, key="before"), stale.getsockname()[1], ["127.0.0.1"])
        port = server.getsockname()[1]
        late = threading.Timer(0.3, rendezvous.publish, (path, RANK_1, port, ["127.0.0.1"]))
        late.start()
        assert rendezvous.find(path, RANK_1, timeout_s=10) == ("127.0.0.1", port)
        late.join()


def test_the_wait_is_bounded_and_the_error_has_the_reason(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(JobError) as caught:
        rendezvous.find(tmp_path / "r.json", RANK_1, timeout_s=0.3)
    assert time.monotonic() - started < 2
    assert "rank 1 did not reach rank 0 within 0 s" in str(caught.value) and "has published no address" in str(
        caught.value
    )


def test_one_host_uses_its_loopback_address() -> None:
    assert rendezvous.own_addresses(RANK_1) == ["127.0.0.1"]
    assert rendezvous.interface_towards("127.0.0.1") == "lo"
    assert rendezvous.interface_towards("no-such-host.invalid") == ""


def test_several_nodes_use_the_address_of_slurm_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``NodeAddr`` of ``scontrol show node`` comes first, as it is; the host's own loopback name is never offered."""
    tool = tmp_path / "scontrol"
    tool.write_text(
        '#!/bin/sh\necho "NodeName=$3 Arch=x86_64"\necho "   NodeAddr=10.1.2.3 NodeHostName=$3 Version=1"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURMD_NODENAME", "gcn6")
    addresses = rendezvous.own_addresses(dataclasses.replace(RANK_1, nodes=2))
    assert addresses[0] == "10.1.2.3"
    assert not any(a.startswith("127.") for a in addresses[1:])
