"""Check that the figures in docs/results are those of the recorded runs."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bootstrap import interval
from benchmarks.pipeline_bound import StageTime, explain
from orchestrator.config import experiment
from orchestrator.planning import matrix

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NOT_IDENTITY = {"repeat", "run_id", "label"}
"""Fields in which repeats of a run differ."""


def _rows(folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / folder / "results.json").read_text())
    return rows


def _groups(folder: str) -> set[tuple[int, int, int]]:
    """Return median, minimum and maximum samples per second of runs that differ only in their repeat."""
    groups = defaultdict(list)
    for row in _rows(folder):
        settings = list(row)[: list(row).index("first_submitted_at")]
        key = tuple(str(row[name]) for name in settings if name not in NOT_IDENTITY)
        groups[key].append(row["samples_per_s"])
    return {(round(statistics.median(g)), round(min(g)), round(max(g))) for g in groups.values()}


@pytest.mark.parametrize("folder", ["h100-strategies", "h200", "h200-ways"])
def test_rates_are_medians_of_the_runs(folder: str) -> None:
    """Check every rate of the tables, written ``4246 (4244–4247)`` or, for a single run, ``49100``."""
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


def test_rates_of_the_pair_match_their_runs() -> None:
    """Each row names its run; the rate is the batch divided by the median step."""
    rates = {row["run_id"]: row["batch_size"] / row["step_time_s"] for row in _rows("h100-pair")}
    text = (RESULTS / "h100-pair" / "README.md").read_text()
    rows = re.findall(r"\| ([\d,]+) \|[^|]*\|[^|]*\|[^|]*\| `(\w{16})` \|", text)
    assert {run_id for _, run_id in rows} == set(rates)
    for shown, run_id in rows:
        assert int(shown.replace(",", "")) == round(rates[run_id]), run_id


def test_accuracies_and_pipelines_match_their_runs() -> None:
    """Each row names its run; compare accuracy and total time, or rate, step and peak memory."""
    rows = {row["run_id"]: row for row in _rows("h200-pair")}
    lines = re.findall(r"^\|(.*)\| `(\w{16})` \|$", (RESULTS / "h200-pair" / "README.md").read_text(), re.MULTILINE)
    assert {run_id for _, run_id in lines} == set(rows)
    for line, run_id in lines:
        row, cells = rows[run_id], [cell.strip() for cell in line.split("|")]
        if row["dataset"] == "synthetic":
            assert cells[4] == f"{row['samples_per_s']:.0f}" and cells[5] == f"{row['step_time_s'] * 1e3:.1f}"
            assert cells[8] == f"{row['peak_memory_bytes'] / 2**30:.1f}"
        else:
            assert cells[3:7] == [str(row[name]) for name in ("batch_size", "epochs", "lr", "seed")], run_id
            assert cells[7] == f"{row['test_accuracy'] * 100:.2f}" and cells[9] == f"{row['total_time_s']:.1f}", run_id


def test_the_pipeline_bound_table_follows_from_the_stages() -> None:
    """Recompute the times of the table from the measured stages."""
    measured = json.loads((RESULTS / "h200-pair" / "pipeline_bound.json").read_text())
    text = (RESULTS / "h200-pair" / "README.md").read_text()
    for name, found in measured.items():
        model, batch = name.split()
        stages = [StageTime(**stage) for stage in found["cuts"][0]["stages"]]
        steps = explain(found["whole_s"], stages, 8)
        times = [f"{found['whole_s'] * 1e3:.1f}", f"{steps['bound'] * 1e3:.1f}"]
        times += [f"{steps[k] * 1e3:.1f} ({steps['bound'] / steps[k]:.1%})" for k in ("equal", "uneven", "update")]
        assert f"| {model} | {int(batch):,} | {' | '.join(times)} |".replace("%", " %") in text


def test_engine_overhead_ratios_match_the_measurements() -> None:
    """Check ratios and intervals of the tables, and of the sentence about the repeated case."""
    measured = {
        tuple(f"{value:.4f}" for value in (row["ratio"], *row["ratio_95"]))
        for rows in json.loads((RESULTS / "h100-pair" / "engine_overhead.json").read_text()).values()
        for row in rows
    }
    text = (RESULTS / "h100-pair" / "README.md").read_text()
    shown = re.findall(r"\| (\d\.\d{4}) \| (\d\.\d{4}) to (\d\.\d{4}) \|", text)
    shown += re.findall(r"ratio (\d\.\d{4}) \((\d\.\d{4})\s+to (\d\.\d{4})\)", text)
    assert len(shown) == 19
    assert set(shown) <= measured


def test_engine_overhead_ratios_over_all_hosts_include_all_pairs() -> None:
    """No measured host or case is missing, neither per host nor over all hosts."""
    text = (RESULTS / "h200-pair" / "README.md").read_text()
    hosts = json.loads((RESULTS / "h200-pair" / "engine_overhead.json").read_text()).values()
    blocks: defaultdict[str, list[float]] = defaultdict(list)
    pairs: defaultdict[str, list[int]] = defaultdict(list)
    for number, rows in enumerate(hosts, 1):
        for row in rows:
            low, high = row["ratio_95"]
            within = "yes" if row["within_1_pct"] else "no"
            assert f"| {row['case']} | {number} | {row['pairs']:,} | " in text
            assert f" | {row['ratio']:.4f} ({low:.4f} to {high:.4f}) | {within} |" in text
            blocks[row["case"]] += row["ratios"]
            pairs[row["case"]].append(row["pairs"])
    assert len(blocks) == 12
    for case, ratios in blocks.items():
        low, high = interval(ratios, statistics.median)
        within = "yes" if low >= 0.99 and high <= 1.01 else "no"
        found = f"{statistics.median(ratios):.4f} | {low:.4f} to {high:.4f} | {within}"
        assert f"| {case} | {len(pairs[case])} | {sum(pairs[case]):,} | {found} |" in text


def test_engine_overhead_ratios_of_the_strategies_page_match_the_measurements() -> None:
    """Every model has an eager and a ddp case."""
    text = (RESULTS / "h200-ways" / "README.md").read_text()
    rows = json.loads((RESULTS / "h200-ways" / "engine_overhead.json").read_text())
    for row in rows:
        low, high = row["ratio_95"]
        rates = f"{row['engine_samples_per_s']:,.0f} | {row['hand_samples_per_s']:,.0f}"
        within = "yes" if row["within_1_pct"] else "no"
        found = f"{row['ratio']:.4f} ({low:.4f} to {high:.4f}) | {within}"
        assert f"| {row['case']} | {row['pairs']:,} | {rates} | {found} |" in text
    cases = {(row["model"], row["strategy"]) for row in rows}
    assert cases == set(itertools.product(("resnet50", "swin_tiny", "resnet18", "cnn"), ("eager", "ddp")))


@pytest.mark.parametrize("model", ["resnet50", "swin_tiny"])
def test_costs_of_chunks_and_recomputation_match_the_measurements(model: str) -> None:
    """Check steps by number of chunks, and time and memory of recomputation, over all rounds and per round."""
    text = " ".join((RESULTS / "h200-ways" / "README.md").read_text().split())
    rows: dict[tuple[int, str, int], dict[str, Any]] = {}
    for row in _rows("h200-ways"):
        if (row["model"], row["strategy"]) == (model, "gpipe"):
            options = {"chunks": 4, **json.loads(row["strategy_options"])}
            rows[options["chunks"], options["checkpoint"], row["repeat"]] = row
    steps_s = [rows[chunks, "never", 5]["step_time_s"] for chunks in (1, 2, 4, 8)]
    assert f"| {model} | {' | '.join(f'{step_s * 1e3:.1f}' for step_s in steps_s)} |" in text

    rounds = [(rows[8, "always", repeat], rows[8, "never", repeat]) for repeat in (0, 1, 5)]
    longer = [always["step_time_s"] / never["step_time_s"] for always, never in rounds]
    times, memory = (
        statistics.median(always[name] for always, _ in rounds) / statistics.median(never[name] for _, never in rounds)
        for name in ("step_time_s", "peak_memory_bytes")
    )
    assert f"{times:.2f} times the time ({min(longer):.2f} to {max(longer):.2f}" in text
    assert f"{memory:.2f} of" in text


@pytest.mark.parametrize("folder", [path.parent.name for path in sorted(RESULTS.glob("*/results.json"))])
def test_every_run_follows_from_an_experiment_file_beside_it(folder: str) -> None:
    """Compare run ids, which are digests of the training configuration."""
    studies = [experiment.load(path, ()) for path in (RESULTS / folder).glob("*.toml")]
    cells = [cell for s in studies for cell in matrix.expand(s, default_cpus=lambda *_: 1, data_root=None).cells]
    assert {row["run_id"] for row in _rows(folder)} <= {cell.run_id for cell in cells}
