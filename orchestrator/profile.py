"""What one ``[cluster.NAME]`` table may hold: everything a site's Slurm wants to hear, in its own words.

The keys are documented where users read them, in ``cluster.example.toml``. ``cluster`` reads the file, ``resources``
does arithmetic on a profile, ``render`` writes it down as ``#SBATCH`` lines; none of them knows a site by name.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from orchestrator.plugins import nearest
from orchestrator.quantities import LARGEST, QuantityError, parse_memory, parse_time_limit
from orchestrator.sbatch import (
    INDISPENSABLE,
    OWNED_DIRECTIVES,
    Accounting,
    CpusBy,
    Launcher,
    MemStyle,
    QueueChoice,
    Request,
    Requeue,
    Vendor,
)
from orchestrator.tomlfile import Place, TomlError, decode, refuse, refuse_all, show

SHIPPED_TEMPLATE = "slurm.sh.j2"
"""The job script that a user's template extends."""

T = TypeVar("T")

WHOLE_NODE = 0
"""Bytes of memory that stand for all that a node has (``--mem=0``)."""

_VISIBLE_ENV = {Vendor.NVIDIA: "CUDA_VISIBLE_DEVICES", Vendor.AMD: "ROCR_VISIBLE_DEVICES"}
_OWNED_ENV = frozenset({"PYTHONSAFEPATH", "SUBMITIT_EXECUTOR", *_VISIBLE_ENV.values()})
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)
_NAMES = re.compile(r"[A-Za-z0-9_.@:+/=,-]*")
"""Accounts, partitions or QOS, one or several; sites invent much, but no spaces and nothing that a shell reads."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


_INSTEAD = {"export": 'write export = ""'} | {k: f'write {k} = "none"' for k in ("request", "cpus_by", "mem_style")}


def _word(words: type[StrEnum]) -> BeforeValidator:
    def check(value: object) -> StrEnum:
        if value not in list(words):
            raise refuse(f"{show(value)} is not one of {', '.join(words)}", nearest(str(value), words))
        return words(str(value))

    return BeforeValidator(check)


def _quantity(read: Callable[[object], int]) -> PlainValidator:
    def check(value: object) -> int:
        try:
            return read(value)
        except QuantityError as error:
            raise refuse(error.what, error.hint) from error

    return PlainValidator(check)


def _node_share(value: object) -> int:
    return WHOLE_NODE if value == "all" else parse_memory(value)


def _line(value: str) -> str:
    if not value.isprintable():
        raise refuse(f"{show(value)} holds a line end or another control character", "write it on one line")
    return value


def _directive(value: str) -> str:
    found = sorted(set("$`\\\"'") & set(_line(value)))
    if found:
        raise refuse(f"{show(value)} holds {found[0]}, and #SBATCH lines expand no variables", "write the value itself")
    return value


def _names(value: str) -> str:
    if not _NAMES.fullmatch(_directive(value)):
        raise refuse(f"{show(value)} is not a name that Slurm takes", "letters, digits and _ . - @ : + / = ,")
    return value


def _variable(value: str) -> str:
    if value and not _VARIABLE.fullmatch(value):
        raise refuse(f"{show(value)} is not the name of a variable", 'such as "CUDA_VISIBLE_DEVICES"')
    return value


def _arch(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]+", value):
        raise refuse(
            f"{show(value)} is not a kind of processor", 'write what "uname -m" says there: "x86_64", "aarch64"'
        )
    return value


def _gres_type(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", value):
        raise refuse(
            f"{show(value)} is not a type of GPU", 'write what stands between the colons: "a100" of gpu:a100:4'
        )
    return value


def expand(value: str, places: Mapping[str, str]) -> str:
    """Replace ``~``, ``$VARIABLE``, ``{user}`` and the other places; nothing is left for a job to misread.

    Raises:
        PydanticCustomError: a variable is not set, or a place unknown.
    """
    expanded = os.path.expandvars(value)
    if "$" in expanded:
        name = expanded[expanded.index("$") :].split("/")[0]
        raise refuse(f"{show(value)}: {name} is not set here", "set it before the command, or write the value itself")
    for word in re.findall(r"\{(\w+)\}", expanded):
        if word not in places and word != "user":
            raise refuse(f"{show(value)}: {{{word}}} is not known", "known are {user} and, once it is set, {scratch}")
        expanded = expanded.replace(f"{{{word}}}", places[word] if word in places else _user())
    return os.path.expanduser(expanded) if value.startswith("~") else expanded  # noqa: PTH111 (Path("") is ".")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise refuse(
            "{user} is not known: this account has no name here", "write the name itself, or set USER"
        ) from error


def _expanded(value: str, info: ValidationInfo) -> str:
    return expand(_line(value), info.context or {})


def _absolute(value: str, info: ValidationInfo) -> str:
    path = _expanded(value, info)
    if path and not path.startswith("/"):
        raise refuse(f"{show(value)} is not an absolute path", "jobs run elsewhere; write the whole path from /")
    return path


def _on_nodes(value: str, info: ValidationInfo) -> str:
    """A folder whose variables have their values on compute nodes only."""
    path = _line(value)
    for word in re.findall(r"\{\w+\}", path):
        path = path.replace(word, expand(word, info.context or {}))
    if path and path[0] not in "/$":
        raise refuse(f"{show(value)} is not an absolute path", 'write a folder of the node, such as "$TMPDIR"')
    return path


Line = Annotated[str, AfterValidator(_line)]
Directive = Annotated[str, AfterValidator(_directive)]
Names = Annotated[str, AfterValidator(_names)]
Folder = Annotated[str, AfterValidator(_absolute)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Factor = Annotated[float, Field(ge=1, le=100)]
TimeLimit = Annotated[int, _quantity(parse_time_limit)]
Memory = Annotated[int, _quantity(parse_memory)]


class _Table(BaseModel):
    """No unknown key, no silent conversion; a list in the file is a tuple here."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_LISTED = BeforeValidator(_as_tuple)


