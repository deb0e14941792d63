"""The options of ``sbatch`` that job scripts have, and the forms in which sites want them: facts about Slurm only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from orchestrator.units import format_memory

Directives = Mapping[str, str | bool]
"""Long option name -> value; True for an option without one."""

OWNED_DIRECTIVES: dict[str, str] = {
    "account": "account",
    "array": "array_parallel and array_index_max",
    "constraint": "constraint",
    "cpus-per-gpu": "cpus_by and cpus_per_gpu",
    "cpus-per-task": "cpus_by and cpus_per_gpu",
    "dependency": "",
    "error": "",
    "exclusive": "exclusive",
    "export": "export",
    "gpus": "request and type",
    "gpus-per-node": "request and type",
    "gpus-per-task": "request and type",
    "gres": "request and type",
    "job-name": "",
    "mem": "mem_per_gpu and mem_style",
    "mem-per-cpu": "mem_per_gpu and mem_style",
    "mem-per-gpu": "mem_per_gpu and mem_style",
    "no-requeue": "requeue",
    "nodes": "",
    "ntasks": "",
    "ntasks-per-gpu": "",
    "ntasks-per-node": "",
    "open-mode": "",
    "output": "",
    "parsable": "",
    "partition": "[[queue]]",
    "qos": "[[queue]]",
    "requeue": "requeue",
    "signal": "",
    "test-only": "",
    "time": "time_limit in experiment.toml",
    "wait": "",
    "wrap": "",
}
"""sbatch options that are set for each run -> the keys that decide them; ``extra`` may hold any other."""

DROPPABLE = frozenset({"open-mode", "signal", "requeue", "no-requeue"})
"""Options that a job can do without: left out where a site forbids them."""

INDISPENSABLE = frozenset({"nodes", "ntasks-per-node", "output", "time"})

SHORT_OPTIONS = {
    "A": "account",
    "C": "constraint",
    "D": "chdir",
    "G": "gpus",
    "H": "hold",
    "J": "job-name",
    "L": "licenses",
    "N": "nodes",
    "a": "array",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "i": "input",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
"""Short options -> long ones."""


class GpuRequest(StrEnum):
    """The option that requests GPUs at a site."""

    GRES = "gres"
    GPUS = "gpus"
    GPUS_PER_NODE = "gpus_per_node"
    GPUS_PER_TASK = "gpus_per_task"
    NONE = "none"
    """The partition implies the GPUs; Slurm allocates whole nodes."""

    @property
    def directive(self) -> str:
        """The option's long name; empty for ``none``."""
        return "" if self is GpuRequest.NONE else self.replace("_", "-")


class CpusBy(StrEnum):
    """How a site wants to be asked for cores."""

    TASK = "task"
    GPU = "gpu"
    NONE = "none"

    @property
    def directive(self) -> str:
        """The option's long name; empty for ``none``."""
        return "" if self is CpusBy.NONE else f"cpus-per-{self}"


class MemStyle(StrEnum):
    """The option that requests memory at a site."""

    NODE = "node"
    PER_GPU = "per_gpu"
    PER_CPU = "per_cpu"
    NONE = "none"

    @property
    def directive(self) -> str:
        """The option's long name; empty for ``none``."""
        return {"node": "mem", "none": ""}.get(self, f"mem-{self}").replace("_", "-")

    def option(self, mem_bytes: int | None, *, gpus: int, cpus: int) -> dict[str, str]:
        """The option that requests memory; none where the site decides.

        Args:
            mem_bytes: on each node; 0: all of it, None: the site decides.
            gpus: allocated on each node.
            cpus: allocated on each node.
        """
        shares = {MemStyle.NODE: 1, MemStyle.PER_GPU: gpus, MemStyle.PER_CPU: cpus, MemStyle.NONE: 0}[self]
        if mem_bytes is None or not shares:
            return {}
        return {self.directive: format_memory(-(-mem_bytes // shares)) if mem_bytes else "0"}


class Launcher(StrEnum):
    """What starts the ranks."""

    SRUN = "srun"
    TORCHRUN = "torchrun"
    NONE = "none"


class Requeue(StrEnum):
    """What Slurm does with a job that is preempted or loses its node."""

    NEVER = "never"
    REQUEUE = "requeue"
    CANCEL = "cancel"


class QueueChoice(StrEnum):
    """How to choose among the queues that fit a run."""

    FIRST = "first"
    """The first in the cluster file; the script names it."""
    EARLIEST = "earliest"
    """The one where Slurm expects the earliest start, queried at submit."""


class Accounting(StrEnum):
    """Which command reports the state of an ended job."""

    AUTO = "auto"
    SACCT = "sacct"
    SQUEUE = "squeue"


class Vendor(StrEnum):
    """Manufacturer of GPUs."""

    NVIDIA = "nvidia"
    AMD = "amd"
