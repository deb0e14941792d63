"""One ``[cluster.NAME]`` table: all that a site's Slurm requires, in Slurm's own words.

``cluster.example.toml`` documents the keys. ``cluster_file`` reads the file, ``value_types`` checks single values,
``resources`` calculates with a profile, ``job_script`` writes ``#SBATCH`` lines; no code depends on a site's name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from orchestrator.cluster import value_types as types
from orchestrator.cluster.sbatch_options import (
    INDISPENSABLE,
    Accounting,
    CpusBy,
    GpuRequest,
    Launcher,
    MemStyle,
    QueueChoice,
    Requeue,
    Vendor,
)
from orchestrator.cluster.value_types import WHOLE_NODE, one_of
from orchestrator.plugins import nearest
from orchestrator.toml_file import KeyPath, Problem, TomlTable, invalid_values, show

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)
_REMEDIES = {"export": 'write export = ""'} | {k: f'write {k} = "none"' for k in ("request", "cpus_by", "mem_style")}


class ClusterQueue(TomlTable):
    """One allowed pair of partition and QOS, with its limits; 0: no limit."""

    partition: types.Names = ""
    qos: types.Names = ""
    max_time_s: types.TimeLimit = Field(default=0, alias="max_time")
    max_nodes: types.Count = 0
    max_gpus: types.Count = 0
    """Of a job, over all nodes."""
    max_cpus: types.Count = 0
    """Of a job, over all nodes."""
    preemptable: bool = False

    def __str__(self) -> str:
        return "/".join(filter(None, (self.partition, self.qos))) or "the default queue"


class _Checked(TomlTable):
    """A table whose keys constrain each other."""

    def problems(self) -> Iterator[Problem]:
        """Errors between the keys, at places below the table."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check(self) -> Self:
        if found := list(self.problems()):
            raise invalid_values(found)
        return self


class Nodes(_Checked):
    """Keys of CPU and GPU nodes."""

    node_cores: types.Count = 0
    """0: not known and not checked."""
    node_mem_bytes: types.Memory = Field(default=0, alias="node_mem")
    constraint: types.Directive = ""
    exclusive: bool = False
    account_suffix: types.Names | None = None
    """None: the cluster's."""
    cpus_by: Annotated[CpusBy, one_of(CpusBy)] = CpusBy.TASK
    mem_style: Annotated[MemStyle, one_of(MemStyle)] = MemStyle.NODE
    python: types.Folder = ""
    """For nodes whose processors or drivers need another environment."""
    prologue: types.Listed[types.Line] = ()
    """Runs on these nodes before the cluster's prologue."""
    queue: types.Listed[ClusterQueue] = ()


class CpuNodes(Nodes):
    """Nodes without GPUs."""

    cpus_per_rank: types.Positive = 1
    mem_per_rank_bytes: types.Memory | None = Field(default=None, alias="mem_per_rank")

    def problems(self) -> Iterator[Problem]:
        if self.cpus_by is CpusBy.GPU:
            yield ("cpus_by",), '"gpu" has no meaning on nodes without GPUs', 'write "task" or "none"'
        if self.mem_style is MemStyle.PER_GPU:
            yield ("mem_style",), '"per_gpu" has no meaning on nodes without GPUs', 'write "node"'


class GpuNodes(Nodes):
    """Nodes with one type of GPU."""

    request: Annotated[GpuRequest, one_of(GpuRequest)] = GpuRequest.GRES
    type: types.GresType = ""
    node_gpus: types.Positive
    ask_gpus: types.Count = 0
    """Least number of GPUs that can be requested on a node; 0: as many as a run uses."""
    cpus_per_gpu: types.Positive
    mem_per_gpu_bytes: types.NodeMemory = Field(default=None, alias="mem_per_gpu")
    mig: bool = False
    vendor: Annotated[Vendor, one_of(Vendor)] = Vendor.NVIDIA
    arch: types.Arch = "x86_64"
    visible_env: types.Variable = ""
    expect_name: types.Line = ""
    expect_mem_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def visible_devices_variable(self) -> str:
        return self.visible_env or types.VISIBLE_ENV[self.vendor]

    def asked_gpus(self, used: int) -> int:
        """GPUs that Slurm allocates on each node to a run that uses ``used``."""
        return self.node_gpus if self.request is GpuRequest.NONE or self.exclusive else max(used, self.ask_gpus)

    def problems(self) -> Iterator[Problem]:
        if self.ask_gpus > self.node_gpus:
            yield ("ask_gpus",), f"{self.ask_gpus} is more than node_gpus = {self.node_gpus}", ""
        if self.ask_gpus and self.request is GpuRequest.GPUS_PER_TASK:
            yield ("ask_gpus",), "a whole node cannot be requested per task", 'write request = "gpus_per_node"'
        if self.mem_per_gpu_bytes == WHOLE_NODE and self.mem_style is not MemStyle.NODE:
            yield ("mem_per_gpu",), '"all" is the memory of a node', 'write mem_style = "node"'


class Recovery(TomlTable):
    """How often recovery resubmits a run for each class of failure (0: never), and how its limits grow."""

    timeout: types.Count = 4
    host_memory: types.Count = 2
    node_fail: types.Count = 3
    preempted: types.Count = 10
    wrong_hardware: types.Count = 2
    lost: types.Count = 1
    time_factor: types.Factor = 2.0
    """Of the time limit, up to that of the partition and QOS."""
    mem_factor: types.Factor = 2.0
    """Of the memory, up to that of a node."""


