"""How the ranks of one launch find each other: no fixed port, no name that must resolve. Imports no framework.

Rank 0 lets the system choose a free port, which it holds from then on, and publishes it in the attempt's folder; the
others wait for that file, for a bounded time, and try every address in it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

from workloads.errors import JobError
from workloads.files.json_file import read_json, write_json
from workloads.job.world import World

LOOPBACK = "127.0.0.1"

_POLL_EVERY_S = 0.05
_CONNECT_TIMEOUT_S = 2.0
_SCONTROL_TIMEOUT_S = 20
_SIOCGIFADDR = 0x8915


def publish(path: Path, world: World, port: int, addresses: list[str]) -> None:
    """Rank 0 says where it listens."""
    write_json(path, {"key": world.key, "port": port, "addresses": addresses})


def find(path: Path, world: World, timeout_s: float) -> tuple[str, int]:
    """Wait for rank 0's word; return an address that answers, and the port.

    Raises:
        JobError: it did not come, or no address answers, within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    problem = "rank 0 said nothing"
    while time.monotonic() < deadline:
        said = _read(path, world.key)
        if said is not None:
            for address in said["addresses"]:
                try:
                    socket.create_connection((address, said["port"]), timeout=_CONNECT_TIMEOUT_S).close()
                except OSError as error:
                    problem = f"{address} port {said['port']}: {error}"
                else:
                    return address, said["port"]
        time.sleep(_POLL_EVERY_S)
    raise JobError(
        f"rank {world.rank} did not reach rank 0 within {timeout_s:.0f} s",
        where=str(path),
        why=problem,
        hint="see rank 0's log; on several nodes, whether a firewall blocks connections between them",
    )


def _read(path: Path, key: str) -> dict[str, Any] | None:
    # Listing the folder makes an NFS client look again; it may remember for half a minute that a file was missing.
    if path not in path.parent.iterdir():
        return None
    said: dict[str, Any] = read_json(path)
    # A requeued job finds what its predecessor left.
    return said if said["key"] == key else None


def own_addresses(world: World) -> list[str]:
    """Addresses at which other ranks of this world may reach this host, the likeliest first."""
    if world.nodes == 1:
        return [LOOPBACK]
    # The scheduler's word is taken as it is. A host's own name often means its loopback to itself: of no use to others.
    names = [n for n in (socket.gethostname(), socket.getfqdn()) if not _resolve(n).startswith("127.")]
    interfaces = [a for a in _interfaces().values() if not a.startswith("127.")]
    return list(dict.fromkeys(a for a in (_slurm_node_address(), *names, *interfaces) if a))


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _slurm_node_address() -> str:
    """What the scheduler calls this node on the network; node names need not resolve."""
    node, scontrol = os.environ.get("SLURMD_NODENAME"), shutil.which("scontrol")
    if not node or scontrol is None:
        return ""
    try:
        done = subprocess.run(
            [scontrol, "show", "node", node], capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return match[1] if match else ""


def _interfaces() -> dict[str, str]:
    """Network interface -> its IPv4 address."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def interface_towards(address: str) -> str:
    """The network interface that a connection to ``address`` leaves by; empty when that cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return ""
    return next((name for name, own in _interfaces().items() if own == source), "")
