"""The device that a rank computes on with torch, whether it is the planned one, and what all ranks see."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workloads.contract import Topology, TrainConfig
from workloads.engines.communication import Communication
from workloads.engines.world_report import record_world
from workloads.errors import WrongHardwareError
from workloads.job import world
from workloads.job.context import Job, print_error


@dataclass(frozen=True, slots=True)
class _RankView:
    """What one rank sees."""

    node: int
    device: str
    """UUID of the GPU it computes on; empty on a CPU."""
    visible: tuple[str, ...]
    cores: tuple[int, ...]


def choose_device(job: Job) -> torch.device:
    """Return this rank's device, as the current one, before anything else uses CUDA.

    Raises:
        WrongHardwareError: torch sees no GPU, or other GPUs than planned.
    """
    expect = job.spec.expect
    if not expect.gpus_per_node:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise WrongHardwareError(
            f"no GPU can be used, {expect.gpus_per_node} a node planned",
            why=f"torch {torch.__version__} was built for CUDA {torch.version.cuda}, "
            f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}",
            hint="compare the driver's CUDA version (nvidia-smi) with torch's",
        )
    # Where Slurm binds GPUs to tasks (--gpus-per-task), a rank sees one GPU, number 0; otherwise all of its node's.
    device = torch.device("cuda", job.world.local_rank % count)
    torch.cuda.set_device(device)
    world.check(job.world, expect, cpus=len(os.sched_getaffinity(0)), gpus=_torch_gpus())
    if count < expect.gpus_per_node:
        print_error(
            f"rank {job.world.rank} sees {count} of {expect.gpus_per_node} GPUs: Slurm bound them to tasks, "
            "and NCCL may be slow or fail without peer access; request GPUs per node, not per task"
        )
    return device


def devices_of(device: torch.device, config: TrainConfig, topology: Topology) -> tuple[torch.device, ...]:
    """Return what this rank computes on: its device, or in a run of one process all devices of the run."""
    count = config.hardware.devices if topology is Topology.ONE_PROCESS else 1
    if device.type == "cpu":
        return (device,) * count
    return (device, *(torch.device("cuda", i) for i in range(count) if i != device.index))


def uuids(devices: Sequence[torch.device]) -> list[str]:
    """Return the UUIDs of the GPUs among some devices, as ``nvidia-smi`` writes them."""
    gpus = _torch_gpus() if devices[0].type == "cuda" else []
    return [gpus[device.index].uuid for device in devices] if gpus else []


def _torch_gpus() -> list[world.Gpu]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    # nvidia-smi and CUDA_VISIBLE_DEVICES write a prefix GPU- or MIG-, torch's uuid has none.
    return [world.Gpu(p.name, p.total_memory, f"{'MIG' if 'MIG' in p.name else 'GPU'}-{p.uuid}") for p in properties]


def describe_world(job: Job, device: torch.device, communication: Communication) -> None:
    """Record what all ranks see.

    Raises:
        WrongHardwareError: two ranks compute on the same device.
    """
    gpus = _torch_gpus() if device.type == "cuda" else []
    own = gpus[device.index] if gpus else None
    ranks = communication.gather(
        _RankView(job.world.node, own.uuid if own else "", tuple(g.uuid for g in gpus), tuple(os.sched_getaffinity(0)))
    )
    if own:
        world.check_distinct((r.node, r.device) for r in ranks)
    record_world(
        job,
        device=str(device),
        gpus=gpus,
        own_gpu=own,
        devices_seen=len({(r.node, u) for r in ranks for u in r.visible}) if gpus else None,
        cpus_seen=len({(r.node, c) for r in ranks for c in r.cores}),
        software={
            "torch": {
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version() if gpus else None,  # type: ignore[no-untyped-call]
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,  # type: ignore[no-untyped-call]
                "threads": torch.get_num_threads(),
                "cudnn_benchmark": torch.backends.cudnn.benchmark,
            }
        },
        threads=torch.get_num_threads(),
    )
