"""What is wrong with a job script, or with the scripts that a cluster profile leads to. Needs no Slurm.

Every script is checked when it is rendered (:func:`script_faults`). ``doctor`` and the tests of the shipped profiles
ask for a pair of each type of device, at each queue's own limit (:func:`pairs`).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import resources
from orchestrator.errors import InputError
from orchestrator.profile import ClusterProfile, GpuNodes, Queue
from orchestrator.quantities import QuantityError, format_time_limit, parse_time_limit
from orchestrator.resources import ResourceShape
from orchestrator.sbatch import INDISPENSABLE, OWNED_DIRECTIVES, SHORT_OPTIONS
from workloads import registry
from workloads.contract import Execution, Hardware, TrainConfig

GPU_DIRECTIVES = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"})
MEMORY_DIRECTIVES = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})

_PROBE = "probe"
"""The strategy whose runs are rendered: one process a device, no framework."""
_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that Slurm would refuse, or pass over in silence."""

    what: str
    hint: str = ""


Options = Mapping[str, str | bool]
"""Long option name to value; True for an option without one."""


def script_faults(text: str, wanted: Options, forbid: Collection[str] = ()) -> Iterator[Fault]:
    """Compare the ``#SBATCH`` lines of a script with what was decided for its run.

    Args:
        text: the script.
        wanted: the options that the run was given.
        forbid: options that the site rejects.
    """
    if not text.startswith("#!"):
        yield Fault("the script does not start with #!", "nothing may stand before it")
        return
    found: list[tuple[str, str | bool]] = []
    started = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("#SBATCH"):
            if started or not line.startswith("#SBATCH"):
                yield Fault(
                    f"line {number} of the script would be ignored by Slurm: {line.strip()}",
                    "#SBATCH lines stand in column 0 and before the first command, in the block directives",
                )
            try:
                found += _options(line.removeprefix("#SBATCH"))
            except ValueError as error:
                yield Fault(f"line {number} of the script cannot be read ({error}): {line}")
        started = started or bool(line.strip() and not line.lstrip().startswith("#"))
    yield from _against(found, wanted, forbid)


def _against(found: list[tuple[str, str | bool]], wanted: Options, forbid: Collection[str]) -> Iterator[Fault]:
    names = Counter(name for name, _ in found)
    for name, count in names.items():
        if count > 1:
            yield Fault(f"--{name} is said {count} times, and Slurm takes the last", _key(name))
        elif name in forbid:
            yield Fault(f"--{name} is forbidden at this site", "take it out of the block directives, or of forbid")
    for family, what in ((GPU_DIRECTIVES, "GPUs are"), (MEMORY_DIRECTIVES, "memory is")):
        ways = sorted(name for name in names if name in family)
        if len(ways) > 1:
            yield Fault(f"{what} asked for in {len(ways)} ways: --{' and --'.join(ways)}", _key(ways[0]))
    for name, value in dict(found).items():
        if name in OWNED_DIRECTIVES and wanted.get(name) != value:
            said = f"--{name}" if value is True else f"--{name}={value}"
            yield Fault(f"{said} is not what was planned for this run", _key(name))
    needed = [name for name in wanted if name in INDISPENSABLE | GPU_DIRECTIVES | MEMORY_DIRECTIVES]
    for name in (name for name in needed if name not in names):
        yield Fault(f"--{name} is missing", "write {{ super() }} in the block directives")


def _key(name: str) -> str:
    key = OWNED_DIRECTIVES.get(name)
    return f"say it with {key}" if key else f"remove --{name} from the block directives"


