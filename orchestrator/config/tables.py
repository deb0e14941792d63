"""The tables of ``experiment.toml`` as pydantic models; ``orchestrator.config.experiment`` says what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from orchestrator.config.keys import KEYS, REQUIRED, Axes, Match, Text, Values, as_list
from orchestrator.errors import Mistake
from orchestrator.plugins import nearest
from orchestrator.toml_file import KeyPath, TomlTable, invalid
from workloads.contract import result_fields


def _figure(name: str) -> Any:
    def check(value: float) -> float:
        if name == "test_accuracy" and value > 1:
            raise invalid(f"{value:g} is not an accuracy from 0 to 1", f"write {value / 100:g}")
        return value

    return Annotated[float, Field(allow_inf_nan=False, ge=0), AfterValidator(check)]


FIGURES: tuple[str, ...] = tuple(
    name
    for name, type_ in result_fields().items()
    if type_ in {"float | None", "int | None"} and name != "resumed_from_epoch"
)
"""What ``[[published]]`` may state: the numbers of a result."""

if TYPE_CHECKING:
    _Figures = TomlTable
else:
    _Figures = create_model("_Figures", __base__=TomlTable, **{name: (_figure(name), None) for name in FIGURES})


class ZipTable(Axes):
    name: Text | None = None


class MatrixTable(Axes):
    zip: list[ZipTable] = Field(default_factory=list)


class WhenTable(TomlTable):
    conditions: Match = Field(alias="if")
    values: Values = Field(alias="set")


class ExcludeTable(TomlTable):
    match: Match
    why: Text


class PublishedTable(_Figures):
    match: Match
    on: Text
    notes: str = ""


class FileTable(TomlTable):
    name: Text = "experiment"
    description: str = ""
    notes: Annotated[list[str], BeforeValidator(as_list)] = Field(default_factory=list)
    defaults: Values = Field(default_factory=Values)
    matrix: list[MatrixTable] = Field(default_factory=list)
    zip: list[ZipTable] = Field(default_factory=list)
    when: list[WhenTable] = Field(default_factory=list)
    exclude: list[ExcludeTable] = Field(default_factory=list)
    include: list[Values] = Field(default_factory=list)
    published: list[PublishedTable] = Field(default_factory=list)


_FILE_KEYS = tuple(FileTable.model_fields)
_TABLE_KEYS: dict[str, tuple[str, ...]] = {
    "matrix": (*KEYS, "zip"),
    "zip": (*KEYS, "name"),
    "when": ("if", "set"),
    "exclude": ("match", "why"),
    "published": ("match", "on", "notes", *FIGURES),
}
"""Keys by the name of the table they stand in; any other table holds training keys."""


_OTHER_NAMES = {
    "account": "cluster.toml",
    "batch": "batch_size",
    "gpus": "hardware",
    "learning_rate": "lr",
    "memory": "mem",
    "nodes": "hardware",
    "partition": "cluster.toml",
    "qos": "cluster.toml",
    "seeds": "seed",
    "time": "time_limit",
}
"""Names that other tools use -> where the setting is here."""


def unknown_key_hint(place: KeyPath) -> str:
    """Suggest what the writer of an unknown key meant."""
    *above, last = place
    key = str(last)
    table = next((step for step in reversed(above) if isinstance(step, str)), None)
    if key == "strategy_options":
        return 'write options with the strategy: strategy = { name = "ddp", OPTION = VALUE }'
    if table is None:
        return "write training keys in [defaults] or [matrix]" if key in KEYS else nearest(key, _FILE_KEYS)
    if key in _FILE_KEYS:
        return f"write {key} at the top of the file, above the first [table]"
    if key in _OTHER_NAMES:
        return f"use {_OTHER_NAMES[key]}"
    known = _TABLE_KEYS.get(table, KEYS)
    return nearest(key, known) or f"there are: {', '.join(known)}"


def tables_of(document: Mapping[str, Any], name: str, part: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Tables of an array of tables, or one ``part`` of each, with their places; validation reports other values."""
    given = document.get(name)
    for i, table in enumerate(given if isinstance(given, list) else ()):
        inner = table.get(part) if part and isinstance(table, dict) else table
        if isinstance(inner, dict):
            yield f"{name}[{i}]{part and '.'}{part}", inner


