"""Check the tables of docs/experiment.md against the code: keys with types, ranges and defaults, options, columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from db.models import results
from db.queries import SUMMARY_COLUMNS
from orchestrator.cluster import resources
from orchestrator.config import experiment, keys
from orchestrator.planning import matrix
from orchestrator.units import parse_time_limit
from workloads import registry
from workloads.contract import EXECUTION_KEYS, Execution, TrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "experiment.md").read_text(encoding="utf-8")

RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "whole number from 0": ([0, 7], [-1, 0.5, "1"]),
    "whole number from 1": ([1, 7], [0, 1.5, "1"]),
    "number above 0": ([1e-9, 7.5], [0.0, -1.0]),
    "number from 0": ([0.0, 7.5], [-1e-9]),
    "number from 0 to 1": ([0.0, 1.0], [-1e-9, 1.000001]),
    "number from 0, below 1": ([0.0, 0.999999], [-1e-9, 1.0]),
    "number above 0, to 1": ([1e-9, 1.0], [0.0, 1.000001]),
    "true or false": ([True, False], [1, "true"]),
}
"""Type in the page -> values that must be accepted, values that must be rejected."""


def _table(heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the first table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = section[section.index("\n| ") + 1 :].splitlines()
    for line in lines[2:]:
        if not line.startswith("| "):
            return
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def _bare(cell: str) -> str:
    return cell.strip().removeprefix("`").removesuffix("`")


TRAINING, EXECUTION = list(_table("Training keys")), list(_table("Execution settings"))
OPTIONS = {(_bare(row[0]), _bare(row[1])): row[2:] for row in _table("Options of strategies")}
DECLARED = {(name, o.name): o for name, s in registry.strategies().items() for o in s.options}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _accepts(key: str, value: Any) -> bool:
    try:
        keys.Values.model_validate({key: value})
    except ValidationError:
        return False
    return True


def _valid_words(key: str) -> list[str]:
    """Return the valid words of a key, as its error message lists them."""
    with pytest.raises(ValidationError) as error:
        keys.Values.model_validate({key: "no such word"})
    listed = re.search(r"is not one of ([\w, ]+\w)", str(error.value.errors()))
    assert listed, f"{key} accepts any text"
    return listed[1].split(", ")


def test_every_training_key_has_its_row() -> None:
    """Rows are in the order of the code. Options of strategies have their own table and column."""
    shown = [_bare(row[0]) for row in TRAINING]
    assert shown == [f.name for f in fields(TrainConfig) if f.name != "strategy_options"]
    assert "strategy_options" in {_bare(row[0]) for row in _table("Columns of results")}


def test_every_execution_setting_has_its_row() -> None:
    shown = [_bare(row[0]) for row in EXECUTION]
    assert len(shown) == len(set(shown))
    assert set(shown) == set(EXECUTION_KEYS)


@pytest.mark.parametrize("row", TRAINING, ids=lambda row: _bare(row[0]))
def test_defaults_of_training_keys(row: list[str]) -> None:
    key, shown = _bare(row[0]), row[2]
    default = next(f.default for f in fields(TrainConfig) if f.name == key)
    if default is MISSING:
        assert shown == ("by hardware" if key == "cpus" else "required")
        assert (key in keys.REQUIRED) == (shown == "required")
    else:
        assert shown == ("none" if default is None else f"`{_toml(default)}`")


@pytest.mark.parametrize("row", EXECUTION, ids=lambda row: _bare(row[0]))
def test_defaults_of_execution_settings(row: list[str]) -> None:
    key, shown, default = _bare(row[0]), row[2], Execution()
    if key == "time_limit":
        assert parse_time_limit(_bare(shown).strip('"')) == default.time_limit_s
    elif key == "mem":
        assert shown == "none"
        assert default.mem_bytes is None
    else:
        assert shown == f"`{getattr(default, key)}`"


@pytest.mark.parametrize("row", TRAINING + EXECUTION, ids=lambda row: _bare(row[0]))
def test_types_and_ranges_of_keys(row: list[str]) -> None:
    """Values in the documented range are accepted, values just outside are rejected."""
    key, type_ = _bare(row[0]), row[1]
    words = re.findall(r'`"([^"]+)"`', type_)
    if type_ in RANGES:
        accepted, rejected = RANGES[type_]
        assert [v for v in accepted if not _accepts(key, v)] == []
        assert [v for v in rejected if _accepts(key, v)] == []
    elif type_.startswith("a text such as "):
        assert words
        assert [w for w in words if not _accepts(key, w)] == []
    elif key in {"model", "dataset", "strategy", "hardware"}:
        assert not _accepts(key, "no such word")
    else:
        assert words == _valid_words(key)


def test_every_option_has_its_row() -> None:
    """The page also lists exactly the strategies without options."""
    assert set(OPTIONS) == set(DECLARED)
    without = re.search(r"^Without options: (.*)\.$", PAGE, re.MULTILINE)
    assert without
    assert [_bare(n) for n in without[1].split(", ")] == [n for n, s in registry.strategies().items() if not s.options]


@pytest.mark.parametrize("place", DECLARED, ids="-".join)
def test_options_are_as_declared(place: tuple[str, str]) -> None:
    option, (type_, default, meaning) = DECLARED[place], OPTIONS[place]
    if option.choices:
        wanted = ", ".join(f'`"{choice}"`' for choice in option.choices)
    elif option.type is bool:
        wanted = "true or false"
    elif option.type in {int, float}:
        wanted = f"{'whole ' if option.type is int else ''}number from {option.minimum:g}"
    else:
        wanted = f"list of whole numbers from {option.minimum:g}"
    assert type_ == wanted
    assert default == f"`{_toml(option.default)}`"
    assert meaning == option.summary.removesuffix(".")


def test_every_column_of_results_has_its_row() -> None:
    """Training keys have their own table."""
    shown = [_bare(row[0]) for row in _table("Columns of results")]
    training = {_bare(row[0]) for row in TRAINING}
    assert training <= set(SUMMARY_COLUMNS)
    assert len(shown) == len(set(shown))
    assert set(shown) == (set(SUMMARY_COLUMNS) | {c.name for c in results.c}) - training
    assert all(meaning for _, meaning in _table("Columns of results"))


def test_the_example_expands_as_described() -> None:
    text = re.search(r"```toml\n(.*?)```\n\nmakes (\d+) cells: .* less (\d+) excluded", PAGE, re.DOTALL)
    assert text
    expanded = matrix.expand(experiment.parse(text[1], "docs/experiment.md"), default_cpus=resources.default_cpus(None))
    assert len(expanded.cells) == int(text[2])
    assert len(expanded.excluded) == int(text[3])
    assert expanded.notes == []
