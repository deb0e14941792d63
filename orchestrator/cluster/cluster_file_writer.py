"""Facts of a site -> a commented cluster file: which tables and queues it has. Its text is a template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from orchestrator.cluster.site_facts import Association, NodeGroup, Partition, Qos, SiteFacts
from orchestrator.shipped_files import jinja_environment
from orchestrator.units import format_time_limit

_MODEL = re.compile(
    r"(?:nvidia_|tesla_|gpu_)?((?:rtx[_-]?|gtx[_-]?|quadro[_-]?)?(?:gh|gb|mi|[abhklptv])\d{1,4}[a-z]{0,3}"
    r"|(?:rtx|gtx)[_-]?\w*\d{3,4}\w*|volta)(?:[_-]\d+gb?)?(?![a-z0-9])",
    re.IGNORECASE,
)
_SLICE = re.compile(r"\d+g\.\d+gb|\.\d+gb$|(?:^|_)mig(?:_|$)", re.IGNORECASE)
_KIND = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)
_SHARED_MEMORY = 0.95
"""Part of a node's memory that the GPUs' shares add up to; the rest is for the jobs of others."""
_GIB_MB = 1024
_SMALL_SHARE_MB = 8 * _GIB_MB
"""Shares below this are written in MiB."""
_RANK_MEMORY_MB = 4 * _GIB_MB
"""Largest share of a rank without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """One ``queue`` of a table."""

    partition: str
    qos: str = ""
    max_time_s: int = 0
    max_nodes: int = 0
    max_gpus: int = 0
    max_cpus: int = 0
    preemptable: bool = False

    def items(self) -> list[str]:
        """``key = value`` of all that is not a default."""
        values = {key.removesuffix("_s"): value for key, value in asdict(self).items()}
        values["max_time"] = format_time_limit(self.max_time_s) if self.max_time_s else ""
        return [f"{key} = {_toml(value)}" for key, value in values.items() if value or key == "partition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTable:
    """One ``gpu`` table, or the ``cpu`` one."""

    kind: str
    """Its name in the file; ``cpu`` has no GPUs."""
    type: str = ""
    constraint: str = ""
    gpus: int = 0
    cores: int = 0
    memory_mb: int = 0
    cores_per_gpu: int = 1
    memory_mb_per_gpu: int = 0
    nodes: int = 0
    mig: bool = False
    exclusive: bool = False
    arch: str = "x86_64"
    vendor: str = "nvidia"
    uneven: bool = False
    """Whether its nodes differ in GPUs, cores or memory."""
    queues: tuple[QueueLine, ...] = ()


def account(site: SiteFacts) -> str:
    """The account that Slurm charges by default; empty where there is none."""
    names = [a.account for a in site.accounts]
    return site.default_account if site.default_account in names or not names else names[0]


def tables(site: SiteFacts) -> list[NodeTable]:
    """The tables of a cluster file: most common type of GPU first, ``cpu`` last."""
    usable = [group for group in site.groups if _usable(site, group)]
    by_kind: dict[tuple[str, str, str], list[NodeGroup]] = {}
    for group in usable:
        for kind, _ in group.gres:
            by_kind.setdefault(_name(kind, group.features), []).append(group)
    made = [_gpu_table(site, *names, groups) for names, groups in by_kind.items()]
    made.sort(key=lambda t: (t.mig, -t.nodes * t.gpus, t.kind))
    plain = [group for group in usable if not group.gres] or usable
    return [*_distinct(made), *([_cpu_table(site, plain)] if plain else [])]


def _usable(site: SiteFacts, group: NodeGroup) -> bool:
    partition = site.partitions.get(group.partition)
    if not group.up or group.cores < 1 or (partition and (not partition.up or partition.root_only)):
        return False
    mine = {a.account for a in site.accounts}
    if partition is None or not mine:
        return True
    allowed = mine & set(partition.allow_accounts) if partition.allow_accounts else mine
    return bool(allowed - set(partition.deny_accounts))


def _name(kind: str, features: Sequence[str]) -> tuple[str, str, str]:
    """Name in the file, type and constraint of GPUs; a node's features name GPUs that have no type."""
    if kind:
        name = _KIND.sub("-", kind.lower().removeprefix("nvidia_").removeprefix("tesla_")).strip("-.")
        return (name if re.match(r"[a-z]", name) and name not in {"cpu", "gpu"} else f"gpu-{name}", kind, "")
    for feature in features:
        if match := _MODEL.fullmatch(feature):
            return match[1].lower(), "", feature
    return "any", "", ""


def _gpu_table(site: SiteFacts, kind: str, type_: str, constraint: str, groups: Sequence[NodeGroup]) -> NodeTable:
    def number(group: NodeGroup) -> int:
        return dict(group.gres)[type_]

    most = max(groups, key=lambda g: (g.count, number(g)))
    largest = max(map(number, groups))
    shares = [(g.cores // number(g), int(g.memory_mb * _SHARED_MEMORY) // number(g)) for g in groups]
    names = dict.fromkeys(g.partition for g in groups)
    partitions = [site.partitions[n] for n in names if n in site.partitions]
    return NodeTable(
        kind=kind,
        type=type_,
        constraint=constraint,
        gpus=largest,
        cores=max(g.cores for g in groups),
        memory_mb=max(g.memory_mb for g in groups),
        cores_per_gpu=max(1, min(cores for cores, _ in shares)),
        memory_mb_per_gpu=min(memory for _, memory in shares),
        nodes=sum(g.count for g in groups if g.partition == most.partition),
        mig=bool(_SLICE.search(type_)),
        exclusive=bool(partitions) and all(p.exclusive for p in partitions),
        arch=site.arch.get(type_, "x86_64"),
        vendor="amd" if re.match(r"mi\d", kind) else "nvidia",
        uneven=len({(number(g), g.cores, g.memory_mb) for g in groups}) > 1,
        queues=_queues(site, list(names), groups),
    )


def _cpu_table(site: SiteFacts, groups: Sequence[NodeGroup]) -> NodeTable:
    names = list(dict.fromkeys(g.partition for g in groups))
    return NodeTable(
        kind="cpu",
        cores=max(g.cores for g in groups),
        memory_mb=max(g.memory_mb for g in groups),
        memory_mb_per_gpu=min(int(g.memory_mb * _SHARED_MEMORY) // g.cores for g in groups),
        queues=_queues(site, names, groups),
    )


def _distinct(made: Sequence[NodeTable]) -> list[NodeTable]:
    """Number the types whose names in the file would be the same."""
    seen: set[str] = set()
    kept = []
    for table in made:
        name, number = table.kind, 2
        while name in seen:
            name, number = f"{table.kind}-{number}", number + 1
        seen.add(name)
        kept.append(replace(table, kind=name))
    return kept


def _queues(site: SiteFacts, names: Sequence[str], groups: Sequence[NodeGroup]) -> tuple[QueueLine, ...]:
    """The queues that are open to this user: with the default QOS, then others, then preemptable ones."""
    limits = {g.partition: g.max_time_s for g in groups}
    mine = account(site)
    found: list[tuple[tuple[bool, bool, bool, float], QueueLine]] = []
    for name in names:
        partition = site.partitions.get(name) or Partition(name=name, max_time_s=limits.get(name, 0))
        possible = [a for a in site.accounts if a.account == mine and a.partition in {"", name}]
        association = max(possible, key=lambda a: a.partition == name, default=None)
        for qos in _open_qos(partition, association):
            of_qos = site.qos.get(qos, Qos(name=qos))
            of_all = site.qos.get(partition.qos, Qos(name=""))
            caps = [partition.max_time_s, limits.get(name, 0), of_qos.max_time_s, of_all.max_time_s]
            line = QueueLine(
                partition=name,
                qos=qos,
                max_time_s=_least([*caps, association.max_time_s if association else 0]),
                max_nodes=_least([partition.max_nodes, of_qos.max_nodes, of_all.max_nodes]),
                max_gpus=_least([of_qos.max_gpus, of_all.max_gpus]),
                max_cpus=_least([of_qos.max_cpus, of_all.max_cpus]),
                preemptable=_preemptable(site, partition, qos),
            )
            usual = not qos or association is None or qos == association.usual_qos
            order = (line.preemptable, not usual, not partition.default, line.max_time_s or math.inf)
            found.append((order, line))
    return tuple(line for _, line in sorted(found, key=lambda pair: pair[0]))


def _open_qos(partition: Partition, association: Association | None) -> list[str]:
    """The QOS that an account may use in a partition; one empty name where Slurm reports none."""
    if association is None or not association.qos:
        return [""]
    allowed = [q for q in association.qos if not partition.allow_qos or q in partition.allow_qos]
    return [q for q in allowed if q not in partition.deny_qos]


def _preemptable(site: SiteFacts, partition: Partition, qos: str) -> bool:
    if partition.preempt == "OFF" or site.preempt_mode == "OFF":
        return False
    if site.preempt_type == "qos":
        return any(qos in other.preempts for other in site.qos.values())
    if site.preempt_type == "partition_prio":
        return any(other.priority_tier > partition.priority_tier for other in site.partitions.values())
    return False


def requeue(site: SiteFacts) -> str:
    """Value of the key ``requeue``: what Slurm does with a preempted job."""
    modes = {p.preempt or site.preempt_mode for p in site.partitions.values()} | {site.preempt_mode}
    if site.preempt_type in {"", "none"} or modes <= {"OFF"}:
        return "never"
    return "requeue" if "REQUEUE" in modes else "cancel"


def max_submit(site: SiteFacts) -> int:
    """Jobs that the user may have queued; 0: not known."""
    mine = [a for a in site.accounts if a.account == account(site)]
    usual = [site.qos[a.usual_qos].max_submit for a in mine if a.usual_qos in site.qos]
    return _least([*(a.max_submit for a in mine), *usual])


def _least(limits: Iterable[int]) -> int:
    return min((limit for limit in limits if limit), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """The login node and the user that a file is written for."""

    user: str
    host: str
    """Full name of the login node."""
    date: str
    slurm_bin: str = ""
    """Folder of srun, if not one of a system's usual folders."""
    scratch: str = ""
    """The user's folder on a shared disk, with ``{user}`` in place of the name; empty where none was found."""


def target(site: SiteFacts) -> str:
    """Name of the cluster in the file."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", site.cluster).strip("-")
    return name if name and name != "local" else "cluster"


def text(site: SiteFacts, login: Login) -> str:
    """The cluster file."""
    domain = login.host.partition(".")[2]
    template = jinja_environment("clusters")
    template.filters |= {"text": _toml, "share": _share, "key": _key}
    return template.get_template("discovered.toml.j2").render(
        site=site,
        login=login,
        name=target(site),
        host_pattern=f"{re.escape('.' + domain)}$" if domain else "",
        accounts=list(dict.fromkeys(a.account for a in site.accounts)),
        account=account(site),
        max_submit=max_submit(site),
        requeue=requeue(site),
        tables=tables(site),
        rank_memory_mb=_RANK_MEMORY_MB,
    )


def _toml(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _share(mb: int) -> str:
    """Round down to what a person would write."""
    return _toml(f"{mb // _GIB_MB}G" if mb >= _SMALL_SHARE_MB else f"{mb - mb % 100 or mb}M")
