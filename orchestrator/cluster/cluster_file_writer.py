"""Facts of a site -> a commented cluster file: which tables and queues it has, and the text. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.cluster.site_facts import Association, NodeGroup, Partition, Qos, SiteFacts
from orchestrator.units import format_time_limit

_MODEL = re.compile(
    r"(?:nvidia_|tesla_|gpu_)?((?:rtx[_-]?|gtx[_-]?|quadro[_-]?)?(?:gh|gb|mi|[abhklptv])\d{1,4}[a-z]{0,3}"
    r"|(?:rtx|gtx)[_-]?\w*\d{3,4}\w*|volta)(?:[_-]\d+gb?)?(?![a-z0-9])",
    re.IGNORECASE,
)
_SLICE = re.compile(r"\d+g\.\d+gb|\.\d+gb$|(?:^|_)mig(?:_|$)", re.IGNORECASE)
_KIND = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)

_KIND = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)
_SPARED_MEMORY = 0.95
"""Part of a node's memory that is shared out: the rest is what jobs of other people take."""
_GIB_MB = 1024
_SMALL_SHARE_MB = 8 * _GIB_MB
"""Shares below this are said in MiB."""
_RANK_MEMORY_MB = 4 * _GIB_MB
"""Of a process without a GPU."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
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
    uneven: bool = False
    """Whether its nodes differ in GPUs, cores or memory."""
    queues: tuple[QueueLine, ...] = ()


def account(site: SiteFacts) -> str:
    """The account that jobs are charged to unless somebody says otherwise; empty where there is none."""
    names = [a.account for a in site.accounts]
    return site.default_account if site.default_account in names or not names else names[0]


def tables(site: SiteFacts) -> list[Table]:
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
    """Name in the file, type and constraint of GPUs: a node's features tell what GPUs without a type are."""
    if kind:
        name = _KIND.sub("-", kind.lower().removeprefix("nvidia_").removeprefix("tesla_")).strip("-.")
        return (name if re.match(r"[a-z]", name) and name not in {"cpu", "gpu"} else f"gpu-{name}", kind, "")
    for feature in features:
        if match := _MODEL.fullmatch(feature):
            return match[1].lower(), "", feature
    return "any", "", ""


