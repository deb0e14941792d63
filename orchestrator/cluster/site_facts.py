"""Facts about a cluster and its user, parsed from the output of Slurm's commands. Only :func:`query` runs commands.

``sinfo`` reports the partitions that this user sees and their nodes, ``scontrol`` limits and settings, ``sacctmgr`` the
user's accounts and QOS. Sites may disable the last two: the cluster file then says so in place of the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Record = TypeVar("Record")
Run = Callable[..., tuple[bool, str]]
"""Runs a command; returns whether it succeeded, and what it printed."""


def seconds(text: str) -> int:
    """Parse a time as Slurm prints it (``D-HH:MM:SS``, ``MM:SS``, ``MM``); 0: no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:  # UNLIMITED, infinite, INVALID, n/a
        return 0
    days, *rest = match.groups()
    given = [int(part) for part in rest if part is not None]
    if days is None and len(given) < 3:
        given.insert(0, 0)  # minutes and seconds, without hours
    hours, minutes, last = [*given, 0, 0][:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + last


def gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """Parse types and numbers of GPUs in a GRES list: ``gpu:a100:4(S:0-1),gpu:a100.20gb:8,nvme:1`` has two."""
    found: dict[str, int] = {}
    for word in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = word.strip().split(":")
        if parts[0] != "gpu":
            continue
        number = parts[-1] if len(parts) > 1 and parts[-1].isdigit() else ""
        kind = ":".join(parts[1 : -1 if number else None])
        found[kind] = found.get(kind, 0) + (int(number) if number else 1)
    return tuple(found.items())


def _number(text: str) -> int:
    """Parse the whole number that a text begins with; 0: none, or no limit."""
    match = re.match(r"\s*(\d+)", text)
    return int(match[1]) if match else 0


def _names(text: str) -> tuple[str, ...]:
    """Parse a list of names; empty: all."""
    return () if text in {"", "ALL", "N/A", "(null)"} else tuple(name for name in text.split(",") if name)


def _limit(*resources: str) -> Callable[[str], int]:
    """Make the parser of a limit in a TRES list such as ``cpu=64,gres/gpu=4``: the largest of some resources."""

    def parse(text: str) -> int:
        limits = dict(word.partition("=")[::2] for word in text.split(","))
        return max((_number(limits[name]) for name in limits if name.startswith(resources)), default=0)

    return parse


def _parsed(name: str, parse: Callable[[str], Any] = str, missing: str = "") -> Any:
    """A field that holds one value of Slurm's output: its name there, its parser, and the text where it is missing."""
    return field(default=parse(missing), metadata={"name": name, "parse": parse, "missing": missing})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition that are alike."""

    partition: str = _parsed("%R")
    up: bool = _parsed("%a", lambda text: text.strip() == "up")
    max_time_s: int = _parsed("%l", seconds)
    """0: no limit."""
    count: int = _parsed("%D", _number)
    cores: int = _parsed("%c", _number)
    memory_mb: int = _parsed("%m", _number)
    gres: tuple[tuple[str, int], ...] = _parsed("%G", gpus)
    """Type and number of GPUs; the type is empty where the site has none."""
    features: tuple[str, ...] = _parsed("%f", _names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Who may use a partition, and how."""

    name: str = _parsed("PartitionName")
    default: bool = _parsed("Default", lambda text: text == "YES")
    up: bool = _parsed("State", lambda text: text == "UP", "UP")
    max_time_s: int = _parsed("MaxTime", seconds)
    max_nodes: int = _parsed("MaxNodes", _number)
    exclusive: bool = _parsed("OverSubscribe", lambda text: text.startswith("EXCLUSIVE"))
    """Slurm allocates whole nodes."""
    allow_qos: tuple[str, ...] = _parsed("AllowQos", _names)
    """Empty: any."""
    deny_qos: tuple[str, ...] = _parsed("DenyQos", _names)
    allow_accounts: tuple[str, ...] = _parsed("AllowAccounts", _names)
    deny_accounts: tuple[str, ...] = _parsed("DenyAccounts", _names)
    priority_tier: int = _parsed("PriorityTier", _number, "1")
    preempt: str = _parsed("PreemptMode", lambda text: text.partition(",")[0])
    """OFF, CANCEL, REQUEUE, SUSPEND; empty: as the cluster has it."""
    qos: str = _parsed("QoS", lambda text: "".join(_names(text)))
    """Its limits apply to every job of the partition."""
    root_only: bool = _parsed("RootOnly", lambda text: text == "YES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """Limits of a QOS."""

    name: str = _parsed("Name")
    max_time_s: int = _parsed("MaxWall", seconds)
    max_gpus: int = _parsed("MaxTRES", _limit("gres/gpu"))
    max_cpus: int = _parsed("MaxTRES", _limit("cpu"))
    max_nodes: int = _parsed("MaxTRES", _limit("node"))
    max_submit: int = _parsed("MaxSubmitPU", _number)
    preempts: tuple[str, ...] = _parsed("Preempt", _names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """An account of the user, for all partitions or for one."""

    cluster: str = _parsed("Cluster")
    account: str = _parsed("Account")
    partition: str = _parsed("Partition")
    qos: tuple[str, ...] = _parsed("QOS", _names)
    default_qos: str = _parsed("DefaultQOS")
    max_submit: int = _parsed("MaxSubmitJobs", _number)
    max_time_s: int = _parsed("MaxWall", seconds)

    @property
    def usual_qos(self) -> str:
        """The QOS of jobs that name none; empty where it is not known."""
        return self.default_qos or next(iter(self.qos), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """What Slurm reports about a cluster and its user."""

    cluster: str
    version: str = ""
    groups: tuple[NodeGroup, ...] = ()
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    max_array_size: int = 1001
    accounting: bool = False
    preempt_type: str = ""
    preempt_mode: str = "OFF"
    arch: Mapping[str, str] = field(default_factory=dict)
    """Type of GPU -> processor of its nodes, where that is not x86_64."""
    accounts: tuple[Association, ...] = ()
    default_account: str = ""
    qos: Mapping[str, Qos] = field(default_factory=dict)
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Query -> why there was no answer."""


def _columns(kind: type[Any]) -> list[str]:
    """Names in Slurm's output of what the fields of a record hold."""
    return list(dict.fromkeys(f.metadata["name"] for f in fields(kind)))


_SACCTMGR = ("sacctmgr", "-nP", "show")
COMMANDS: dict[str, tuple[str, ...]] = {
    "sinfo": ("sinfo", "--noheader", "--exact", f"--format={'|'.join(_columns(NodeGroup))}"),
    "partitions": ("scontrol", "--oneliner", "show", "partition"),
    "nodes": ("scontrol", "--oneliner", "show", "node"),
    "config": ("scontrol", "show", "config"),
    "user": (*_SACCTMGR, "user", "{user}", "format=DefaultAccount"),
    "associations": (*_SACCTMGR, "associations", "user={user}", f"format={','.join(_columns(Association))}"),
    "qos": (*_SACCTMGR, "qos", f"format={','.join(_columns(Qos))}"),
}
"""Query -> command. Without headers, as their words depend on the locale."""


def query(run: Run, user: str, queries: Iterable[str] = COMMANDS) -> tuple[dict[str, str], dict[str, str]]:
    """Query Slurm about a cluster and a user: answers by query, and error messages of queries without an answer."""
    answers: dict[str, str] = {}
    unanswered: dict[str, str] = {}
    for name in queries:
        ok, text = run(*(word.format(user=user) for word in COMMANDS[name]))
        if ok and text.strip():
            answers[name] = text
        else:
            unanswered[name] = text.strip().partition("\n")[0] or "it prints nothing"
    return answers, unanswered


def parse(answers: Mapping[str, str], unanswered: Mapping[str, str] | None = None) -> SiteFacts:
    """Parse the answers; missing and unreadable values are left out."""
    config = _pairs(answers.get("config", "").splitlines())
    accounting = "slurmdbd" in config.get("AccountingStorageType", "")
    cluster = config.get("ClusterName", "").strip().lower() or "cluster"
    of_accounts = answers if accounting else {}
    partitions = (_record(Partition, _pairs(line.split())) for line in answers.get("partitions", "").splitlines())
    nodes = [_pairs(line.split()) for line in answers.get("nodes", "").splitlines()]
    arch = {kind: node.get("Arch", "x86_64") for node in nodes for kind, _ in gpus(node.get("Gres", ""))}
    return SiteFacts(
        cluster=cluster,
        version=config.get("SLURM_VERSION", ""),
        groups=tuple(group for group in _rows(NodeGroup, answers.get("sinfo", "")) if group.partition),
        partitions={partition.name: partition for partition in partitions if partition.name},
        max_array_size=_number(config.get("MaxArraySize", "")) or 1001,
        accounting=accounting,
        preempt_type=config.get("PreemptType", "").rpartition("/")[2],
        preempt_mode=config.get("PreemptMode", "OFF").partition(",")[0],
        arch={kind: name for kind, name in arch.items() if name != "x86_64"},
        accounts=tuple(
            association
            for association in _rows(Association, of_accounts.get("associations", ""))
            if association.account and association.cluster.lower() == cluster
        ),
        default_account=of_accounts.get("user", "").partition("\n")[0].strip(),
        qos={qos.name: qos for qos in _rows(Qos, of_accounts.get("qos", "")) if qos.name},
        unanswered=dict(unanswered or {}),
    )


def _record(kind: type[Record], values: Mapping[str, str]) -> Record:
    """Parse the values of Slurm's output that the fields of a record name."""
    named = {f.name: f.metadata for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: m["parse"](values.get(m["name"], m["missing"])) for name, m in named.items()})


def _rows(kind: type[Record], text: str) -> Iterator[Record]:
    """Parse a table with ``|`` between columns; rows of another length are left out."""
    columns = _columns(kind)
    for line in text.splitlines():
        values = line.strip().split("|")
        if len(values) == len(columns):
            yield _record(kind, dict(zip(columns, values, strict=True)))


def _pairs(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts such as ``MaxNodes=4``; others are left out."""
    pairs = (text.partition("=") for text in texts)
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}
