"""Facts about a cluster and its user, parsed from the output of Slurm's commands. Only :func:`ask` runs anything.

``sinfo`` reports the partitions that this user sees and their nodes, ``scontrol`` limits and settings, ``sacctmgr`` the
user's accounts and QOS. Sites may disable the last two: the cluster file then says so in place of the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

SINFO_FORMAT = "%R|%a|%l|%D|%c|%m|%G|%f"
ASSOCIATIONS = "Cluster,Account,Partition,QOS,DefaultQOS,MaxSubmitJobs,MaxWall"
QOS = "Name,MaxWall,MaxTRES,MaxSubmitPU,Preempt"

COMMANDS: dict[str, tuple[str, ...]] = {
    "sinfo": ("sinfo", "--noheader", "--exact", f"--format={SINFO_FORMAT}"),
    "partitions": ("scontrol", "--oneliner", "show", "partition"),
    "nodes": ("scontrol", "--oneliner", "show", "node"),
    "config": ("scontrol", "show", "config"),
    "user": ("sacctmgr", "-nP", "show", "user", "{user}", "format=DefaultAccount"),
    "associations": ("sacctmgr", "-nP", "show", "associations", "user={user}", f"format={ASSOCIATIONS}"),
    "qos": ("sacctmgr", "-nP", "show", "qos", f"format={QOS}"),
}
"""Query -> command. Without headers, as their words depend on the locale."""

_TIMES_NOT_LIMITED = {"", "UNLIMITED", "infinite", "INVALID", "n/a", "N/A", "(null)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition that are alike."""

    partition: str
    up: bool
    max_time_s: int
    """0: no limit."""
    count: int
    cores: int
    memory_mb: int
    gres: tuple[tuple[str, int], ...] = ()
    """Type and number of GPUs; the type is empty where the site has none."""
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Who may use a partition, and how."""

    name: str
    default: bool = False
    up: bool = True
    max_time_s: int = 0
    max_nodes: int = 0
    exclusive: bool = False
    """Slurm allocates whole nodes."""
    allow_qos: tuple[str, ...] = ()
    """Empty: any."""
    deny_qos: tuple[str, ...] = ()
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    priority_tier: int = 1
    preempt: str = ""
    """OFF, CANCEL, REQUEUE, SUSPEND; empty: as the cluster has it."""
    qos: str = ""
    """Its limits apply to every job of the partition."""
    root_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """Limits of a QOS."""

    name: str
    max_time_s: int = 0
    max_gpus: int = 0
    max_cpus: int = 0
    max_nodes: int = 0
    max_submit: int = 0
    preempts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """An account of the user, for all partitions or for one."""

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    max_submit: int = 0
    max_time_s: int = 0

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


def query(
    run: Callable[..., tuple[bool, str]], user: str, queries: Iterable[str] = COMMANDS
) -> tuple[dict[str, str], dict[str, str]]:
    """Query Slurm: answers by query, and the error messages of queries without an answer.

    Args:
        run: runs a command; returns whether it succeeded, and what it printed.
        user: whose accounts.
        queries: names in ``COMMANDS``.
    """
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
    config = _settings(answers.get("config", ""))
    accounting = "slurmdbd" in config.get("AccountingStorageType", "")
    cluster = config.get("ClusterName", "").strip().lower() or "cluster"
    return SiteFacts(
        cluster=cluster,
        version=config.get("SLURM_VERSION", ""),
        groups=tuple(filter(None, map(_group, answers.get("sinfo", "").splitlines()))),
        partitions={p.name: p for p in filter(None, map(_partition, answers.get("partitions", "").splitlines()))},
        max_array_size=_number(config.get("MaxArraySize", "")) or 1001,
        accounting=accounting,
        preempt_type=config.get("PreemptType", "").rpartition("/")[2],
        preempt_mode=config.get("PreemptMode", "OFF").partition(",")[0],
        arch=_processors(answers.get("nodes", "")),
        accounts=tuple(_associations(answers.get("associations", ""), cluster)) if accounting else (),
        default_account=answers.get("user", "").partition("\n")[0].strip() if accounting else "",
        qos={q.name: q for q in filter(None, map(_qos, answers.get("qos", "").splitlines()))} if accounting else {},
        unanswered=dict(unanswered or {}),
    )


def seconds(text: str) -> int:
    """Parse a time as Slurm prints it (``D-HH:MM:SS``, ``MM:SS``, ``MM``); 0: no limit."""
    if text.strip() in _TIMES_NOT_LIMITED:
        return 0
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return 0
    days, *fields = match.groups()
    given = [int(f) for f in fields if f is not None]
    if days is not None or len(given) == 3:
        hours, minutes, rest = [*given, 0, 0][:3]
    else:
        hours, (minutes, rest) = 0, [*given, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest


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


def _settings(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def _number(text: str) -> int:
    """Parse the whole number that a text begins with; 0: none, or no limit."""
    match = re.match(r"\s*(\d+)", text or "")
    return int(match[1]) if match else 0


def _names(text: str) -> tuple[str, ...]:
    """Parse a list of names; empty: all."""
    return () if text in {"", "ALL", "N/A", "(null)"} else tuple(name for name in text.split(",") if name)


def _group(line: str) -> NodeGroup | None:
    fields = line.strip().split("|")
    if len(fields) != 8 or not fields[0]:
        return None
    partition, up, limit, count, cores, memory, gres, features = fields
    return NodeGroup(
        partition=partition,
        up=up.strip() == "up",
        max_time_s=seconds(limit),
        count=_number(count),
        cores=_number(cores),
        memory_mb=_number(memory),
        gres=gpus(gres),
        features=_names(features),
    )


def _partition(line: str) -> Partition | None:
    fields = _words(line)
    name = fields.get("PartitionName", "")
    if not name:
        return None
    return Partition(
        name=name,
        default=fields.get("Default") == "YES",
        up=fields.get("State", "UP") == "UP",
        max_time_s=seconds(fields.get("MaxTime", "")),
        max_nodes=_number(fields.get("MaxNodes", "")),
        exclusive=fields.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        allow_qos=_names(fields.get("AllowQos", "")),
        deny_qos=_names(fields.get("DenyQos", "")),
        allow_accounts=_names(fields.get("AllowAccounts", "")),
        deny_accounts=_names(fields.get("DenyAccounts", "")),
        priority_tier=_number(fields.get("PriorityTier", "1")),
        preempt=fields.get("PreemptMode", "").partition(",")[0],
        qos="".join(_names(fields.get("QoS", ""))),
        root_only=fields.get("RootOnly") == "YES",
    )


def _words(line: str) -> dict[str, str]:
    return {key: value for key, equals, value in (word.partition("=") for word in line.split()) if equals}


def _processors(text: str) -> dict[str, str]:
    """Type of GPU -> processor of its nodes."""
    found = {}
    for fields in map(_words, text.splitlines()):
        for kind, _ in gpus(fields.get("Gres", "")):
            found[kind] = fields.get("Arch", "x86_64")
    return {kind: arch for kind, arch in found.items() if arch != "x86_64"}


def _associations(text: str, cluster: str) -> Iterable[Association]:
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 7 and fields[1] and fields[0].lower() == cluster:
            _, account, partition, qos, default, submit, wall = fields
            yield Association(
                account=account,
                partition=partition,
                qos=_names(qos),
                default_qos=default,
                max_submit=_number(submit),
                max_time_s=seconds(wall),
            )


def _qos(line: str) -> Qos | None:
    fields = line.strip().split("|")
    if len(fields) != 5 or not fields[0]:
        return None
    name, wall, tres, submit, preempts = fields
    limits = dict(word.partition("=")[::2] for word in tres.split(","))
    return Qos(
        name=name,
        max_time_s=seconds(wall),
        max_gpus=max((_number(v) for k, v in limits.items() if k.startswith("gres/gpu")), default=0),
        max_cpus=_number(limits.get("cpu", "")),
        max_nodes=_number(limits.get("node", "")),
        max_submit=_number(submit),
        preempts=_names(preempts),
    )
