"""ExperimentSpec -> cells: products, conditions, exclusions and duplicates, in a stable order.

Cells come matrix by matrix, then the includes. Axes are taken in file order with the last one fastest: a matrix's own
keys, then its own zips, and the zips of the file before or after them, wherever they stand. Another order of axes
changes the order of cells and nothing else. Everything that depends on few keys is worked out once for each
combination of them, so that 40,000 cells take well under a second.

Keys that mean nothing in a cell are set to their defaults before it is hashed, so that they tell no runs apart:
``momentum`` and ``nesterov`` without SGD, ``workers`` without the ``dataloader`` loader, ``epochs`` beside ``steps``,
``batch_norm`` for a model without batch norm.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from orchestrator.config.experiment import Condition, ExperimentSpec, Published, Row, meets
from orchestrator.config.keys import KEYS, REQUIRED, StrategyChoice, Value
from orchestrator.config.rules import READ, Rules
from orchestrator.errors import ExperimentError, Mistake
from orchestrator.plugins import Plugins
from orchestrator.toml_file import show
from workloads.contract import EXECUTION_KEYS, Execution, Hardware, TrainConfig

MAX_CELLS = 1_000_000
"""More are a slip (lists multiply quickly), and would fill a login node's memory before anything was shown."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run that the experiment asks for."""

    train: TrainConfig
    execution: Execution
    run_id: str
    label: str
    """For people, such as ``cnn-ddp-cpu2-s0-lr=0.1``: what tells it from others here. Of any length."""
    published: tuple[Published, ...] = ()


@dataclass(frozen=True, slots=True)
class Excluded:
    """One cell of a product that will not run."""

    fields: dict[str, Any]
    """Its training keys that are not default."""
    rule: str
    """``exclude[0]`` of the file, or a rule of ours such as ``strategy eager``."""
    why: str


@dataclass(slots=True)
class Matrix:
    """All cells of an experiment."""

    cells: list[Cell] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    merged_labels: Counter[str] = field(default_factory=Counter)
    """Label of the cell that stayed -> how many others became it."""
    notes: list[str] = field(default_factory=list)
    """What people should know: keys that mean nothing, conditions that no cell meets, what ``--set`` replaced."""

    @property
    def merged(self) -> int:
        """Cells that were the same run as an earlier one."""
        return sum(self.merged_labels.values())


DEFAULTS: dict[str, Value] = {
    f.name: None if f.default is dataclasses.MISSING else f.default
    for f in dataclasses.fields(TrainConfig)
    if f.name != "strategy_options"
} | {
    "time_limit": Execution().time_limit_s,
    "mem": Execution().mem_bytes,
    "checkpoint_every": Execution().checkpoint_every,
    "hang_timeout_s": Execution().hang_timeout_s,
    "retries": Execution().retries,
}
"""What a key holds where the file says nothing; ``None`` for ``cpus`` means that hardware and strategy decide."""

_MEANINGLESS: tuple[tuple[str, Callable[[Value], bool], tuple[str, ...], str], ...] = (
    ("optimizer", lambda optimizer: optimizer != "sgd", ("momentum", "nesterov"), "without sgd"),
    ("loader", lambda loader: loader != "dataloader", ("workers",), "without the dataloader loader"),
    ("steps", lambda steps: steps is not None, ("epochs",), "beside steps"),
)
"""Where a key holds such a value, other keys mean nothing."""

_ALWAYS_SHOWN = frozenset({*REQUIRED, "cpus", "seed", "repeat"})


def expand(
    spec: ExperimentSpec,
    *,
    default_cpus: Callable[[Hardware, int], int],
    data_root: Path | None = None,
    plugins: Plugins | None = None,
) -> Matrix:
    """All cells of an experiment, excluded ones apart.

    Args:
        spec: the checked experiment file.
        default_cpus: (hardware, ranks) -> cores of a run whose ``cpus`` nobody set.
        data_root: where data sets lie, for the shape of those that are folders; without it, or where a shape is not
            known, the rules that need one are silent.
        plugins: the declarations that the file was checked with; by default what is installed.

    Raises:
        ExperimentError: the products have more than :data:`MAX_CELLS` cells.
    """
    _insist_on_a_sane_number(spec)
    judge = _Judge(spec, default_cpus, Rules(plugins or Plugins.installed(), data_root))
    matrix = Matrix()
    index: dict[str, int] = {}
    again: Counter[int] = Counter()
    other_limits: list[int] = []
    for values, own in _combinations(spec):
        verdict = judge.verdict(values, own)
        values.update(verdict.changes)
        if verdict.rule:
            matrix.excluded.append(Excluded(_fields(values, verdict.options), verdict.rule, verdict.why))
            continue
        for key in EXECUTION_KEYS:
            del values[key]
        train = TrainConfig(**values, strategy_options=verdict.options)
        label = f"{verdict.label}-s{train.seed}"
        cell = Cell(train, verdict.execution, train.run_id(), label, verdict.published)
        known = index.setdefault(cell.run_id, len(matrix.cells))
        if known == len(matrix.cells):
            matrix.cells.append(cell)
            continue
        again[known] += 1
        if cell.execution != matrix.cells[known].execution:
            other_limits.append(known)
        matrix.cells[known] = _merged(matrix.cells[known], cell)
    labels = _labels(matrix.cells, _varied(spec))
    matrix.cells = [dataclasses.replace(cell, label=label) for cell, label in zip(matrix.cells, labels, strict=True)]
    for i, others in again.items():
        matrix.merged_labels[labels[i]] += others
    twice = [f"{labels[i]} is asked for twice with different limits: the first ones count" for i in other_limits]
    matrix.notes = [*spec.overrides, *judge.notes(), *twice]
    return matrix


