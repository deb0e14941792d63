"""One planned run: training configuration, execution settings and expectations of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from workloads.contract.flat import flat
from workloads.contract.train_config import TrainConfig, key

SPEC_VERSION = 1
"""Version of ``spec.json`` and ``result.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution settings. Not identity: none of them may change what is learned."""

    time_limit_s: int = key(3600, name="time_limit", unit="time")
    mem_bytes: int | None = key(None, name="mem", unit="memory")
    """Host memory per node; None is the cluster file's default."""
    checkpoint_every: int = key(1, ge=0)
    """Epochs between checkpoints; 0 writes none."""
    hang_timeout_s: int = key(600, ge=0, le=3650 * 86400)
    """The run fails when a rank makes no progress for so long; 0 disables the watchdog."""
    retries: int = key(0, ge=0)
    """How often recovery resubmits the run when its program fails or hangs."""


EXECUTION_KEYS: Mapping[str, str] = {f.metadata.get("name", f.name): f.name for f in fields(Execution)}
"""Keys of ``experiment.toml`` -> the fields of :class:`Execution` (``time_limit`` and ``mem`` are texts there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the job must find when it starts; ``workloads.job.world`` checks it within seconds."""

    ranks: int
    """World size."""
    nodes: int
    gpus_per_node: int
    """GPUs the run uses on each node; 0 on CPU."""
    cpus_per_rank: int
    gpu_name: str = ""
    """Text that each GPU's name must contain; empty accepts any."""
    gpu_memory_gb: float = 0.0
    """Nominal memory of each GPU in GB (10^9 bytes), accepted within 15 %; 0 accepts any."""
    allow_mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One planned run: the content of ``spec.json``."""

    run_id: str
    label: str
    """For people; not unique, of any length."""
    experiment: str
    target: str
    """``local`` or the cluster's name."""
    data_root: str
    """Absolute path of the data sets; may be empty where the package contains the data set."""
    dataset_digest: str = ""
    """Digest of the data set's content at submit; empty where it is unknown."""
    code_digest: str = ""
    """Digest of the ``workloads`` package at submit."""
    snapshot: str = ""
    """Name of the submitted code, see ``workloads.provenance.code_snapshot``; empty before submit."""
    train: TrainConfig
    execution: Execution
    expect: Expectation

    def to_json(self) -> dict[str, Any]:
        parts = {"train": self.train.to_json(), "execution": flat(self.execution), "expect": flat(self.expect)}
        return {"spec_version": SPEC_VERSION, **flat(self), **parts}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; raises ValueError if the data is no spec, or of another version."""
        if data.get("spec_version") != SPEC_VERSION:
            raise ValueError(f"spec_version {data.get('spec_version')!r} is not {SPEC_VERSION}")
        try:
            train, execution = TrainConfig.from_json(data["train"]), Execution(**data["execution"])
            parts = {"train": train, "execution": execution, "expect": Expectation(**data["expect"])}
            return cls(**{name: value for name, value in (data | parts).items() if name != "spec_version"})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a run spec: {error}") from error
