"""``experiment.toml`` -> ExperimentSpec: typed, range-checked, all errors reported together with their places.

``name``, ``description`` and ``notes`` stand at the top. Then the grammar, in the order in which it makes cells:

1. ``[defaults]``: one value for any training key.
2. ``[matrix]``, or several ``[[matrix]]``: axes whose product is taken; a single value is an axis of one.
   ``[[zip]]`` is one axis of several keys whose lists move together; it joins every matrix. A matrix may carry
   such axes of its own: ``zip = [{ strategy = [...], hardware = [...] }]``.
3. ``[[when]]``, in file order: ``set`` replaces values in every cell that ``if`` matches.
4. ``[[exclude]]``: cells of the product that ``match`` matches are excluded, with a ``why``.
5. ``[[include]]``: single cells on top of the defaults. ``[[when]]`` applies to what an include leaves open,
   ``[[exclude]]`` does not apply to it.
6. ``[[published]]``: figures that others published for the cells that ``match`` matches.

``--set key=value`` replaces a key wherever the file has it; ``--set hardware=cpu`` its kind alone.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator import toml_file
from orchestrator.config.keys import KEYS, StrategyChoice, StrategyMatch, Value, as_list
from orchestrator.config.overrides import apply as apply_overrides
from orchestrator.config.tables import (
    FIGURES,
    FileTable,
    PublishedTable,
    ZipTable,
    structure_mistakes,
    unknown_key_hint,
)
from orchestrator.errors import ExperimentError, InputError, Mistake
from orchestrator.plugins import Plugins
from orchestrator.toml_file import TomlError, TomlTable
from orchestrator.workspace import DEFAULT_EXPERIMENT

Row = Mapping[str, Value]
"""Values of some training keys."""

Axis = tuple[Row, ...]
"""One factor of a product: rows that all have the same keys."""

Product = tuple[Axis, ...]
"""One ``[[matrix]]``: its own axes in file order, then its own zips; the zips of the file before or after them, as the
file has it. The last axis varies fastest."""

Condition = Mapping[str, frozenset[Value | StrategyMatch]]
"""Key -> the values that match; all keys must."""


@dataclass(frozen=True, slots=True)
class When:
    """``values`` replace those of a cell where all conditions match."""

    conditions: Condition
    values: Row


@dataclass(frozen=True, slots=True)
class Exclude:
    """Cells that the user excludes, and why."""

    match: Condition
    why: str


@dataclass(frozen=True, slots=True)
class Published:
    """What others published for a cell."""

    figures: Mapping[str, float]
    """Fields of ``RunResult`` -> figures."""
    on: str
    """The hardware they were measured on, in words."""
    notes: str = ""


@dataclass(frozen=True, slots=True)
class PublishedRule:
    """The cells that published figures belong to."""

    match: Condition
    published: Published


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSpec:
    """One experiment file, checked."""

    name: str
    path: Path | None
    """The file; None for text from elsewhere."""
    where: str
    """Name of the file in messages."""
    digest: str
    """Of the file's bytes and the ``--set`` texts."""
    description: str = ""
    notes: tuple[str, ...] = ()
    defaults: Row
    products: tuple[Product, ...]
    whens: tuple[When, ...]
    excludes: tuple[Exclude, ...]
    includes: tuple[Row, ...]
    published: tuple[PublishedRule, ...]
    overrides: tuple[str, ...] = ()
    """What ``--set`` replaced, in words."""


def matches(values: Mapping[str, Value], condition: Condition) -> bool:
    """Whether the condition matches a cell with these values."""
    return all(_matches_one(values.get(key), wanted) for key, wanted in condition.items())


def _matches_one(value: Value, wanted: Set[Value | StrategyMatch]) -> bool:
    if isinstance(value, StrategyChoice):
        return any(isinstance(one, StrategyMatch) and one.matches(value) for one in wanted)
    return value in wanted