def _insist_on_a_sane_number(spec: ExperimentSpec) -> None:
    sizes = [[len(axis.rows) for axis in product.axes if len(axis.rows) > 1] for product in spec.products]
    cells = sum(math.prod(lengths) for lengths in sizes)
    if cells > MAX_CELLS:
        factors = " + ".join(" x ".join(map(str, lengths)) for lengths in sizes)
        what = f"{cells:,} cells ({factors}), and {MAX_CELLS:,} are as many as a plan may have"
        hint = "lists that belong together stand in a [[zip]]; else split the study into several files"
        raise ExperimentError([Mistake(f"{spec.where}: matrix", what, hint)])


def _combinations(spec: ExperimentSpec) -> Iterator[tuple[dict[str, Any], Row | None]]:
    """The values of every cell before conditions, and an include's own values."""
    base = DEFAULTS | dict(spec.defaults)
    for product in spec.products:
        for rows in itertools.product(*(axis.rows for axis in product.axes)):
            values = base.copy()
            for row in rows:
                values.update(row)
            yield values, None
    for include in spec.includes:
        yield base | dict(include), include


def _merged(first: Cell, other: Cell) -> Cell:
    """The same run asked for again: the first one's limits stay, and published figures of both."""
    more = tuple(published for published in other.published if published not in first.published)
    return dataclasses.replace(first, published=first.published + more) if more else first


