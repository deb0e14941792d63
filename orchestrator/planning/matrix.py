"""ExperimentSpec -> cells: products, conditions, exclusions and duplicates, in a stable order.

Cells come matrix by matrix, then the includes. Axes are taken in file order with the last one fastest: a matrix's own
keys, then its own zips, and the zips of the file before or after them, wherever they stand. Another order of axes
changes the order of cells and nothing else.

Ignored keys (``orchestrator.rules.training_rules.IGNORED_KEYS``) get their defaults before a cell is hashed, so that
they do not affect a run's identity.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config.experiment import Condition, ExperimentSpec, Published, Row, matches
from orchestrator.config.keys import DEFAULTS, KEYS, REQUIRED, Value
from orchestrator.errors import ExperimentError, Mistake
from orchestrator.plugins import Plugins
from orchestrator.rules.rule import Candidate, Exclusion, Memo, Rule, first_exclusion
from orchestrator.rules.training_rules import IGNORED_KEYS, TRAINING_RULES, training_exclusion
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
    """``exclude[0]`` of the file, or the name of a rule such as ``strategy eager``."""
    why: str


@dataclass(slots=True)
class Matrix:
    """All cells of an experiment."""

    cells: list[Cell] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    merged_labels: Counter[str] = field(default_factory=Counter)
    """Label of the cell that stayed -> number of its duplicates."""
    notes: list[str] = field(default_factory=list)
    """For people: ignored keys, conditions that match no cell, what ``--set`` replaced."""

    @property
    def merged(self) -> int:
        """Cells that were duplicates of an earlier one."""
        return sum(self.merged_labels.values())


DefaultCpus = Callable[[Hardware, int], int]
"""(hardware, ranks) -> cores of a run whose ``cpus`` nobody set."""

_ALWAYS_SHOWN = frozenset({*REQUIRED, "cpus", "seed", "repeat"})


def expand(
    spec: ExperimentSpec,
    *,
    default_cpus: DefaultCpus,
    data_root: Path | None = None,
    plugins: Plugins | None = None,
) -> Matrix:
    """All cells of an experiment, excluded ones apart; ExperimentError if there are more than :data:`MAX_CELLS`.

    Args:
        spec: the checked experiment file.
        default_cpus: of the target.
        data_root: where data sets lie, for the shape of those that are folders; without it, or where a shape is not
            known, the rules that need one exclude nothing.
        plugins: the declarations that the file was checked with; by default what is installed.
    """
    _check_number(spec)
    decisions = _Decisions(spec, default_cpus, plugins or Plugins.installed(), data_root)
    matrix = Matrix()
    index: dict[str, int] = {}
    duplicates: Counter[int] = Counter()
    other_execution: list[int] = []
    for values, own in _combinations(spec):
        decision = decisions.of(values, own)
        values.update(decision.changes)
        if decision.exclusion:
            fields = _fields(values, decision.options)
            matrix.excluded.append(Excluded(fields, decision.exclusion.rule, decision.exclusion.why))
            continue
        for key in EXECUTION_KEYS:
            del values[key]
        train = TrainConfig(**values, strategy_options=decision.options)
        label = f"{decision.label}-s{train.seed}"
        cell = Cell(train, decision.execution, train.run_id(), label, decision.published)
        first = index.setdefault(cell.run_id, len(matrix.cells))
        if first == len(matrix.cells):
            matrix.cells.append(cell)
            continue
        duplicates[first] += 1
        if cell.execution != matrix.cells[first].execution:
            other_execution.append(first)
        # The first cell stays, with the published figures of both.
        kept = matrix.cells[first].published
        published = (*kept, *(figures for figures in cell.published if figures not in kept))
        matrix.cells[first] = dataclasses.replace(matrix.cells[first], published=published)
    labels = _labels(matrix.cells, _varied(spec))
    matrix.cells = [dataclasses.replace(cell, label=label) for cell, label in zip(matrix.cells, labels, strict=True)]
    for i, number in duplicates.items():
        matrix.merged_labels[labels[i]] += number
    differ = [
        f"{labels[i]} is requested twice with different execution settings: the first are used" for i in other_execution
    ]
    matrix.notes = [*spec.overrides, *decisions.notes(), *differ]
    return matrix


def _check_number(spec: ExperimentSpec) -> None:
    sizes = [[len(axis) for axis in product if len(axis) > 1] for product in spec.products]
    cells = sum(math.prod(lengths) for lengths in sizes)
    if cells > MAX_CELLS:
        factors = " + ".join(" x ".join(map(str, lengths)) for lengths in sizes)
        what = f"{cells:,} cells ({factors}), and a plan may have {MAX_CELLS:,}"
        hint = "put lists that belong together into a [[zip]], or split the study into several files"
        raise ExperimentError([Mistake(f"{spec.where}: matrix", what, hint)])


def _combinations(spec: ExperimentSpec) -> Iterator[tuple[dict[str, Any], Row | None]]:
    """The values of every cell before conditions, and those of them that an include sets itself."""
    base = DEFAULTS | dict(spec.defaults)
    for product in spec.products:
        for rows in itertools.product(*product):
            values = base.copy()
            for row in rows:
                values.update(row)
            yield values, None
    for include in spec.includes:
        yield base | dict(include), include


def _fields(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        key: value
        for key, value in values.items()
        if key not in EXECUTION_KEYS and (key in _ALWAYS_SHOWN or value != DEFAULTS[key])
    }
    fields["hardware"] = str(fields["hardware"])
    return fields | ({"strategy_options": dict(options)} if options else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What holds for all cells that agree in the keys which conditions and rules read."""

    changes: dict[str, Value]
    """By conditional blocks, the default of ``cpus``, and ignored keys; the strategy by its name."""
    options: dict[str, Any]
    execution: Execution
    published: tuple[Published, ...]
    label: str
    """Model, strategy and hardware."""
    exclusion: Exclusion | None


