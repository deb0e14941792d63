"""Facts of a site -> a commented cluster file: which tables and queues it has. Its text is a template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from operator import itemgetter

from orchestrator.cluster.profile import ClusterQueue
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
    queues: tuple[ClusterQueue, ...] = ()


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
    distinct: dict[str, NodeTable] = {}
    for table in sorted(made, key=lambda t: (t.mig, -t.nodes * t.gpus, t.kind)):
        names = chain([table.kind], (f"{table.kind}-{number}" for number in count(2)))
        kind = next(name for name in names if name not in distinct)
        distinct[kind] = replace(table, kind=kind)
    plain = [group for group in usable if not group.gres] or usable
    return [*distinct.values(), *([_cpu_table(site, plain)] if plain else [])]


def _usable(site: SiteFacts, group: NodeGroup) -> bool:
    partition = site.partitions.get(group.partition, Partition())
    mine = {a.account for a in site.accounts}
    allowed = mine & (set(partition.allow_accounts) or mine) - set(partition.deny_accounts)
    is_open = partition.up and not partition.root_only and (bool(allowed) or not mine)
    return is_open and group.up and group.cores > 0


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
    gpus = {g: dict(g.gres)[type_] for g in groups}
    most = max(groups, key=lambda g: (g.count, gpus[g]))
    partitions = [site.partitions[g.partition] for g in groups if g.partition in site.partitions]
    return NodeTable(
        kind=kind,
        type=type_,
        constraint=constraint,
        gpus=max(gpus.values()),
        cores=max(g.cores for g in groups),
        memory_mb=max(g.memory_mb for g in groups),
        cores_per_gpu=max(1, min(g.cores // gpus[g] for g in groups)),
        memory_mb_per_gpu=min(int(g.memory_mb * _SHARED_MEMORY) // gpus[g] for g in groups),
        nodes=sum(g.count for g in groups if g.partition == most.partition),
        mig=bool(_SLICE.search(type_)),
        exclusive=bool(partitions) and all(p.exclusive for p in partitions),
        arch=site.arch.get(type_, "x86_64"),
        vendor="amd" if re.match(r"mi\d", kind) else "nvidia",
        uneven=len({(gpus[g], g.cores, g.memory_mb) for g in groups}) > 1,
        queues=_queues(site, groups),
    )


def _cpu_table(site: SiteFacts, groups: Sequence[NodeGroup]) -> NodeTable:
    return NodeTable(
        kind="cpu",
        cores=max(g.cores for g in groups),
        memory_mb=max(g.memory_mb for g in groups),
        memory_mb_per_gpu=min(int(g.memory_mb * _SHARED_MEMORY) // g.cores for g in groups),
        queues=_queues(site, groups),
    )


def _queues(site: SiteFacts, groups: Sequence[NodeGroup]) -> tuple[ClusterQueue, ...]:
    """The queues that are open to this user: with the default QOS, then others, then preemptable ones."""
    found: list[tuple[tuple[bool, bool, bool, float], ClusterQueue]] = []
    for name, nodes_max_time_s in {g.partition: g.max_time_s for g in groups}.items():
        partition = site.partitions.get(name, Partition())
        possible = [a for a in site.accounts if a.account == account(site) and a.partition in {"", name}]
        association = max(possible, key=lambda a: a.partition == name, default=Association())
        allowed = set(partition.allow_qos or association.qos) - set(partition.deny_qos)
        # Slurm without accounting, or an account without QOS: jobs name none.
        for qos in [q for q in association.qos if q in allowed] if association.qos else [""]:
            limits = [site.qos.get(name, Qos()) for name in (qos, partition.qos)]
            max_times_s = [nodes_max_time_s, association.max_time_s, partition.max_time_s]
            queue = ClusterQueue.model_construct(
                partition=name,
                qos=qos,
                max_time_s=_least([*max_times_s, *(limit.max_time_s for limit in limits)]),
                max_nodes=_least([partition.max_nodes, *(limit.max_nodes for limit in limits)]),
                max_gpus=_least(limit.max_gpus for limit in limits),
                max_cpus=_least(limit.max_cpus for limit in limits),
                preemptable=_preemptable(site, partition, qos),
            )
            usual = qos in {"", association.usual_qos}
            order = (queue.preemptable, not usual, not partition.default, queue.max_time_s or math.inf)
            found.append((order, queue))
    return tuple(queue for _, queue in sorted(found, key=itemgetter(0)))


def _preemptable(site: SiteFacts, partition: Partition, qos: str) -> bool:
    if "OFF" in {partition.preempt, site.preempt_mode}:
        return False
    if site.preempt_type == "qos":
        return any(qos in other.preempts for other in site.qos.values())
    is_lower = any(other.priority_tier > partition.priority_tier for other in site.partitions.values())
    return site.preempt_type == "partition_prio" and is_lower


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
    template.filters |= {"text": _toml, "share": _share, "key": _key, "entries": _entries}
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


def _entries(queue: ClusterQueue) -> str:
    """Write ``key = value`` for all that is not a default."""
    values = queue.model_dump(by_alias=True, exclude_defaults=True)
    if queue.max_time_s:
        values["max_time"] = format_time_limit(queue.max_time_s)
    return ", ".join(f"{key} = {_toml(value)}" for key, value in values.items())


def _share(mb: int) -> str:
    """Round down to what a person would write."""
    return _toml(f"{mb // _GIB_MB}G" if mb >= _SMALL_SHARE_MB else f"{mb - mb % 100 or mb}M")