class Queue(_Table):
    """One allowed pair of partition and QOS, with its caps; 0 is no cap."""

    partition: Names = ""
    qos: Names = ""
    max_time_s: TimeLimit = Field(default=0, alias="max_time")
    max_gpus: Count = 0
    """A job's, over all nodes."""
    max_cpus: Count = 0
    """A job's, over all nodes."""
    max_nodes: Count = 0
    preemptable: bool = False

    def __str__(self) -> str:
        return "/".join(filter(None, (self.partition, self.qos))) or "the default queue"


class Nodes(_Table):
    """What CPU and GPU nodes have in common."""

    node_cores: Count = 0
    """0: not known, not checked."""
    node_mem_bytes: Memory = Field(default=0, alias="node_mem")
    constraint: Directive = ""
    exclusive: bool = False
    account_suffix: Names | None = None
    """None: the cluster's."""
    cpus_by: Annotated[CpusBy, _word(CpusBy)] = CpusBy.TASK
    mem_style: Annotated[MemStyle, _word(MemStyle)] = MemStyle.NODE
    python: Folder = ""
    """For nodes whose processors or drivers need another environment."""
    prologue: Annotated[tuple[Line, ...], _LISTED] = ()
    """Lines of jobs on these nodes, before the cluster's."""
    queue: Annotated[tuple[Queue, ...], _LISTED] = ()


class CpuNodes(Nodes):
    """Nodes without GPUs."""

    cpus_per_rank: Positive = 1
    mem_per_rank_bytes: Memory | None = Field(default=None, alias="mem_per_rank")

    @model_validator(mode="after")
    def _possible(self) -> CpuNodes:
        if self.cpus_by is CpusBy.GPU:
            raise refuse_all([(("cpus_by",), '"gpu" means nothing on nodes without GPUs', 'write "task" or "none"')])
        if self.mem_style is MemStyle.PER_GPU:
            raise refuse_all([(("mem_style",), '"per_gpu" means nothing on nodes without GPUs', 'write "node"')])
        return self