def _gpu_table(site: SiteFacts, kind: str, type_: str, constraint: str, groups: Sequence[NodeGroup]) -> Table:
    def number(group: NodeGroup) -> int:
        return dict(group.gres)[type_]

    most = max(groups, key=lambda g: (g.count, number(g)))
    largest = max(map(number, groups))
    shares = [(g.cores // number(g), int(g.memory_mb * _SPARED_MEMORY) // number(g)) for g in groups]
    names = dict.fromkeys(g.partition for g in groups)
    partitions = [site.partitions[n] for n in names if n in site.partitions]
    return Table(
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
        uneven=len({(number(g), g.cores, g.memory_mb) for g in groups}) > 1,
        queues=_queues(site, list(names), groups),
    )


def _cpu_table(site: SiteFacts, groups: Sequence[NodeGroup]) -> Table:
    names = list(dict.fromkeys(g.partition for g in groups))
    return Table(
        kind="cpu",
        cores=max(g.cores for g in groups),
        memory_mb=max(g.memory_mb for g in groups),
        memory_mb_per_gpu=min(int(g.memory_mb * _SPARED_MEMORY) // g.cores for g in groups),
        queues=_queues(site, names, groups),
    )


def _distinct(made: Sequence[Table]) -> list[Table]:
    """Two types whose names in the file would be the same keep their whole names."""
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
    """The pairs of partition and QOS that are open to this user: with the usual QOS, then others, then preemptable."""
    limits = {g.partition: g.max_time_s for g in groups}
    mine = account(site)
    found: list[tuple[tuple[bool, bool, bool, float], QueueLine]] = []
    for name in names:
        partition = site.partitions.get(name) or Partition(name=name, max_time_s=limits.get(name, 0))
        places = [a for a in site.accounts if a.account == mine and a.partition in {"", name}]
        place = next((a for a in places if a.partition == name), places[0] if places else None)
        for qos in _open_qos(partition, place):
            of_qos = site.qos.get(qos, Qos(name=qos))
            of_all = site.qos.get(partition.qos, Qos(name=""))
            caps = [partition.max_time_s, limits.get(name, 0), of_qos.max_time_s, of_all.max_time_s]
            line = QueueLine(
                partition=name,
                qos=qos,
                max_time_s=_least([*caps, place.max_time_s if place else 0]),
                max_nodes=_least([partition.max_nodes, of_qos.max_nodes, of_all.max_nodes]),
                max_gpus=_least([of_qos.max_gpus, of_all.max_gpus]),
                max_cpus=_least([of_qos.max_cpus, of_all.max_cpus]),
                preemptable=_preemptable(site, partition, qos),
            )
            usual = not qos or place is None or qos == (place.default_qos or _first(place.qos))
            order = (line.preemptable, not usual, not partition.default, line.max_time_s or math.inf)
            found.append((order, line))
    return tuple(line for _, line in sorted(found, key=lambda pair: pair[0]))


def _open_qos(partition: Partition, place: Association | None) -> list[str]:
    """The QOS with which an account may use a partition; an empty one where nothing is known of any."""
    if place is None or not place.qos:
        return [""]
    allowed = [q for q in place.qos if not partition.allow_qos or q in partition.allow_qos]
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
    """The key of the same name: what becomes of a job that is preempted."""
    modes = {p.preempt or site.preempt_mode for p in site.partitions.values()} | {site.preempt_mode}
    if site.preempt_type in {"", "none"} or modes <= {"OFF"}:
        return "never"
    return "requeue" if "REQUEUE" in modes else "cancel"


def max_submit(site: SiteFacts) -> int:
    """Jobs the user may have queued; 0 where nobody says."""
    mine = [a for a in site.accounts if a.account == account(site)]
    usual = [site.qos[q].max_submit for a in mine for q in [a.default_qos or _first(a.qos)] if q in site.qos]
    return _least([*(a.max_submit for a in mine), *usual])


def _least(limits: Iterable[int]) -> int:
    return min((limit for limit in limits if limit), default=0)


def _first(names: Sequence[str]) -> str:
    return names[0] if names else ""


# --- the text ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Where and by whom a file is written."""

    user: str
    host: str
    """Full name of the login node."""
    date: str
    slurm_bin: str = ""
    """Where srun is, if not in a system's usual folders."""
    scratch: str = ""
    """The user's folder on a shared disk, with ``{user}`` in place of the name; empty where none was found."""


def text(site: SiteFacts, place: Login) -> str:
    """The cluster file."""
    return "\n".join([*_top(site, place), *(line for table in tables(site) for line in _table(site, table)), ""])


def target(site: SiteFacts) -> str:
    """Name of the cluster in the file."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", site.cluster).strip("-")
    return name if name and name != "local" else "cluster"


def _top(site: SiteFacts, place: Login) -> Iterator[str]:
    slurm = " ".join(["Slurm", *([site.version] if site.version else [])])
    yield f"# Written on {place.date} by `orchestrate init --cluster`, from what {slurm} says of the cluster"
    yield f"# {target(site)} and of the user {place.user}. What Slurm does not tell is marked with (?); the rest"
    yield "# `orchestrate doctor` tries. cluster.example.toml explains every key, docs/slurm.md what to do next."
    for question, why in site.unanswered.items():
        if site.accounting or question not in {"user", "associations", "qos"}:
            yield f"# Not answered here: {question} ({why})"
    yield ""
    yield f"[cluster.{target(site)}]"
    domain = place.host.partition(".")[2]
    if domain:
        yield f"hostname_pattern = '{re.escape('.' + domain)}$'"
    else:
        yield "# (?) The name of this host has no domain to tell the cluster by."
        yield 'hostname_pattern = ""'
    yield ""
    yield from _accounts(site)
    yield ""
    limit = max_submit(site)
    yield "# Jobs you may have queued, array tasks counted; 0 is not known." + ("" if limit else " (?)")
    yield f"max_submit = {limit}"
    yield f"array_index_max = {max(1, site.max_array_size - 1)}"
    yield "# This site keeps accounts of jobs." if site.accounting else "# This site keeps no accounts of jobs."
    yield f"accounting = {_say('auto' if site.accounting else 'squeue')}"
    yield "# What becomes of a job that is preempted."
    yield f"requeue = {_say(requeue(site))}"
    yield "# (?) Seconds between two questions to Slurm: ask your site before you lower it."
    yield "poll_seconds = 60"
    yield ""
    yield "# (?) Your folder on a disk that all nodes see; data sets, results and the environment belong there."
    yield f"scratch = {_say(place.scratch)}"
    yield 'data = "{scratch}/data"' if place.scratch else 'data = ""'
    yield "# (?) The interpreter of jobs, an absolute path; empty is the one that runs orchestrate."
    yield 'python = ""'
    if place.slurm_bin:
        yield "# Slurm's commands are not in the usual folders here."
        yield f"slurm_bin = {_say(place.slurm_bin)}"
    yield "# (?) What jobs run first: modules that the site wants to be loaded."
    yield "prologue = []"


def _accounts(site: SiteFacts) -> Iterator[str]:
    names = list(dict.fromkeys(a.account for a in site.accounts))
    if not site.accounting:
        yield "# This site has no accounts."
    elif not names:
        yield "# (?) Slurm does not tell your accounts; many sites take no job without one."
    elif len(names) == 1:
        yield "# Your only account."
    else:
        yield f"# Your accounts: {', '.join(names)}; {account(site)} is the one that Slurm takes by itself."
    yield f"account = {_say(account(site))}"


def _table(site: SiteFacts, table: Table) -> Iterator[str]:
    name = target(site)
    yield ""
    if table.kind == "cpu":
        yield '# Nodes for hardware = "cpu:N".'
        yield f"[cluster.{name}.cpu]"
        yield f"node_cores = {table.cores}"
        yield f'node_mem = "{table.memory_mb}M"'
        yield f"mem_per_rank = {_share(max(1, min(table.memory_mb_per_gpu, _RANK_MEMORY_MB)))}"
        yield from _queue_lines(table)
        return
    many = f"{table.nodes} node{'s' * (table.nodes > 1)}"
    yield f"# {many} with {table.gpus} such GPU{'s' * (table.gpus > 1)} each: hardware = {_say(f'{table.kind}:1')}."
    if table.uneven:
        yield "# They differ; the shares of cores and memory below fit all of them, the sizes are those of the largest."
    yield f"[cluster.{name}.gpu.{_key(table.kind)}]"
    yield f"type = {_say(table.type)}"
    if table.constraint:
        yield "# The site has one name for all GPUs; this feature of the nodes tells them apart."
        yield f"constraint = {_say(table.constraint)}"
    yield f"node_gpus = {table.gpus}"
    yield f"node_cores = {table.cores}"
    yield f'node_mem = "{table.memory_mb}M"'
    yield "# Shares of a run that names none, for each GPU."
    yield f"cpus_per_gpu = {table.cores_per_gpu}"
    yield f"mem_per_gpu = {_share(table.memory_mb_per_gpu)}"
    if table.exclusive:
        yield "# Nodes are given whole here."
        yield "exclusive = true"
    if table.mig:
        yield "# A slice of a GPU: a run gets one."
        yield "mig = true"
    if table.arch != "x86_64":
        yield "# Another processor: these nodes need an environment of their own."
        yield f"arch = {_say(table.arch)}"
    if re.match(r"mi\d", table.kind):
        yield 'vendor = "amd"'
    yield "# (?) What a job must find, or it ends within seconds: a part of the GPU's name, its memory in GB."
    yield f"# expect_name = {_say(table.kind.partition('.')[0].upper())}"
    yield "# expect_mem_gb = 0"
    yield from _queue_lines(table)


def _queue_lines(table: Table) -> Iterator[str]:
    if not table.queues:
        yield "# (?) No partition with such nodes is open to you."
        return
    yield '# A run takes the first that it fits into; queue_choice = "earliest" asks where it would start first.'
    yield "queue = ["
    for queue in table.queues:
        said = [f"partition = {_say(queue.partition)}"]
        said += [f"qos = {_say(queue.qos)}"] if queue.qos else []
        said += [f"max_time = {_say(format_time_limit(queue.max_time_s))}"] if queue.max_time_s else []
        limits = {"max_nodes": queue.max_nodes, "max_gpus": queue.max_gpus, "max_cpus": queue.max_cpus}
        said += [f"{key} = {limit}" for key, limit in limits.items() if limit]
        said += ["preemptable = true"] if queue.preemptable else []
        yield f"  {{ {', '.join(said)} }},"
    yield "]"


def _say(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _say(name)


def _share(mb: int) -> str:
    """Rounded down to what a person would write."""
    return _say(f"{mb // _GIB_MB}G" if mb >= _SMALL_SHARE_MB else f"{mb - mb % 100 or mb}M")
