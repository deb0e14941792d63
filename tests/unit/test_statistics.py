"""Statistics over seeds and repetitions."""

from __future__ import annotations

from typing import Any

import pytest

from db.statistics import Spread, differing_columns, group_rows, spread


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 1.0, 2.0], Spread(2.0, 1.0, 3.0, 3)),
        ([1.0, 2.0, 3.0, 10.0], Spread(2.5, 1.0, 10.0, 4)),
        ([5.0, None], Spread(5.0, 5.0, 5.0, 1)),
        ([None], None),
        ([], None),
    ],
)
def test_spread_is_median_and_range_of_the_measured_values(values: list[float | None], expected: Spread | None) -> None:
    assert spread(values) == expected


def _row(model: str, accuracy: float | None, **changes: Any) -> dict[str, Any]:
    row = {"model": model, "test_accuracy": accuracy, "state": "succeeded", "measured_attempt": 1, "diverged": False}
    return {**row, **changes}


def test_failed_and_diverged_runs_are_counted_but_not_averaged() -> None:
    """The accuracy of a diverged run is chance, not a measurement of the strategy. A live run counts nowhere."""
    rows = [
        _row("vit", 0.5),
        _row("cnn", 0.9),
        _row("cnn", 0.7),
        _row("cnn", 0.1, diverged=True),
        _row("cnn", None, state="out_of_memory", measured_attempt=None, diverged=None),
        _row("cnn", None, state="running", measured_attempt=None, diverged=None),
    ]
    vit, cnn = group_rows(rows, ["model"], ["test_accuracy"])
    assert vit == {
        "model": "vit",
        "n": 1,
        "failed": 0,
        "diverged": 0,
        "test_accuracy": 0.5,
        "test_accuracy_min": 0.5,
        "test_accuracy_max": 0.5,
    }
    assert (cnn["n"], cnn["failed"], cnn["diverged"]) == (2, 1, 1)
    assert (cnn["test_accuracy"], cnn["test_accuracy_min"], cnn["test_accuracy_max"]) == (0.8, 0.7, 0.9)


def test_a_group_in_which_nothing_succeeded_has_a_row_without_numbers() -> None:
    (row,) = group_rows(
        [_row("cnn", None, state="failed", measured_attempt=None, diverged=None)], ["model"], ["test_accuracy"]
    )
    assert (row["n"], row["failed"], row["test_accuracy"]) == (0, 1, None)


def test_settings_that_differ_in_a_group_are_found() -> None:
    """Seeds and repetitions may differ; failed runs have no part in the numbers."""
    rows = [
        _row("cnn", 0.9, seed=0, repeat=0, epochs=2, compile="off"),
        _row("cnn", 0.8, seed=1, repeat=1, epochs=12, compile="off"),
        _row("cnn", None, seed=1, repeat=0, epochs=2, compile="graphs", measured_attempt=None, state="failed"),
        _row("vit", 0.8, seed=0, repeat=0, epochs=2, compile="graphs"),
    ]
    assert differing_columns(rows, ["model"]) == ["epochs"]
    assert differing_columns(rows, ["model", "epochs"]) == []
    assert differing_columns(rows, ["seed"]) == ["model", "compile"]


def test_origins_that_differ_in_a_group_are_found() -> None:
    """The same settings on other cards, of other code; what is not known of a run tells nothing, nor what goes with a
    setting that differs anyway."""
    rows = [
        _row("cnn", 0.9, hardware="gpu:1", device_name="NVIDIA H100", code_digest="a", packages_digest=None),
        _row("cnn", 0.8, hardware="gpu:1", device_name="NVIDIA H200", code_digest="b", packages_digest="c"),
    ]
    assert differing_columns(rows, ["model"]) == ["device_name", "code_digest"]
    assert differing_columns(rows, ["model", "device_name"]) == []
    rows[1]["hardware"] = "a100:1"
    assert differing_columns(rows, ["model"]) == ["hardware", "code_digest"]