class GpuNodes(Nodes):
    """Nodes with one type of GPU."""

    request: Annotated[Request, _word(Request)] = Request.GRES
    type: Annotated[str, AfterValidator(_gres_type)] = ""
    node_gpus: Positive
    ask_gpus: Count = 0
    """GPUs asked on each node where fewer cannot be asked; 0 asks what is used."""
    cpus_per_gpu: Positive
    mem_per_gpu_bytes: Annotated[int | None, _quantity(_node_share)] = Field(default=None, alias="mem_per_gpu")
    mig: bool = False
    vendor: Annotated[Vendor, _word(Vendor)] = Vendor.NVIDIA
    arch: Annotated[str, AfterValidator(_arch)] = "x86_64"
    visible_env: Annotated[str, AfterValidator(_variable)] = ""
    expect_name: Line = ""
    expect_mem_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def visible_devices_variable(self) -> str:
        return self.visible_env or _VISIBLE_ENV[self.vendor]

    def asked_gpus(self, used: int) -> int:
        """GPUs that a job holds on each node when it uses so many."""
        return self.node_gpus if self.request is Request.NONE or self.exclusive else max(used, self.ask_gpus)

    @model_validator(mode="after")
    def _possible(self) -> GpuNodes:
        found: list[tuple[Place, str, str]] = []
        if self.ask_gpus > self.node_gpus:
            found.append((("ask_gpus",), f"{self.ask_gpus} is more than node_gpus = {self.node_gpus}", ""))
        if self.ask_gpus and self.request is Request.GPUS_PER_TASK:
            found.append(
                (("ask_gpus",), "a whole node cannot be asked for per task", 'write request = "gpus_per_node"')
            )
        if self.mem_per_gpu_bytes == WHOLE_NODE and self.mem_style is not MemStyle.NODE:
            found.append((("mem_per_gpu",), '"all" is the memory of a node', 'write mem_style = "node"'))
        if found:
            raise refuse_all(found)
        return self


class Recovery(_Table):
    """How often a run is sent again by itself for each class of failure, and how its limits grow; 0 times is never."""

    timeout: Count = 4
    host_memory: Count = 2
    node_fail: Count = 3
    preempted: Count = 10
    wrong_hardware: Count = 2
    lost: Count = 1
    time_factor: Factor = 2.0
    """On the time limit, as far as the partition and QOS go."""
    mem_factor: Factor = 2.0
    """On the memory, as far as a node goes."""


def _each(value: object, check: Callable[[str, object], T | None], example: str) -> dict[str, T]:
    """Check every entry of a table, and report all that is wrong; an entry without a value is left out."""
    if not isinstance(value, dict):
        raise refuse(f"{show(value)} is not a table", f"write {example}")
    found: list[tuple[Place, str, str]] = []
    checked: dict[str, T] = {}
    for name, given in value.items():
        try:
            if (kept := check(name, given)) is not None:
                checked[name] = kept
        except PydanticCustomError as error:
            wrong = (error.context or {})["mistakes"]
            found += [((name, *below), what, hint) for below, what, hint in wrong]
    if found:
        raise refuse_all(found)
    return checked


def _extra(value: object, info: ValidationInfo) -> dict[str, str | bool]:
    def check(name: str, given: object) -> str | bool:
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            raise refuse("not the long name of an sbatch option", 'such as "mail-type", without dashes')
        owned = next((o for o in sorted(OWNED_DIRECTIVES) if o.startswith(name)), None)
        if owned is not None:
            keys = OWNED_DIRECTIVES[owned]
            raise refuse(f"--{owned} is decided for each run", f"say it with {keys}" if keys else "remove it")
        if given is True:
            return True
        if not isinstance(given, str) or not given:
            raise refuse(f"{show(given)} is not a value", f'write a text, as in {name} = "1", or true')
        return _directive(_expanded(given, info))

    return _each(value, check, 'extra = { "mail-type" = "END" }')


