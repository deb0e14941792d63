"""Who am I among the ranks of a launch, and was I given what the plan asked for? Standard library only.

Four launchers are understood, looked for in this order because an inner one inherits the outer one's variables:
submitit's local mode (also inside an allocation), torchrun, a Slurm step, and none. A batch script without ``srun`` is
no step: there is one process then, whatever ``SLURM_NTASKS`` says.
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
"""Vendors' gigabytes, drivers' reserves and error correction differ by less; an A100 of 40 and one of 80 GB by more."""

_NVIDIA_SMI_TIMEOUT_S = 20


class Launcher(StrEnum):
    """What started the ranks."""

    SUBMITIT_LOCAL = "submitit_local"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    SINGLE = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The place of this process among the ranks of its launch."""

    launcher: Launcher
    rank: int
    size: int
    """Ranks over all nodes."""
    local_rank: int
    """Rank on this node."""
    local_size: int
    """Ranks on this node."""
    node: int
    nodes: int
    key: str
    """The same for all ranks of one launch, different for any other launch, also of the same requeued job."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> World:
        """Read the launcher's variables.

        Raises:
            WrongHardwareError: they contradict each other.
        """
        if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
            world = _of_submitit_local(env)
        elif {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= env.keys():
            world = _of_torchrun(env)
        elif {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
            world = _of_slurm(env)
        else:
            world = cls(
                launcher=Launcher.SINGLE,
                rank=0,
                size=1,
                local_rank=0,
                local_size=1,
                node=0,
                nodes=1,
                key=f"single-{os.getpid()}",
            )
        if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size <= world.size):
            raise WrongHardwareError(
                f"{world.launcher} says rank {world.rank} of {world.size} and local rank {world.local_rank} of "
                f"{world.local_size}",
                why="the variables of two launchers are mixed",
                hint="start the job with one launcher only",
            )
        return world


def _of_submitit_local(env: Mapping[str, str]) -> World:
    size = int(env["SUBMITIT_LOCAL_NTASKS"])
    rank = int(env["SUBMITIT_LOCAL_GLOBALID"])
    return World(
        launcher=Launcher.SUBMITIT_LOCAL,
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        node=0,
        nodes=1,
        key=f"local-{env.get('SUBMITIT_LOCAL_JOB_ID', '')}",
    )


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
    """Slurm's run-length form: ``"2(x3),1"`` is ``[2, 2, 2, 1]``."""
    return [int(m[1]) for m in re.finditer(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(m[2] or 1))]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU."""

    name: str
    memory_bytes: int
    uuid: str


def visible_gpus(env: Mapping[str, str] = os.environ) -> list[Gpu] | None:
    """The GPUs that CUDA will show us, asked without loading a framework; None when it cannot be told.

    Slices of a GPU (MIG) are only known to the framework, so with one selected the answer is None too.
    """
    command = shutil.which("nvidia-smi", path=env.get("PATH"))
    selected = env.get("CUDA_VISIBLE_DEVICES")
    if selected is not None and "MIG-" in selected:
        return None
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        rows = [[v.strip() for v in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        all_gpus = {index: Gpu(name, int(mib) * 2**20, uuid) for index, uuid, name, mib, *_ in rows}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if selected is None:
        return list(all_gpus.values())
    visible = []
    for entry in (e.strip() for e in selected.split(",")):
        found = [
            g for i, g in all_gpus.items() if entry == i or (entry.startswith("GPU-") and g.uuid.startswith(entry))
        ]
        if len(found) != 1:
            break  # CUDA stops at the first entry it does not know
        visible += found
    return visible


def check(world: World, expect: Expectation, *, cpus: int, gpus: Sequence[Gpu] | None) -> None:
    """Compare what was granted with what the plan asked for.

    Args:
        cpus: cores this rank may use.
        gpus: what this rank sees; None when that is not known yet, and then nothing is said about GPUs.

    Raises:
        WrongHardwareError: names every difference.
    """
    wrong = []
    if world.size != expect.ranks:
        wrong.append(f"{_count(world.size, 'rank')} started ({world.launcher}), {expect.ranks} planned")
    elif world.nodes != expect.nodes:
        wrong.append(f"{_count(world.nodes, 'node')} granted, {expect.nodes} planned")
    if cpus < expect.cpus_per_rank:
        wrong.append(f"rank {world.rank} may use {_count(cpus, 'core')}, {expect.cpus_per_rank} planned")
    if gpus is not None and expect.gpus_per_node:
        wrong += _wrong_gpus(world, expect, gpus)
    if wrong:
        raise _granted_otherwise(wrong)


def check_distinct(uuids: Iterable[tuple[int, str]]) -> None:
    """Every rank must have a device of its own.

    Args:
        uuids: (node, UUID of the device it computes on) of each rank, in order of rank.

    Raises:
        WrongHardwareError: two ranks of a node share a GPU; their times would be those of half a GPU.
    """
    owner: dict[tuple[int, str], int] = {}
    for rank, device in enumerate(uuids):
        if device in owner:
            raise _granted_otherwise([f"ranks {owner[device]} and {rank} were given the same GPU {device[1]}"])
        owner[device] = rank


def _wrong_gpus(world: World, expect: Expectation, gpus: Sequence[Gpu]) -> list[str]:
    wrong = []
    # A site that binds GPUs to tasks shows each rank its own ones only; together they must be enough.
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


def _granted_otherwise(wrong: Sequence[str]) -> WrongHardwareError:
    return WrongHardwareError(
        "the job was given other hardware than planned",
        why="; ".join(wrong),
        hint="nothing was trained; compare the job's request with cluster.toml, then orchestrate retry",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