class ClusterProfile(_Checked):
    """One ``[cluster.NAME]`` table."""

    name: str = Field(exclude=True)
    """Of the table; also the target of specs and submissions."""
    hostname_pattern: types.Pattern = ""
    account: types.Names = ""
    account_suffix: types.Names = ""
    needs_account: bool = False
    """Whether the site rejects jobs without an account."""
    export: types.Directive = "NONE"
    """Environment that the job inherits from the submitting shell; empty writes no line."""
    requeue: Annotated[Requeue, one_of(Requeue)] = Requeue.NEVER
    allow_preemptable: bool = False
    recovery: Recovery = Recovery()
    queue_choice: Annotated[QueueChoice, one_of(QueueChoice)] = QueueChoice.FIRST
    """Among the queues that fit a run."""
    poll_seconds: types.Positive = 60
    max_submit: types.Count = 0
    """Jobs that a user may have queued, array tasks counted; 0: not known."""
    array_index_max: types.Positive = 1000
    array_parallel: types.Count = 0
    """Tasks of an array that run at once; 0: no limit."""
    accounting: Annotated[Accounting, one_of(Accounting)] = Accounting.AUTO
    scratch: types.Folder = ""
    data: types.Folder = ""
    stage: types.FolderOnNodes = ""
    """Folder on each node's own disk to which jobs copy their data set; the node expands its variables."""
    python: types.Interpreter = Field("", validate_default=True)
    prologue: types.Listed[types.Line] = ()
    env: types.Environment = Field(default_factory=dict)
    extra: types.Extra = Field(default_factory=dict)
    forbid: types.Listed[types.Line] = ()
    launcher: Annotated[Launcher, one_of(Launcher)] = Launcher.SRUN
    srun_args: types.Listed[types.Line] = ()
    slurm_bin: types.Folder = ""
    template: types.Template = ""
    default_gpu: types.Line = ""
    gpu: dict[str, GpuNodes] = Field(default_factory=dict)
    cpu: CpuNodes | None = None

    def gpu_kind(self, kind: str) -> str:
        """Logical type of GPU: ``gpu`` (any) becomes the cluster's default type."""
        return (self.default_gpu or next(iter(self.gpu), kind)) if kind == "gpu" else kind

    @property
    def node_tables(self) -> dict[str, CpuNodes | GpuNodes]:
        """All nodes by kind of hardware: the types of GPU in file order, then ``cpu``."""
        return {**self.gpu, **({"cpu": self.cpu} if self.cpu else {})}

    def nodes(self, kind: str) -> CpuNodes | GpuNodes | None:
        """Nodes of a kind of hardware (``cpu``, ``gpu`` or a logical type); None where there are none."""
        return self.node_tables.get(self.gpu_kind(kind))

    def interpreter(self, kind: str) -> str:
        """Interpreter of jobs on these nodes."""
        nodes = self.nodes(kind)
        return nodes.python if nodes is not None and nodes.python else self.python

    def account_for(self, nodes: Nodes) -> str:
        """Account with its suffix; empty where the site needs none."""
        suffix = self.account_suffix if nodes.account_suffix is None else nodes.account_suffix
        return self.account + suffix if self.account else ""

    def matches(self, hostname: str) -> bool:
        """Whether ``hostname_pattern`` matches a host."""
        return bool(self.hostname_pattern and re.search(self.hostname_pattern, hostname))

    @cached_property
    def digest(self) -> str:
        """Digest of the values: comments, spelling of amounts and order of keys do not change it."""
        content = json.dumps([self.name, self.gpu_kind("gpu"), self.model_dump(mode="json")], sort_keys=True)
        if self.template:
            content += Path(self.template).read_text(encoding="utf-8")
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def problems(self) -> Iterator[Problem]:
        if not self.node_tables:
            yield (), "no nodes: it has neither a gpu table nor a cpu table", "add [cluster.NAME.gpu.TYPE]"
        if self.default_gpu and self.default_gpu not in self.gpu:
            hint = nearest(self.default_gpu, self.gpu) or f"there are: {', '.join(self.gpu) or 'none'}"
            yield ("default_gpu",), f"there is no gpu table {show(self.default_gpu)}", hint
        for kind in self.gpu:
            if not _KIND.fullmatch(kind) or kind.lower() in {"cpu", "gpu"}:
                hint = "letters, digits, _ . - ; neither cpu nor gpu"
                yield ("gpu", kind), f"{show(kind)} is not a kind of hardware", hint
        for place, name in self._written_options():
            if name in self.forbid:
                remedy = _REMEDIES.get(str(place[-1]), "remove one of the two")
                yield place, f"this key writes --{name}, which forbid lists", remedy
        for i, name in enumerate(self.forbid):
            if name in INDISPENSABLE:
                yield ("forbid", i), f"jobs need --{name}", "remove it"

    def _written_options(self) -> Iterator[tuple[KeyPath, str]]:
        """Each option that the profile writes into scripts, with the key that causes it."""
        yield from (((key,), key) for key in ("export", "account") if getattr(self, key))
        yield from ((("extra", name), name) for name in self.extra)
        for kind, nodes in self.node_tables.items():
            place = ("cpu",) if nodes is self.cpu else ("gpu", kind)
            options = {"cpus_by": nodes.cpus_by.directive, "mem_style": nodes.mem_style.directive}
            if isinstance(nodes, GpuNodes):
                options["request"] = nodes.request.directive
            options |= {key: key for key in ("constraint", "exclusive") if getattr(nodes, key)}
            yield from (((*place, key), name) for key, name in options.items() if name)
            for i, queue in enumerate(nodes.queue):
                yield from (((*place, "queue", i, key), key) for key in ("partition", "qos") if getattr(queue, key))