class _Decisions:
    """Conditions, exclusions, published figures and rules, worked out once for each combination of what they read."""

    def __init__(self, spec: ExperimentSpec, default_cpus: DefaultCpus, plugins: Plugins, root: Path | None) -> None:
        self._spec, self._default_cpus, self._plugins, self._data_root = spec, default_cpus, plugins, root
        self._excludes = [
            Rule(f"exclude[{i}]", tuple(exclude.match), partial(_user_reason, exclude.match, exclude.why))
            for i, exclude in enumerate(spec.excludes)
        ]
        self._matched: set[str] = set()
        self._ignored: dict[str, None] = {}
        rules = [*self._excludes, *TRAINING_RULES]
        self._memo = Memo(partial(self._decide, own=None), {*EXECUTION_KEYS, *(key for r in rules for key in r.reads)})

    def of(self, values: Mapping[str, Value], own: Row | None) -> _Decision:
        """The decision on one cell. Conditions leave an include's ``own`` values alone, and it is never excluded by
        the file."""
        return self._memo(values) if own is None else self._decide(values, own)

    def notes(self) -> list[str]:
        """What people should know: conditions that match no cell, ignored keys."""
        spec = self._spec
        conditions = {"when": spec.whens, "exclude": spec.excludes, "published": spec.published}
        every = [f"{kind}[{i}]" for kind, blocks in conditions.items() for i in range(len(blocks))]
        return [*(f"{name} matches no cell" for name in every if name not in self._matched), *self._ignored]

    def _decide(self, values: Mapping[str, Any], own: Row | None) -> _Decision:
        changes: dict[str, Any] = {}
        current = ChainMap(changes, values)  # type: ignore[arg-type]  # its first map alone is written to
        for i, when in enumerate(self._spec.whens):
            if self._matches(f"when[{i}]", current, when.conditions):
                changes |= {key: value for key, value in when.values.items() if key not in (own or ())}
        cell = Candidate.of(current, self._plugins, self._data_root)
        choice = current["strategy"]
        if current["cpus"] is None:
            changes["cpus"] = self._default_cpus(cell.hardware, cell.strategy.num_ranks(cell.hardware, cell.options))
        exclusion = first_exclusion(self._excludes, cell, {}) if own is None else None
        if exclusion:
            self._matched.add(exclusion.rule)
        published = tuple(
            rule.published
            for i, rule in enumerate(self._spec.published)
            if self._matches(f"published[{i}]", current, rule.match)
        )
        changes |= self._ignored_keys(cell)
        return _Decision(
            exclusion=exclusion or training_exclusion(cell),
            execution=Execution(**{name: current[key] for key, name in EXECUTION_KEYS.items()}),
            label=f"{current['model']}-{choice}-{_short(cell.hardware)}",
            published=published,
            options=dict(choice.options),
            changes=changes | {"strategy": choice.name},
        )

    def _matches(self, name: str, values: Mapping[str, Value], condition: Condition) -> bool:
        if found := matches(values, condition):
            self._matched.add(name)
        return found

    def _ignored_keys(self, cell: Candidate) -> dict[str, Value]:
        """The defaults of keys that are set and change nothing in a cell."""
        changes = {}
        for ignored in IGNORED_KEYS:
            for key in ignored.keys:
                if cell.values[key] != DEFAULTS[key] and ignored.applies(cell):
                    changes[key] = DEFAULTS[key]
                    where = ignored.where.format_map(cell.values)
                    self._ignored[f"{key} is ignored {where}: it does not affect a run's identity there"] = None
        return changes


def _user_reason(match: Condition, why: str, cell: Candidate) -> str:
    return why if matches(cell.values, match) else ""


def _short(hardware: Hardware) -> str:
    """``cpu2``, ``a100x2``, ``a100x4x2``."""
    kind, _, devices = str(hardware).rpartition(":")
    return f"{kind}x{devices}" if kind[-1].isdigit() else kind + devices


def _varied(spec: ExperimentSpec) -> list[str]:
    """The keys that may differ between cells, but for those that every label begins with."""
    base = DEFAULTS | dict(spec.defaults)
    rows: list[Row] = [*(base | dict(include) for include in spec.includes), *(when.values for when in spec.whens)]
    for product in spec.products:
        axes = [row for axis in product for row in axis]
        own = {key for row in axes for key in row}
        rows += [*axes, {key: value for key, value in base.items() if key not in own}]
    found = {key: {row[key] for row in rows if key in row} for key in KEYS}
    in_every_label = {"model", "strategy", "hardware", "seed", *EXECUTION_KEYS}
    varied = [key for key in KEYS if len(found[key]) > 1 and key not in in_every_label]
    return sorted(varied, key=lambda key: key == "cpus")  # cpus last: they mostly follow from a key that says more


def _labels(cells: Sequence[Cell], keys: Sequence[str]) -> list[str]:
    """``cnn-ddp-cpu2-s0-lr=0.1``: where labels begin alike, each key that tells more of them apart."""
    labels = [cell.label for cell in cells]
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for i, label in enumerate(labels):
        alike[label].append(i)
    for members in alike.values():
        found = 1
        for key in keys:
            if found == len(members):
                break
            longer = {i: labels[i] + _label_part(key, cells[i].train) for i in members}
            if (distinct := len(set(longer.values()))) > found:
                found = distinct
                for i in members:
                    labels[i] = longer[i]
    return labels


def _label_part(key: str, train: TrainConfig) -> str:
    value = getattr(train, key)
    if value is None or (key == "epochs" and train.steps is not None):
        return ""
    return f"-{key}={show(value) if isinstance(value, bool) else value}"
