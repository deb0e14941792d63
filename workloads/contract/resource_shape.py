"""The resources of one run: what its job script asks for and what the job must find."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from workloads.contract.flat import flat
from workloads.contract.run_spec import Expectation

_SET_BY_RECOVERY = ("arguments", "script")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceShape:
    """Resources of one run. Runs of equal shape share a job script and are submitted as one array.

    The defaults stand for what a damaged or foreign ``submission.json`` leaves out.
    """

    target: str = ""
    """``local`` or the cluster's name."""
    gpu: str = ""
    """Logical type of the GPUs; empty on CPU."""
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    """GPUs the run uses on each node; 0 on CPU."""
    ask_gpus_per_node: int = 0
    """GPUs the run holds on each node: more than it uses where the site allocates whole nodes."""
    cpus_per_rank: int = 1
    mem_bytes: int | None = None
    """Host memory on each node; ``profile.WHOLE_NODE`` is all of it, None leaves it to the site."""
    time_limit_s: int = 0
    partition: str = ""
    qos: str = ""
    gpu_name: str = ""
    gpu_memory_gb: float = 0.0
    allow_mig: bool = False
    arguments: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Options of ``sbatch`` that recovery adds to the script's own, such as a longer ``time``."""
    script: str = ""
    """:meth:`key` of the planned shape whose script is used; empty for the script of this shape."""

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    @property
    def gpus(self) -> int:
        """GPUs the run uses, over all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.ranks_per_node * self.cpus_per_rank

    @property
    def node_kind(self) -> str:
        """``cpu`` or the logical type of GPU, as cluster files name their nodes."""
        return self.gpu or "cpu"

    @property
    def name(self) -> str:
        """Short, for file names and tables; not unique."""
        devices = f"{self.gpus_per_node}x{self.gpu}" if self.gpus_per_node else "cpu"
        nodes = f"{self.nodes}nodes-" if self.nodes > 1 else ""
        return f"{nodes}{devices}-{self.ranks}rank{'s' if self.ranks > 1 else ''}"

    @property
    def gpu_hours_limit(self) -> float:
        """GPU-hours the run holds when it lasts to its time limit."""
        return self.nodes * self.ask_gpus_per_node * self.time_limit_s / 3600

    def expectation(self) -> Expectation:
        """What the job checks when it starts."""
        return Expectation(**{f.name: getattr(self, f.name) for f in fields(Expectation)})

    def key(self) -> str:
        """Return the name under which files keep what belongs to this shape, such as its script."""
        text = json.dumps({k: v for k, v in self.to_json().items() if v is not None}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def script_key(self) -> str:
        """:meth:`key` of the shape whose script is used."""
        return self.script or self.key()

    def to_json(self) -> dict[str, Any]:
        """All fields; those of recovery only where it set them."""
        return {k: v for k, v in flat(self).items() if v or k not in _SET_BY_RECOVERY}