def _env(value: object) -> dict[str, str]:
    def check(name: str, given: object) -> str | None:
        if not _VARIABLE.fullmatch(name):
            raise refuse("not the name of a variable")
        if name in _OWNED_ENV or name.startswith("SLURM_"):
            raise refuse("this variable is set for each run", "remove it")
        if not isinstance(given, str):
            raise refuse(f"{show(given)} is not a text", f'quote it: "{show(given)}"')
        if "$" in given:
            raise refuse("variables are not expanded here", f'say it in prologue: "export {name}=..."')
        return _line(given) or None

    return _each(value, check, 'env = { NCCL_DEBUG = "INFO" }')


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise refuse(f"{show(value)} is not a regular expression: {error}", "") from error
    return value


def _template(value: str, info: ValidationInfo) -> str:
    path = _absolute(value, info)
    if path and not Path(path).is_file():
        raise refuse(f"there is no file {path}", "")
    try:
        decode(Path(path).read_bytes() if path else b"")
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error.strerror}", "make it readable for you") from error
    except TomlError as error:
        raise refuse(f"{path}: {error.where}: {error.what}", error.hint) from error
    if Path(path).name == SHIPPED_TEMPLATE:
        raise refuse(f"{SHIPPED_TEMPLATE} is the name of the template that yours extends", "give yours another name")
    return path