def load(path: Path, sets: Sequence[str] = (), *, plugins: Plugins | None = None) -> ExperimentSpec:
    """Read an experiment file.

    Args:
        path: the file.
        sets: ``key=value`` texts that replace a key wherever the file has it.
        plugins: the declarations that the file may name; by default what is installed.

    Raises:
        InputError: the file does not exist or cannot be read.
        ExperimentError: the file has errors.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        other = "" if path.name == DEFAULT_EXPERIMENT.name else f" -e {shlex.quote(str(path))}, or another name with -e"
        hint = f"orchestrate init --study demo{other}"
        raise InputError("there is no experiment file", where=str(path), hint=hint) from error
    except OSError as error:
        raise InputError(f"cannot read the experiment file: {error.strerror}", where=str(path)) from error
    return parse(content, str(path), sets, path=path, plugins=plugins)


def parse(
    content: str | bytes,
    where: str,
    sets: Sequence[str] = (),
    *,
    path: Path | None = None,
    plugins: Plugins | None = None,
) -> ExperimentSpec:
    """Like :func:`load`, for the content of a file; ``where`` names it in messages."""
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    try:
        document = toml_file.parse(content)
    except TomlError as error:
        raise ExperimentError([Mistake(f"{where}: {error.where}", error.what, error.hint)]) from error
    context = {"plugins": plugins or Plugins.installed()}
    overrides = apply_overrides(document, sets, context)
    raw = document | {"matrix": as_list(document.get("matrix", []))}
    mistakes = [*overrides.mistakes]
    try:
        file = FileTable.model_validate(raw, context=context)
    except ValidationError as error:
        mistakes += toml_file.mistakes(error, document, where, unknown_key_hint)
    mistakes += structure_mistakes(document, where)
    if mistakes:
        raise ExperimentError(mistakes)
    return ExperimentSpec(
        name=file.name,
        path=path,
        where=where,
        digest=hashlib.sha256(b"\0".join([content, *(s.encode("utf-8", "surrogateescape") for s in sets)])).hexdigest(),
        description=file.description,
        notes=tuple(file.notes),
        defaults=_row(file.defaults),
        products=_products(file, raw, overrides.keys),
        whens=tuple(When(_conditions(when.conditions), _row(when.values)) for when in file.when),
        excludes=tuple(Exclude(_conditions(exclude.match), exclude.why) for exclude in file.exclude),
        includes=tuple(_row(include) for include in file.include),
        published=tuple(_published_rule(table) for table in file.published),
        overrides=tuple(overrides.notes),
    )


def _row(table: TomlTable) -> Row:
    return {key: getattr(table, key) for key in KEYS if key in table.model_fields_set}


def _conditions(table: TomlTable) -> Condition:
    return {key: frozenset(getattr(table, key)) for key in KEYS if key in table.model_fields_set}


def _published_rule(table: PublishedTable) -> PublishedRule:
    figures = {name: getattr(table, name) for name in FIGURES if name in table.model_fields_set}
    return PublishedRule(_conditions(table.match), Published(figures, table.on, table.notes))


def _products(file: FileTable, raw: Mapping[str, Any], overridden: Set[str]) -> tuple[Product, ...]:
    def zips(tables: Sequence[ZipTable], given: Sequence[Mapping[str, Any]]) -> list[Axis]:
        return [
            _axis(table, [key for key in keys if key in KEYS], overridden)
            for table, keys in zip(tables, given, strict=True)
        ]

    shared = zips(file.zip, raw.get("zip", []))
    shared_first = next((key for key in raw if key in {"matrix", "zip"}), "") == "zip"
    products = []
    for table, given in zip(file.matrix, raw["matrix"], strict=True):
        axes = [_axis(table, [key], overridden) for key in given if key in KEYS]
        own = (*axes, *zips(table.zip, given.get("zip", [])))
        products.append((*shared, *own) if shared_first else (*own, *shared))
    return tuple(products) if products or not shared else (tuple(shared),)


def _axis(table: TomlTable, keys: Sequence[str], overridden: Set[str]) -> Axis:
    rows = list(zip(*(getattr(table, key) for key in keys), strict=True))
    if not overridden.isdisjoint(keys):
        rows = list(dict.fromkeys(rows))
    return tuple(dict(zip(keys, row, strict=True)) for row in rows)
