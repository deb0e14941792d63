"""How the ranks of one launch find each other, without a fixed port or resolvable host names. Imports no framework.

Rank 0 listens on a port that the kernel chooses and publishes it in the attempt's folder. The other ranks wait for that
file, for a bounded time, and try each of its addresses.
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
"""netdevice(7): get the address of an interface."""


def publish(path: Path, world: World, port: int, addresses: list[str]) -> None:
    """Publish where rank 0 listens."""
    write_json(path, {"key": world.key, "port": port, "addresses": addresses})


def find(path: Path, world: World, timeout_s: float) -> tuple[str, int]:
    """Wait for rank 0's file; return an address that answers, and the port.

    Raises:
        JobError: the file does not appear, or no address answers, within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    problem = "rank 0 has published no address"
    while time.monotonic() < deadline:
        published = _read(path, world.key)
        if published is not None:
            for address in published["addresses"]:
                try:
                    socket.create_connection((address, published["port"]), timeout=_CONNECT_TIMEOUT_S).close()
                except OSError as error:
                    problem = f"{address} port {published['port']}: {error}"
                else:
                    return address, published["port"]
        time.sleep(_POLL_EVERY_S)
    raise JobError(
        f"rank {world.rank} did not reach rank 0 within {timeout_s:.0f} s",
        where=str(path),
        why=problem,
        hint="read rank 0's log; on several nodes, check that no firewall blocks connections between them",
    )


def _read(path: Path, key: str) -> dict[str, Any] | None:
    # An NFS client caches that a name is missing, up to acdirmax (60 s, nfs(5)); listing the folder asks the server.
    if path not in path.parent.iterdir():
        return None
    published: dict[str, Any] = read_json(path)
    # The file of an earlier launch of a requeued job has another key.
    return published if published["key"] == key else None


def own_addresses(world: World) -> list[str]:
    """Return addresses at which other ranks may reach this host, the likeliest first."""
    if world.nodes == 1:
        return [LOOPBACK]
    # Debian maps a host's own name to 127.0.1.1 in /etc/hosts (Debian reference 5.1.1), which other hosts cannot use.
    names = [n for n in (socket.gethostname(), socket.getfqdn()) if not _resolve(n).startswith("127.")]
    interfaces = [a for a in _interfaces().values() if not a.startswith("127.")]
    return list(dict.fromkeys(a for a in (_slurm_node_address(), *names, *interfaces) if a))


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _slurm_node_address() -> str:
    """Return the address of this node in slurm.conf (NodeAddr); node names need not resolve."""
    node, scontrol = os.environ.get("SLURMD_NODENAME"), shutil.which("scontrol")
    if not node or scontrol is None:
        return ""
    try:
        command = [scontrol, "show", "node", node]
        answer = subprocess.check_output(command, text=True, timeout=_SCONTROL_TIMEOUT_S, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"\bNodeAddr=(\S+)", answer)
    return match[1] if match else ""


def _interfaces() -> dict[str, str]:
    """Return network interface -> IPv4 address."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def interface_towards(address: str) -> str:
    """Return the network interface on the route to ``address``; empty when it is unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # connecting a UDP socket sends nothing, it only chooses a route
            source = probe.getsockname()[0]
    except OSError:
        return ""
    return next((name for name, own in _interfaces().items() if own == source), "")