class ClusterProfile(_Table):
    """One ``[cluster.NAME]`` table: everything a site wants to hear, in its own words."""

    name: str = Field(exclude=True)
    """Of the table; also the target that is written into specs and submissions."""
    hostname_pattern: Annotated[str, AfterValidator(_pattern)] = ""
    account: Names = ""
    account_suffix: Names = ""
    needs_account: bool = False
    """Whether the site takes no job without an account."""
    export: Directive = "NONE"
    """What the job takes over from the submitting shell; empty writes no line."""
    requeue: Annotated[Requeue, _word(Requeue)] = Requeue.NEVER
    allow_preemptable: bool = False
    recovery: Recovery = Recovery()
    queue_choice: Annotated[QueueChoice, _word(QueueChoice)] = QueueChoice.FIRST
    """Among the queues that take a run."""
    poll_seconds: Positive = 60
    max_submit: Count = 0
    """Jobs a user may have queued, array tasks counted; 0: not known."""
    array_index_max: Positive = 1000
    array_parallel: Count = 0
    """Tasks of an array that run at once; 0: no throttle."""
    accounting: Annotated[Accounting, _word(Accounting)] = Accounting.AUTO
    scratch: Folder = ""
    data: Folder = ""
    stage: Annotated[str, AfterValidator(_on_nodes)] = ""
    """Folder of each node to which jobs copy their data set first; its variables are the node's."""
    python: Annotated[str, AfterValidator(_absolute), AfterValidator(lambda path: path or sys.executable)] = Field(
        "", validate_default=True
    )
    """The interpreter of jobs; empty in the file is the one that runs this command."""
    prologue: Annotated[tuple[Line, ...], _LISTED] = ()
    env: Annotated[dict[str, str], BeforeValidator(_env)] = {}
    extra: Annotated[dict[str, str | bool], BeforeValidator(_extra)] = {}
    forbid: Annotated[tuple[Line, ...], _LISTED] = ()
    launcher: Annotated[Launcher, _word(Launcher)] = Launcher.SRUN
    srun_args: Annotated[tuple[Line, ...], _LISTED] = ()
    slurm_bin: Folder = ""
    template: Annotated[str, AfterValidator(_template)] = ""
    default_gpu: Line = ""
    gpu: dict[str, GpuNodes] = {}
    cpu: CpuNodes | None = None

    def gpu_kind(self, kind: str) -> str:
        """The logical type that ``gpu`` (any GPU) stands for here; other kinds are themselves."""
        return (self.default_gpu or next(iter(self.gpu), kind)) if kind == "gpu" else kind

    def nodes(self, kind: str) -> CpuNodes | GpuNodes | None:
        """The nodes of a kind of hardware (``cpu``, ``gpu`` or a logical type); None where there are none."""
        return self.cpu if kind == "cpu" else self.gpu.get(self.gpu_kind(kind))

    def interpreter(self, kind: str) -> str:
        """The Python that jobs on these nodes run."""
        nodes = self.nodes(kind)
        return nodes.python if nodes is not None and nodes.python else self.python

    def account_for(self, nodes: Nodes) -> str:
        """Account and suffix; empty where the site needs none."""
        suffix = self.account_suffix if nodes.account_suffix is None else nodes.account_suffix
        return self.account + suffix if self.account else ""

    def matches(self, hostname: str) -> bool:
        """Whether a host is one of this cluster, as far as ``hostname_pattern`` says."""
        return bool(self.hostname_pattern and re.search(self.hostname_pattern, hostname))

    @cached_property
    def digest(self) -> str:
        """Digest of the meaning: comments, spelling of amounts and order of keys do not count."""
        content = json.dumps([self.name, self.gpu_kind("gpu"), self.model_dump(mode="json")], sort_keys=True)
        if self.template:
            content += Path(self.template).read_text(encoding="utf-8")
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _consistent(self) -> ClusterProfile:
        found: list[tuple[Place, str, str]] = []
        if not self.gpu and self.cpu is None:
            found.append(((), "no nodes: there is neither a gpu table nor a cpu table", "add [cluster.NAME.gpu.TYPE]"))
        if self.default_gpu and self.default_gpu not in self.gpu:
            hint = nearest(self.default_gpu, self.gpu) or f"there are: {', '.join(self.gpu) or 'none'}"
            found.append((("default_gpu",), f"there is no gpu table {show(self.default_gpu)}", hint))
        found += [
            (("gpu", kind), f"{show(kind)} is not a kind of hardware", "letters, digits, _ . - ; neither cpu nor gpu")
            for kind in self.gpu
            if not _KIND.fullmatch(kind) or kind.lower() in {"cpu", "gpu"}
        ]
        forbidden = set(self.forbid)
        found += [
            (
                place,
                f"this asks with --{name}, which forbid lists",
                _INSTEAD.get(str(place[-1]), "remove one of the two"),
            )
            for place, name in self._asks()
            if name in forbidden
        ]
        found += [
            (("forbid", i), f"a job cannot be asked for without --{name}", "remove it")
            for i, name in enumerate(self.forbid)
            if name in INDISPENSABLE
        ]
        if found:
            raise refuse_all(found)
        return self

    def _asks(self) -> Iterator[tuple[Place, str]]:
        """Each directive that the profile itself brings about, with the key that does."""
        if self.export:
            yield ("export",), "export"
        if self.account:
            yield ("account",), "account"
        for name in self.extra:
            yield ("extra", name), name
        tables: list[tuple[Place, Nodes]] = [(("gpu", kind), nodes) for kind, nodes in self.gpu.items()]
        if self.cpu is not None:
            tables.append((("cpu",), self.cpu))
        for place, nodes in tables:
            asks = {"cpus_by": nodes.cpus_by.directive, "mem_style": nodes.mem_style.directive}
            if isinstance(nodes, GpuNodes):
                asks["request"] = nodes.request.directive
            asks["constraint"] = "constraint" if nodes.constraint else ""
            asks["exclusive"] = "exclusive" if nodes.exclusive else ""
            yield from (((*place, key), name) for key, name in asks.items() if name)
            for i, queue in enumerate(nodes.queue):
                yield from (((*place, "queue", i, key), key) for key in ("partition", "qos") if getattr(queue, key))
