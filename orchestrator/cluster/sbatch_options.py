"""The options of ``sbatch`` that we write, and the ways in which sites want them: facts about Slurm only."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.units import format_memory

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
"""sbatch options that a run decides, with the keys that say them; ``extra`` may hold any other."""

DROPPABLE = frozenset({"open-mode", "signal", "requeue", "no-requeue"})
"""What a job can do without: left out where a site forbids it."""

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
"""Letters that stand for options in ``#SBATCH`` lines."""


class GpuRequest(StrEnum):
    """How a site wants to be asked for GPUs."""

    GRES = "gres"
    GPUS = "gpus"
    GPUS_PER_NODE = "gpus_per_node"
    GPUS_PER_TASK = "gpus_per_task"
    NONE = "none"
    """The partition says it all and nodes are given whole."""

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
    """How a site wants to be asked for memory."""

    NODE = "node"
    PER_GPU = "per_gpu"
    PER_CPU = "per_cpu"
    NONE = "none"

    @property
    def directive(self) -> str:
        """The option's long name; empty for ``none``."""
        return {"node": "mem", "none": ""}.get(self, f"mem-{self}").replace("_", "-")

    def option(self, mem_bytes: int | None, *, gpus: int, cpus: int) -> dict[str, str]:
        """The one option that asks for memory, by its name; none where the site decides.

        Args:
            mem_bytes: of each node; 0 is all that it has, None leaves it to the site.
            gpus: that the job holds on each node.
            cpus: that it holds there.
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
    """What happens to a job that is preempted or loses its node."""

    NEVER = "never"
    REQUEUE = "requeue"
    CANCEL = "cancel"


class QueueChoice(StrEnum):
    """Which of the queues that take a run gets it."""

    FIRST = "first"
    """The one that stands first in the cluster file, as the script says."""
    EARLIEST = "earliest"
    """The one in which Slurm expects it to start first, asked at submit."""


class Accounting(StrEnum):
    """Where the state of an ended job is asked for."""

    AUTO = "auto"
    SACCT = "sacct"
    SQUEUE = "squeue"


class Vendor(StrEnum):
    """Who made the GPUs."""

    NVIDIA = "nvidia"
    AMD = "amd"
