"""Scripts that a cluster profile leads to, and their faults: for ``doctor`` and the tests of shipped profiles.

Samples use two devices of each type, at the time limit of each queue. Needs no Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.cluster import job_script, resources
from orchestrator.cluster.profile import ClusterProfile, GpuNodes
from orchestrator.cluster.script_lint import Fault
from orchestrator.errors import InputError
from workloads import registry
from workloads.contract import Execution, Hardware, ResourceShape, TrainConfig

_PROBE = "probe"
"""The strategy of samples: one process for each device, no framework."""
_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Sample:
    """The script for some hardware and time limit."""

    hardware: str
    time_limit_s: int
    reason: str = ""
    """Why the cluster cannot run it; empty where it can."""
    shape: ResourceShape | None = None
    text: str = ""
    """The script."""
    faults: list[Fault] = field(default_factory=list)


def samples(profile: ClusterProfile, *, runs: Path = Path("/runs")) -> Iterator[Sample]:
    """Two devices of each type on one node: for an hour, for each queue's limit, for longer than any queue allows."""
    for kind, nodes in profile.node_tables.items():
        caps = {q.max_time_s for q in nodes.queue if q.max_time_s and (profile.allow_preemptable or not q.preemptable)}
        beyond = max(caps) + 60 if caps and all(q.max_time_s for q in nodes.queue) else 0
        for limit_s in sorted({min([_HOUR_S, *caps]), *caps, *([beyond] if beyond else [])}):
            yield sample(profile, f"{kind}:2", limit_s, runs=runs)
        if isinstance(nodes, GpuNodes) and (nodes.node_gpus < 2 or nodes.mig):
            yield sample(profile, f"{kind}:1", min([_HOUR_S, *caps]), runs=runs)


def sample(profile: ClusterProfile, hardware: str, time_limit_s: int, *, runs: Path = Path("/runs")) -> Sample:
    """The script of a run on some hardware."""
    asked = Hardware.parse(hardware)
    cpus = resources.default_cpus(profile)(asked, asked.devices)
    train = TrainConfig(model="cnn", dataset="digits", strategy=_PROBE, hardware=asked, cpus=cpus)
    strategy = registry.strategies()[_PROBE]
    shape = resources.place(train, Execution(time_limit_s=time_limit_s), strategy, profile, None)
    if isinstance(shape, str):
        return Sample(hardware, time_limit_s, reason=shape)
    try:
        text = job_script.render(shape, profile, runs=runs, python=profile.python)
    except InputError as error:
        return Sample(hardware, time_limit_s, shape=shape, faults=[Fault(error.what, error.hint)])
    return Sample(hardware, time_limit_s, shape=shape, text=text)


def profile_faults(profile: ClusterProfile, *, runs: Path = Path("/runs")) -> list[Fault]:
    """Faults of all samples of a profile; one more where no sample can run."""
    every = list(samples(profile, runs=runs))
    found = [Fault(f"{r.hardware}: {fault.what}", fault.hint) for r in every for fault in r.faults]
    if not any(r.text for r in every) and not found:
        reasons = dict.fromkeys(r.reason for r in every)
        found.append(Fault(f"no run is possible here: {'; '.join(reasons)}"))
    return list(dict.fromkeys(found))
