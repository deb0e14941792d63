"""What this machine offers: GPUs by UUID and CPU cores by number. Read by the planner, the queue and ``doctor``.

GPUs come from ``nvidia-smi`` on PATH, cut down to what an inherited ``CUDA_VISIBLE_DEVICES`` allows, whichever way
that was written. Cores are those this process may use, cut down to the CPU quota of its control group.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NVIDIA_SMI_TIMEOUT_S = 30.0
"""A GPU that fell off the bus can block nvidia-smi for ever."""

_FIELDS = "index,uuid,name,memory.total"
_MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)]+)\)")
_GPU_LINE = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of a GPU."""

    index: int
    """nvidia-smi's, which is the order of PCI bus ids. Instances have their GPU's."""
    uuid: str
    """``GPU-...`` or ``MIG-...``: the only name that means the same in every process and container."""
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that a run started from here may use."""

    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    hostname: str
    problem: str = ""
    """Why GPUs could not be asked for, when ``nvidia-smi`` is there and fails."""


def local_machine(environ: Mapping[str, str] | None = None) -> Machine:
    """This machine as a process with these environment variables (default: our own) may use it."""
    environ = os.environ if environ is None else environ
    gpus, problem = _all_gpus(environ)
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    return Machine(
        gpus=gpus if allowed is None else _visible(gpus, allowed),
        cores=_usable_cores(),
        hostname=socket.gethostname(),
        problem=problem,
    )


def _visible(gpus: tuple[Gpu, ...], text: str) -> tuple[Gpu, ...]:
    """Apply ``CUDA_VISIBLE_DEVICES`` as CUDA does: in the order given, up to the first entry that names no device."""
    chosen: list[Gpu] = []
    for entry in text.split(","):
        name = entry.strip()
        if name.isdigit():
            # An index names a whole GPU; of one that is cut into instances, CUDA uses the first.
            found = [gpu for gpu in gpus if gpu.index == int(name)][:1]
        else:
            # CUDA accepts a shortened UUID when it is unambiguous.
            found = [gpu for gpu in gpus if name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)]
        if len(found) != 1:
            break
        if found[0] not in chosen:
            chosen.append(found[0])
    return tuple(chosen)


def _all_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """Every GPU that nvidia-smi shows, and why there are none when it fails."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return (), ""
    listing, problem = _ask(command, f"--query-gpu={_FIELDS},mig.mode.current", "--format=csv,noheader,nounits")
    if problem:
        # Drivers before MIG refuse the whole query for the one field they do not know.
        listing, problem = _ask(command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    if problem:
        return (), problem
    gpus: list[Gpu] = []
    instances: dict[str, list[tuple[str, str]]] | None = None
    for line in listing.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) < 4 or not values[0].isdigit():
            continue
        mebibytes = int(values[3]) if values[3].isdigit() else 0
        gpu = Gpu(index=int(values[0]), uuid=values[1], name=values[2], memory_bytes=mebibytes * 2**20)
        if values[4:] == ["Enabled"]:
            instances = _mig_instances(command) if instances is None else instances
            gpus += [
                Gpu(gpu.index, uuid, f"{gpu.name} MIG {profile}", _mig_memory_bytes(profile))
                for profile, uuid in instances.get(gpu.uuid, [])
            ]
        else:
            gpus.append(gpu)
    return tuple(gpus), ""


def _mig_instances(command: str) -> dict[str, list[tuple[str, str]]]:
    """GPU UUID -> (profile, instance UUID) of each of its instances."""
    listing, _ = _ask(command, "-L")
    instances: dict[str, list[tuple[str, str]]] = {}
    current = ""
    for line in listing.splitlines():
        if whole := _GPU_LINE.match(line):
            current = whole["uuid"]
        elif instance := _MIG_LINE.match(line):
            instances.setdefault(current, []).append((instance["profile"], instance["uuid"]))
    return instances


def _mig_memory_bytes(profile: str) -> int:
    """Nominal: ``3g.20gb`` has 20 GB."""
    match = re.search(r"(\d+)gb", profile)
    return int(match[1]) * 10**9 if match else 0


def _ask(command: str, *arguments: str) -> tuple[str, str]:
    """Standard output, and the reason when the command failed."""
    try:
        done = subprocess.run(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi: {error}"
    if done.returncode != 0:
        return "", f"nvidia-smi: {(done.stderr or done.stdout).strip() or f'exit code {done.returncode}'}"
    return done.stdout, ""


def _usable_cores() -> tuple[int, ...]:
    """Cores this process may run on, no more of them than its control group has quota for."""
    cores = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()
    return tuple(cores if quota is None else cores[: max(1, int(quota))])


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The smallest CPU quota, in cores, of our control group and those above it; None without one.

    A container started with ``--cpus=2`` sees every core of its host and gets the time of two.
    """
    quotas: list[float] = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bottom, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            bottom, read = root / "cpu", _quota_v1
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        # Inside a container the path may be the host's: its own group then stands at the root.
        quotas += [
            quota
            for n in range(len(parts) + 1)
            if (quota := read(bottom.joinpath(*parts[:n]))) is not None and quota > 0
        ]
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