def _options(text: str) -> Iterator[tuple[str, str | bool]]:
    """The options of one ``#SBATCH`` line, long names, as Slurm splits it."""
    words = shlex.split(text, comments=True)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and len(word) > 1 and word[1] in SHORT_OPTIONS:
            name, value = SHORT_OPTIONS[word[1]], word[2:].removeprefix("=")
            equals = "=" if value else ""
        else:
            raise ValueError(f"{word} is not an option of sbatch")
        if not equals and words and not words[0].startswith("-"):
            equals, value = "=", words.pop(0)
        yield name, value if equals else True


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a profile makes of one request."""

    hardware: str
    time_limit_s: int
    refusal: str = ""
    """Why it cannot be had; empty where it can."""
    shape: ResourceShape | None = None
    text: str = ""
    """The script."""
    faults: list[Fault] = field(default_factory=list)


def pairs(profile: ClusterProfile, *, runs: Path = Path("/runs")) -> Iterator[Rendered]:
    """Ask for two devices of each type on one node: for an hour, for each queue's limit, for more than any gives."""
    for kind in [*profile.gpu, *(["cpu"] if profile.cpu else [])]:
        nodes = profile.nodes(kind)
        assert nodes is not None
        caps = {q.max_time_s for q in nodes.queue if q.max_time_s and (profile.allow_preemptable or not q.preemptable)}
        beyond = max(caps) + 60 if caps and all(q.max_time_s for q in nodes.queue) else 0
        for limit_s in sorted({min([_HOUR_S, *caps]), *caps, *([beyond] if beyond else [])}):
            yield request(profile, f"{kind}:2", limit_s, runs=runs)
        if isinstance(nodes, GpuNodes) and (nodes.node_gpus < 2 or nodes.mig):
            yield request(profile, f"{kind}:1", min([_HOUR_S, *caps]), runs=runs)


def request(profile: ClusterProfile, hardware: str, time_limit_s: int, *, runs: Path = Path("/runs")) -> Rendered:
    """What a profile makes of a run on such hardware."""
    from orchestrator import render

    asked = Hardware.parse(hardware)
    cpus = resources.default_cpus(profile)(asked, asked.devices)
    train = TrainConfig(model="cnn", dataset="digits", strategy=_PROBE, hardware=hardware, cpus=cpus)
    strategy = registry.strategies()[_PROBE]
    shape = resources.shape(train, Execution(time_limit_s=time_limit_s), strategy, profile, None)
    if isinstance(shape, str):
        return Rendered(hardware, time_limit_s, refusal=shape)
    try:
        text = render.script(shape, profile, runs=runs, python=profile.python)
    except InputError as error:
        return Rendered(hardware, time_limit_s, shape=shape, faults=[Fault(error.what, error.hint)])
    faults = list(_time_faults(text, shape, profile))
    return Rendered(hardware, time_limit_s, shape=shape, text=text, faults=faults)


def _time_faults(text: str, shape: ResourceShape, profile: ClusterProfile) -> Iterator[Fault]:
    """Whether the time that the script asks for is within the cap of the pair of partition and QOS that it names."""
    said: dict[str, str | bool] = {}
    for line in text.split("\n"):
        if line.startswith("#SBATCH"):
            said |= dict(_options(line.removeprefix("#SBATCH")))
    nodes = profile.nodes(shape.gpu or "cpu")
    queues = nodes.queue if nodes is not None else ()
    pair = (said.get("partition", ""), said.get("qos", ""))
    queue = next((q for q in queues if (q.partition, q.qos) == pair), None if queues else Queue())
    if queue is None:
        yield Fault(f"the script names {'/'.join(map(str, pair))}, which is none of the profile's queues")
        return
    try:
        limit_s = parse_time_limit(said.get("time"))
    except QuantityError as error:
        yield Fault(f"--time: {error.what}", error.hint)
        return
    if queue.max_time_s and limit_s > queue.max_time_s:
        yield Fault(f"{format_time_limit(limit_s)} is longer than {queue} lasts")


def profile_faults(profile: ClusterProfile, *, runs: Path = Path("/runs")) -> list[Fault]:
    """What is wrong with the scripts of a profile; also when no pair and no single device can be had at all."""
    every = list(pairs(profile, runs=runs))
    found = [Fault(f"{r.hardware}: {fault.what}", fault.hint) for r in every for fault in r.faults]
    if not any(r.text for r in every) and not found:
        reasons = dict.fromkeys(r.refusal for r in every)
        found.append(Fault(f"no run is possible here: {'; '.join(reasons)}"))
    return list(dict.fromkeys(found))
