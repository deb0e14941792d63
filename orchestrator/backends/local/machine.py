"""The devices of this machine: GPUs by UUID and CPU cores by number.

GPUs are those of ``nvidia-smi`` that an inherited ``CUDA_VISIBLE_DEVICES`` allows. Cores are those that this process
may use, as many as the CPU quota of its control group allows.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.backends.processes import run_command

NVIDIA_SMI_TIMEOUT_S = 30.0
"""A GPU that fell off the bus (Xid 79) can block nvidia-smi forever."""

_FIELDS = "index,uuid,name,memory.total"
_FORMAT = "--format=csv,noheader,nounits"
_MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)]+)\)")
_GPU_LINE = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of a GPU."""

    index: int
    """nvidia-smi's, in the order of PCI bus ids. Instances have the index of their GPU."""
    uuid: str
    """``GPU-...`` or ``MIG-...``: the only name that is the same in every process and container."""
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that a run started from here may use."""

    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    hostname: str
    problem: str = ""
    """Why an existing ``nvidia-smi`` failed."""


def local_machine(environ: Mapping[str, str] | None = None) -> Machine:
    """Return this machine as a process with these environment variables (default: our own) may use it."""
    environ = os.environ if environ is None else environ
    gpus, problem = _all_gpus(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    cores = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()
    return Machine(
        gpus=gpus if visible is None else _visible(gpus, visible),
        cores=tuple(cores if quota is None else cores[: max(1, int(quota))]),
        hostname=socket.gethostname(),
        problem=problem,
    )


def _visible(gpus: tuple[Gpu, ...], text: str) -> tuple[Gpu, ...]:
    """Apply ``CUDA_VISIBLE_DEVICES`` as CUDA does: in the given order, up to the first entry that names no device."""
    visible: list[Gpu] = []
    for entry in text.split(","):
        name = entry.strip()
        if name.isdigit():
            # An index names a whole GPU; of one with MIG instances, CUDA uses the first (CUDA programming guide, MIG).
            found = [gpu for gpu in gpus if gpu.index == int(name)][:1]
        else:
            # CUDA accepts an abbreviated UUID if it is unambiguous.
            found = [gpu for gpu in gpus if name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)]
        if len(found) != 1:
            break
        if found[0] not in visible:
            visible.append(found[0])
    return tuple(visible)


def _all_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """Return every GPU that nvidia-smi lists, and why there are none if it fails."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return (), ""
    smi = partial(run_command, command, timeout_s=NVIDIA_SMI_TIMEOUT_S)
    answer = smi(f"--query-gpu={_FIELDS},mig.mode.current", _FORMAT)
    if not answer.ok:
        # Drivers from before MIG (R450) reject the whole query because of the one field they do not know.
        answer = smi(f"--query-gpu={_FIELDS}", _FORMAT)
    if not answer.ok:
        return (), f"nvidia-smi: {answer.text or f'exit code {answer.exit_code}'}"
    has_mig = "Enabled" in answer.stdout
    listing = smi("-L").stdout if has_mig else ""
    gpus: list[Gpu] = []
    for line in answer.stdout.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) < 4 or not values[0].isdigit():
            continue
        mebibytes = int(values[3]) if values[3].isdigit() else 0
        gpu = Gpu(index=int(values[0]), uuid=values[1], name=values[2], memory_bytes=mebibytes * 2**20)
        gpus += _mig_instances(listing, gpu) if values[4:] == ["Enabled"] else [gpu]
    return tuple(gpus), ""


def _mig_instances(listing: str, gpu: Gpu) -> list[Gpu]:
    instances: list[Gpu] = []
    listed = ""
    for line in listing.splitlines():
        if whole := _GPU_LINE.match(line):
            listed = whole["uuid"]
        elif listed == gpu.uuid and (instance := _MIG_LINE.match(line)):
            # The profile has the nominal memory: 3g.20gb has 20 GB.
            size = re.search(r"(\d+)gb", instance["profile"])
            memory_bytes = int(size[1]) * 10**9 if size else 0
            instances.append(Gpu(gpu.index, instance["uuid"], f"{gpu.name} MIG {instance['profile']}", memory_bytes))
    return instances


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the smallest CPU quota, in cores, of our control group and those above it; None without one.

    A container started with ``--cpus=2`` sees every core of its host and gets the time of two.
    """
    quotas: list[float] = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            # man 7 cgroups: hierarchy, controllers, path; version 2 has no controllers.
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            bottom = root / "cpu" if controllers else root
            parts = [part for part in path.split("/") if part not in {"", ".."}]
            # Inside a container the path may be the host's: its own group then is the root.
            groups = [bottom.joinpath(*parts[:n]) for n in range(len(parts) + 1)]
            quotas += [quota for group in groups if (quota := _quota(group)) > 0]
    return min(quotas, default=None)


def _quota(group: Path) -> float:
    """Return the quota of one control group; 0 or less without one."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
