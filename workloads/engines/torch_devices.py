"""Which device a rank computes on, whether it is what was planned, and what all ranks see together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workloads.contract import Topology, TrainConfig
from workloads.engines.communication import Communication
from workloads.errors import WrongHardwareError
from workloads.job import world
from workloads.job.context import Job, print_error
from workloads.provenance import code_snapshot, job_facts


@dataclass(frozen=True, slots=True)
class _Sight:
    """What one rank sees."""

    node: int
    device: str
    """UUID of the GPU it computes on; empty on a CPU."""
    visible: tuple[str, ...]
    cores: tuple[int, ...]


def choose_device(job: Job) -> torch.device:
    """This rank's device, made current before anything else touches CUDA, after a look at what kind it is."""
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
    # Sites that bind GPUs to tasks show each rank one GPU, number 0; others show all of a node's to all its ranks.
    device = torch.device("cuda", job.world.local_rank % count)
    torch.cuda.set_device(device)
    world.check(job.world, expect, cpus=len(os.sched_getaffinity(0)), gpus=_torch_gpus())
    if count < expect.gpus_per_node:
        print_error(
            f"rank {job.world.rank} sees {count} of {expect.gpus_per_node} GPUs: they are bound to tasks, and NCCL may "
            "then be slow or fail for want of peer access; ask for GPUs by node, not by task"
        )
    return device


def devices_of(device: torch.device, config: TrainConfig, topology: Topology) -> tuple[torch.device, ...]:
    """What this rank computes on: its device, or in a run of one process all devices of the run."""
    count = config.hardware.devices if topology is Topology.ONE_PROCESS else 1
    if device.type == "cpu":
        return (device,) * count
    return (device, *(torch.device("cuda", i) for i in range(count) if i != device.index))


def uuids(devices: Sequence[torch.device]) -> list[str]:
    """Of the GPUs among some devices, as ``nvidia-smi`` writes them."""
    gpus = _torch_gpus() if devices[0].type == "cuda" else []
    return [gpus[device.index].uuid for device in devices] if gpus else []


def _torch_gpus() -> list[world.Gpu]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    # nvidia-smi and CUDA_VISIBLE_DEVICES write the kind in front, torch does not.
    return [world.Gpu(p.name, p.total_memory, f"{'MIG' if 'MIG' in p.name else 'GPU'}-{p.uuid}") for p in properties]


def describe_world(job: Job, device: torch.device, communication: Communication) -> None:
    """Put together what the ranks see; every rank must have a device of its own."""
    gpus = _torch_gpus() if device.type == "cuda" else []
    own = gpus[device.index] if gpus else None
    sight = _Sight(
        job.world.node,
        own.uuid if own else "",
        tuple(g.uuid for g in gpus),
        tuple(os.sched_getaffinity(0)),
    )
    ranks = communication.gather(sight)
    if own:
        world.check_distinct((r.node, r.device) for r in ranks)
    result = job.result
    about = job_facts.collect(code_snapshot.run_code_digest(job.spec))
    result.world_size = job.world.size
    result.device_name = own.name if own else about["cpu_model"]
    result.devices_seen = len({(r.node, u) for r in ranks for u in r.visible}) if gpus else None
    result.cpus_seen = len({(r.node, c) for r in ranks for c in r.cores})
    result.provenance = about | {
        "torch": {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if gpus else None,  # type: ignore[no-untyped-call]
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,  # type: ignore[no-untyped-call]
            "threads": torch.get_num_threads(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        },
        "gpus": [{"name": g.name, "memory_bytes": g.memory_bytes, "uuid": g.uuid} for g in gpus],
        "launcher": job.world.launcher.value,
        "nodes": job.world.nodes,
        "submitted_code_digest": job.spec.code_digest,
    }
    job.events.write(
        "world",
        world_size=job.world.size,
        nodes=job.world.nodes,
        launcher=job.world.launcher.value,
        device=str(device),
        device_name=result.device_name,
        devices_seen=result.devices_seen,
        cpus_seen=result.cpus_seen,
        threads=torch.get_num_threads(),
    )
    if job.spec.code_digest and job.spec.code_digest != about["code_digest"]:
        print_error(
            f"the code changed since this run was submitted: {job.spec.code_digest} then, {about['code_digest']} now; "
            "the result carries the digest of what ran"
        )
