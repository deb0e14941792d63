"""This process among the ranks of its launch, and whether it got the planned hardware. Standard library only.

Four launchers are known, checked in this order because an inner one inherits the variables of the outer one: submitit's
local mode (also inside an allocation), torchrun, a Slurm step, and none. A batch script without ``srun`` is no step: it
is one process, whatever ``SLURM_NTASKS`` says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workloads.contract import Expectation
from workloads.errors import WrongHardwareError

MEMORY_TOLERANCE = 0.15
"""Vendors' gigabytes, driver reserves and error correction explain less; A100s with 40 and 80 GB differ by more."""
_NVIDIA_SMI_TIMEOUT_S = 20


class Launcher(StrEnum):
    """What started the ranks."""

    SUBMITIT_LOCAL = "submitit_local"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    SINGLE = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The position of this process among the ranks of its launch; the defaults are those of a single process."""

    launcher: Launcher
    rank: int = 0
    size: int = 1
    """Ranks on all nodes."""
    local_rank: int = 0
    """Rank on this node."""
    local_size: int = 1
    """Ranks on this node."""
    node: int = 0
    nodes: int = 1
    key: str
    """Equal on all ranks of one launch; every other launch, also of the same requeued job, has another one."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> World:
        """Read the launcher's variables. Raises WrongHardwareError where they contradict each other."""
        if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
            world = _of_submitit_local(env)
        elif {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= env.keys():
            world = _of_torchrun(env)
        elif {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
            world = _of_slurm(env)
        else:
            world = cls(launcher=Launcher.SINGLE, key=f"single-{os.getpid()}")
        if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size <= world.size):
            raise WrongHardwareError(
                f"{world.launcher} reports rank {world.rank} of {world.size} and local rank {world.local_rank} of "
                f"{world.local_size}",
                why="the variables of two launchers are mixed",
                hint="start the job with one launcher only",
            )
        return world


def _of_submitit_local(env: Mapping[str, str]) -> World:
    size, rank = int(env["SUBMITIT_LOCAL_NTASKS"]), int(env["SUBMITIT_LOCAL_GLOBALID"])
    key = f"local-{env.get('SUBMITIT_LOCAL_JOB_ID', '')}"
    return World(launcher=Launcher.SUBMITIT_LOCAL, key=key, rank=rank, size=size, local_rank=rank, local_size=size)


def _of_torchrun(env: Mapping[str, str]) -> World:
    size = int(env["WORLD_SIZE"])
    local_size = int(env.get("LOCAL_WORLD_SIZE", size))
    return World(
        launcher=Launcher.TORCHRUN,
        rank=int(env["RANK"]),
        size=size,
        local_rank=int(env["LOCAL_RANK"]),
        local_size=local_size,
        node=int(env.get("GROUP_RANK", 0)),
        nodes=int(env.get("GROUP_WORLD_SIZE", max(1, size // local_size))),
        key=f"torchrun-{env.get('TORCHELASTIC_RUN_ID', '')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _of_slurm(env: Mapping[str, str]) -> World:
    size = int(env["SLURM_STEP_NUM_TASKS"])
    nodes = int(env.get("SLURM_STEP_NUM_NODES", 1))
    node = int(env.get("SLURM_NODEID", 0))
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return World(
        launcher=Launcher.SLURM,
        rank=int(env["SLURM_PROCID"]),
        size=size,
        local_rank=int(env.get("SLURM_LOCALID", 0)),
        local_size=per_node[node] if node < len(per_node) else max(1, size // nodes),
        node=node,
        nodes=nodes,
        key="slurm-" + "-".join(env.get(f"SLURM_{k}", "0") for k in ("JOB_ID", "STEP_ID", "RESTART_COUNT")),
    )


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's run-length form: ``"2(x3),1"`` is ``[2, 2, 2, 1]``."""
    return [int(m[1]) for m in re.finditer(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(m[2] or 1))]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU."""

    name: str
    memory_bytes: int
    uuid: str


def visible_gpus(env: Mapping[str, str] = os.environ) -> list[Gpu] | None:
    """Return the GPUs that CUDA will see, without loading a framework; None when that is unknown.

    ``nvidia-smi --query-gpu`` lists no MIG slices, so the answer is None where one is selected.
    """
    command = shutil.which("nvidia-smi", path=env.get("PATH"))
    selected = env.get("CUDA_VISIBLE_DEVICES")
    if command is None or "MIG-" in (selected or ""):
        return None
    try:
        query = [command, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.check_output(
            query, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        rows = [[v.strip() for v in line.split(",")] for line in answer.splitlines() if line.strip()]
        all_gpus = {index: Gpu(name, int(mib) * 2**20, uuid) for index, uuid, name, mib, *_ in rows}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if selected is None:
        return list(all_gpus.values())
    visible = []
    for entry in (e.strip() for e in selected.split(",")):
        is_uuid = entry.startswith("GPU-")
        found = [gpu for index, gpu in all_gpus.items() if entry == index or (is_uuid and gpu.uuid.startswith(entry))]
        if len(found) != 1:
            break  # CUDA ignores all entries from the first invalid one on (CUDA C++ guide, CUDA_VISIBLE_DEVICES)
        visible += found
    return visible


def check(world: World, expect: Expectation, *, cpus: int, gpus: Sequence[Gpu] | None) -> None:
    """Compare the job's hardware with the plan's.

    Args:
        cpus: cores this rank may use.
        gpus: GPUs this rank sees; None while they are unknown, which skips their checks.

    Raises:
        WrongHardwareError: lists every difference.
    """
    differences = []
    if world.size != expect.ranks:
        differences.append(f"{_count(world.size, 'rank')} started ({world.launcher}), {expect.ranks} planned")
    elif world.nodes != expect.nodes:
        differences.append(f"{_count(world.nodes, 'node')} granted, {expect.nodes} planned")
    if cpus < expect.cpus_per_rank:
        differences.append(f"rank {world.rank} may use {_count(cpus, 'core')}, {expect.cpus_per_rank} planned")
    if gpus is not None and expect.gpus_per_node:
        differences += _gpu_differences(world, expect, gpus)
    if differences:
        raise _wrong_hardware(differences)


def check_distinct(uuids: Iterable[tuple[int, str]]) -> None:
    """Raise WrongHardwareError if two ranks share a GPU: they would measure half a GPU.

    Args:
        uuids: (node, UUID of the rank's device) in order of rank.
    """
    owner: dict[tuple[int, str], int] = {}
    for rank, device in enumerate(uuids):
        if device in owner:
            raise _wrong_hardware([f"ranks {owner[device]} and {rank} got the same GPU {device[1]}"])
        owner[device] = rank


def _gpu_differences(world: World, expect: Expectation, gpus: Sequence[Gpu]) -> list[str]:
    wrong = []
    # With srun --gpu-bind or --gpus-per-task a rank sees only its own GPUs; the ranks of a node add up.
    bound = world.local_size if len(gpus) < expect.gpus_per_node else 1
    if len(gpus) * bound < expect.gpus_per_node:
        wrong.append(f"{_count(len(gpus), 'GPU')} visible, {expect.gpus_per_node} a node planned")
    for index, gpu in enumerate(gpus):
        if expect.gpu_name and expect.gpu_name.lower() not in gpu.name.lower():
            wrong.append(f"GPU {index} is a {gpu.name}, {expect.gpu_name} planned")
        elif "MIG" in gpu.name and not expect.allow_mig:
            wrong.append(f"GPU {index} is a slice ({gpu.name}), a whole GPU planned")
        elif expect.gpu_memory_gb and abs(gpu.memory_bytes / 1e9 / expect.gpu_memory_gb - 1) > MEMORY_TOLERANCE:
            wrong.append(f"GPU {index} has {gpu.memory_bytes / 1e9:.1f} GB, {expect.gpu_memory_gb:g} GB planned")
    return wrong


def _wrong_hardware(differences: Sequence[str]) -> WrongHardwareError:
    return WrongHardwareError(
        "the job's hardware differs from the plan",
        why="; ".join(differences),
        hint="nothing was trained; compare the job's request with cluster.toml, then orchestrate retry",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