def _fields(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        key: value
        for key, value in values.items()
        if key not in EXECUTION_KEYS and (key in _ALWAYS_SHOWN or value != DEFAULTS[key])
    }
    fields["hardware"] = str(fields["hardware"])
    return fields | ({"strategy_options": dict(options)} if options else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What holds for all cells that agree in the keys which conditions and rules read."""

    changes: dict[str, Value]
    """By conditional blocks, the default of ``cpus``, and keys that mean nothing; the strategy by its name."""
    options: dict[str, Any]
    execution: Execution
    published: tuple[Published, ...]
    label: str
    """Model, strategy and hardware."""
    rule: str = ""
    """What excludes the cells; empty when they run."""
    why: str = ""


class _Judge:
    """Conditions, exclusions, published figures and rules, worked out once for each combination of what they read."""

    def __init__(self, spec: ExperimentSpec, default_cpus: Callable[[Hardware, int], int], rules: Rules) -> None:
        self._spec = spec
        self._default_cpus = default_cpus
        self._rules = rules
        matches = [condition for kind in _conditions(spec).values() for condition in kind]
        read = {*READ, *EXECUTION_KEYS, "cpus", *itertools.chain.from_iterable(matches)}
        for key, _, meaningless, _ in _MEANINGLESS:
            read |= {key, *meaningless}
        self._read = itemgetter(*sorted(read))
        self._verdicts: dict[tuple[Value, ...], _Verdict] = {}
        self._met: set[tuple[str, int]] = set()
        self._ignored: dict[str, None] = {}

    def verdict(self, values: dict[str, Value], own: Row | None) -> _Verdict:
        """The verdict on one cell; ``own`` values of an include are left alone by conditions and exclusions."""
        if own is not None:
            return self._judge(values, own)
        key = self._read(values)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._judge(values, None)
        return verdict

    def notes(self) -> list[str]:
        """What people should know of this experiment: conditions that no cell met, keys that mean nothing."""
        unmet = [
            f"{kind}[{i}] meets no cell"
            for kind, conditions in _conditions(self._spec).items()
            for i in range(len(conditions))
            if (kind, i) not in self._met
        ]
        return [*unmet, *self._ignored]

    def _judge(self, values: dict[str, Value], own: Row | None) -> _Verdict:
        changes: dict[str, Value] = {}
        for i, when in enumerate(self._spec.whens):
            if self._meets("when", i, values | changes, when.conditions):
                changes.update({key: value for key, value in when.values.items() if own is None or key not in own})
        values = values | changes
        choice, hardware = values["strategy"], values["hardware"]
        assert isinstance(choice, StrategyChoice) and isinstance(hardware, Hardware)
        if values["cpus"] is None:
            ranks = self._rules.ranks(choice, hardware)
            values["cpus"] = changes["cpus"] = self._default_cpus(hardware, ranks)
        rule, why = self._exclusion(values) if own is None else ("", "")
        published = tuple(
            rule.published
            for i, rule in enumerate(self._spec.published)
            if self._meets("published", i, values, rule.match)
        )
        changes.update(self._meaningless(values))
        breach = None if rule else self._rules.breach(values | changes)
        return _Verdict(
            changes=changes | {"strategy": choice.name},
            options=dict(choice.options),
            execution=_execution(values),
            published=published,
            label=f"{values['model']}-{choice}-{_short(hardware)}",
            rule=breach.rule if breach else rule,
            why=breach.why if breach else why,
        )

    def _meets(self, kind: str, i: int, values: Mapping[str, Value], condition: Condition) -> bool:
        met = meets(values, condition)
        if met:
            self._met.add((kind, i))
        return met

    def _exclusion(self, values: Mapping[str, Value]) -> tuple[str, str]:
        for i, exclude in enumerate(self._spec.excludes):
            if self._meets("exclude", i, values, exclude.match):
                return f"exclude[{i}]", exclude.why
        return "", ""

    def _meaningless(self, values: Mapping[str, Value]) -> dict[str, Value]:
        found = [
            (other, because) for key, holds, others, because in _MEANINGLESS if holds(values[key]) for other in others
        ]
        if self._rules.has_no_batch_norm(str(values["model"])):
            found.append(("batch_norm", f"for {values['model']}"))
        changes = {}
        for key, because in found:
            if values[key] != DEFAULTS[key]:
                changes[key] = DEFAULTS[key]
                self._ignored[f"{key} means nothing {because}: it tells no runs apart there"] = None
        return changes


def _short(hardware: Hardware) -> str:
    """``cpu2``, ``a100x2``, ``a100x4x2``."""
    kind, _, devices = str(hardware).rpartition(":")
    return f"{kind}x{devices}" if kind[-1].isdigit() else kind + devices


def _conditions(spec: ExperimentSpec) -> dict[str, list[Condition]]:
    return {
        "when": [when.conditions for when in spec.whens],
        "exclude": [exclude.match for exclude in spec.excludes],
        "published": [rule.match for rule in spec.published],
    }


def _execution(values: Mapping[str, Any]) -> Execution:
    return Execution(
        time_limit_s=values["time_limit"],
        mem_bytes=values["mem"],
        checkpoint_every=values["checkpoint_every"],
        hang_timeout_s=values["hang_timeout_s"],
        retries=values["retries"],
    )


def _varied(spec: ExperimentSpec) -> list[str]:
    """The keys that may differ between cells, but for those that every label begins with."""
    base = DEFAULTS | dict(spec.defaults)
    seen: dict[str, set[Value]] = {key: set() for key in base}
    for product in spec.products:
        rows = [row for axis in product.axes for row in axis.rows]
        axes = {key for row in rows for key in row}
        for row in [*rows, {key: value for key, value in base.items() if key not in axes}]:
            _see(seen, row)
    for include in spec.includes:
        _see(seen, base | dict(include))
    for when in spec.whens:
        _see(seen, when.values)
    elsewhere = {"model", "strategy", "hardware", "seed", *EXECUTION_KEYS}
    varied = [key for key in KEYS if len(seen[key]) > 1 and key not in elsewhere]
    return sorted(varied, key=lambda key: key == "cpus")  # they mostly follow from something that says more


def _labels(cells: Sequence[Cell], keys: Sequence[str]) -> list[str]:
    """``cnn-ddp-cpu2-s0-lr=0.1``: where labels begin alike, each key that tells more of them apart."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for i, cell in enumerate(cells):
        alike[cell.label].append(i)
    labels = [cell.label for cell in cells]
    for members in alike.values():
        found = 1
        for key in keys:
            if found == len(members):
                break
            longer = [labels[i] + _told(key, cells[i].train) for i in members]
            if len(set(longer)) > found:
                found = len(set(longer))
                for i, label in zip(members, longer, strict=True):
                    labels[i] = label
    return labels


def _told(key: str, train: TrainConfig) -> str:
    value = getattr(train, key)
    if value is None or (key == "epochs" and train.steps is not None):
        return ""
    return f"-{key}={show(value) if isinstance(value, bool) else value}"


def _see(seen: dict[str, set[Value]], row: Row) -> None:
    for key, value in row.items():
        seen[key].add(value)
