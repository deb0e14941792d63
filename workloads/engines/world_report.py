"""What a run sees of its hardware and software, for its result and its event ``world``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workloads.job.context import Job, print_error
from workloads.job.world import Gpu
from workloads.provenance import code_snapshot, job_facts


def record_world(
    job: Job,
    *,
    device: str,
    gpus: Sequence[Gpu],
    own_gpu: Gpu | None,
    devices_seen: int | None,
    cpus_seen: int,
    software: Mapping[str, Any],
    **event: Any,
) -> None:
    """Fill the result and write the event.

    Args:
        device: as the framework names it.
        gpus: visible to this rank.
        own_gpu: the GPU that this rank computes on; None on a CPU.
        devices_seen: distinct GPUs of all ranks; None on CPUs.
        cpus_seen: distinct cores of all ranks.
        software: versions and settings, for the provenance.
        event: more values for the event.
    """
    about = job_facts.collect(code_snapshot.run_code_digest(job.spec))
    result = job.result
    result.world_size = job.world.size
    result.device_name = own_gpu.name if own_gpu else about["cpu_model"]
    result.devices_seen, result.cpus_seen = devices_seen, cpus_seen
    result.provenance = {
        **about,
        **software,
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
        device=device,
        device_name=result.device_name,
        devices_seen=devices_seen,
        cpus_seen=cpus_seen,
        **event,
    )
    if job.spec.code_digest and job.spec.code_digest != about["code_digest"]:
        print_error(
            f"the code changed since this run was submitted: {job.spec.code_digest} then, {about['code_digest']} now; "
            "the result carries the digest of what ran"
        )
