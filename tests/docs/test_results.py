"""Figures of docs/results are those of the runs beside them."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NOT_IDENTITY = {"repeat", "run_id", "label"}
"""What runs that are repeats of each other differ in."""


def _rows(folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / folder / "results.json").read_text())
    return rows


def _groups(folder: str) -> set[tuple[int, int, int]]:
    """Median, least and most samples a second of runs that differ in their repeat alone."""
    groups = defaultdict(list)
    for row in _rows(folder):
        settings = list(row)[: list(row).index("first_submitted_at")]
        key = tuple(str(row[name]) for name in settings if name not in NOT_IDENTITY)
        groups[key].append(row["samples_per_s"])
    return {(round(statistics.median(g)), round(min(g)), round(max(g))) for g in groups.values()}


@pytest.mark.parametrize("folder", ["h100-strategies", "h200"])
def test_rates_are_medians_of_the_runs(folder: str) -> None:
    """Every rate of the tables, as ``4246 (4244–4247)`` or, of a single run, ``49100``."""
    measured = _groups(folder)
    text = (RESULTS / folder / "README.md").read_text()
    cells = [cell.strip() for line in text.splitlines() if line.startswith("| ") for cell in line.split("|")]
    found = 0
    for cell in cells:
        several = re.fullmatch(r"(\d{4,6}) \((\d+)–(\d+)\)", cell)
        single = re.fullmatch(r"\d{5,6}", cell)
        if several:
            assert tuple(map(int, several.groups())) in measured, cell
        elif single:
            assert (int(cell),) * 3 in measured, cell
        found += bool(several or single)
    assert found >= 6


def test_rates_of_the_pair_are_those_of_their_runs() -> None:
    """Each row names its run: the batch over the median step."""
    rates = {row["run_id"]: row["batch_size"] / row["step_time_s"] for row in _rows("h100-pair")}
    text = (RESULTS / "h100-pair" / "README.md").read_text()
    rows = re.findall(r"\| ([\d,]+) \|[^|]*\|[^|]*\|[^|]*\| `(\w{16})` \|", text)
    assert {run_id for _, run_id in rows} == set(rates)
    for shown, run_id in rows:
        assert int(shown.replace(",", "")) == round(rates[run_id]), run_id


def test_the_harness_s_ratios_are_those_that_were_measured() -> None:
    """Ratios and intervals of the table, and of the sentence about the case that was measured again."""
    measured = {
        tuple(f"{value:.4f}" for value in (row["ratio"], *row["ratio_95"]))
        for rows in json.loads((RESULTS / "h100-pair" / "harness.json").read_text()).values()
        for row in rows
    }
    text = (RESULTS / "h100-pair" / "README.md").read_text()
    shown = re.findall(r"\| (\d\.\d{4}) \| (\d\.\d{4}) to (\d\.\d{4}) \|", text)
    shown += re.findall(r"ratio (\d\.\d{4}) \((\d\.\d{4}) to (\d\.\d{4})\)", text)
    assert len(shown) == 13
    assert set(shown) <= measured