def axis_tables(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table whose training keys hold lists, with its place in the file."""
    for place, matrix in _matrices(document):
        yield from _axes_of(place, matrix)
    yield from tables_of(document, "zip")


def _matrices(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    given = document.get("matrix")
    return iter([("matrix", given)]) if isinstance(given, dict) else tables_of(document, "matrix")


def _axes_of(place: str, matrix: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A matrix and its own zips."""
    return [(place, matrix), *((f"{place}.{zipped}", table) for zipped, table in tables_of(matrix, "zip"))]


def value_tables(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table of single values, with its place in the file; the defaults last."""
    yield from tables_of(document, "when", "set")
    yield from tables_of(document, "include")
    if isinstance(document.get("defaults"), dict):
        yield "defaults", document["defaults"]


def condition_tables(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table of conditions, with its place in the file."""
    for name, part in (("when", "if"), ("exclude", "match"), ("published", "match")):
        yield from tables_of(document, name, part)


def structure_mistakes(document: Mapping[str, Any], where: str) -> list[Mistake]:
    """Errors between the keys of a parsed file rather than in one value; it need not be validated yet."""
    found = [*_product_mistakes(document), *_zip_mistakes(document), *_table_mistakes(document)]
    return [Mistake(f"{where}: {place}" if place else where, what, hint) for place, what, hint in dict.fromkeys(found)]


def _product_mistakes(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    defaults = document.get("defaults")
    given = set(defaults) if isinstance(defaults, dict) else set()
    shared = list(tables_of(document, "zip"))
    products = [(place, [*_axes_of(place, matrix), *shared]) for place, matrix in _matrices(document)]
    if shared and not document.get("matrix"):
        products = [("zip[0]", shared)]
    for place, axes in products:
        places: dict[str, str] = {}
        for axis_place, table in axes:
            for key in KEYS:
                if key in table and key in places:
                    yield f"{axis_place}.{key}", f"{key} is an axis of {places[key]} too", "remove one of the two"
                elif key in table:
                    places[key] = axis_place
        if not any(table for _, table in axes):
            yield place, "an empty matrix: it has no axis", "add an axis such as seed = [0, 1]"
        else:
            yield from _missing(given | set(places), place)
    for place, table in tables_of(document, "include"):
        yield from _missing(given | set(table), place)
    if not products and not document.get("include") and not document.get("matrix"):
        yield (
            "",
            "nothing to run: no [matrix], no [[zip]] and no [[include]]",
            "add [matrix] with an axis such as seed = [0, 1]",
        )


def _missing(given: set[str], place: str) -> Iterator[tuple[str, str, str]]:
    for key in REQUIRED:
        if key not in given:
            yield place, f"no {key} for these cells", f"add {key} here or under [defaults]"


def _zip_mistakes(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for place, table in axis_tables(document):
        lengths = {key: len(as_list(table[key])) for key in KEYS if key in table}
        if "zip[" in place and not lengths:
            yield place, "no list here", 'write lists of equal length, such as hardware = ["cpu:1"]'
        elif "zip[" in place and len(set(lengths.values())) > 1:
            lengths_text = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            yield place, f"lists of unequal length: {lengths_text}", "put a value that stays the same into [defaults]"


def _table_mistakes(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for place, table in [*condition_tables(document), *tables_of(document, "when", "set")]:
        if not table:
            yield place, "an empty table", "name at least one key"
    for place, table in tables_of(document, "published"):
        if not set(table) & set(FIGURES):
            yield place, "no figure here", "add one or more, such as test_accuracy = 0.991"
