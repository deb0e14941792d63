"""A metric is one file: key, column, statistics and published figures follow from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from db.connect import open_store
from db.ingest import collect
from workloads.contract import RunResult, result_fields
from workloads.metrics import all_metrics

TOY = """
from workloads.metrics import Measurements, Metric

def measure(found: Measurements) -> float | None:
    return found.tally.samples / found.result.energy_j if found.result.energy_j else None

DECLARATION = Metric(name="samples_per_j", type=float, meaning="of the steady steps", measure=measure{options})
"""

WITH_TOY = """
import json, sys
import workloads.metrics
workloads.metrics.__path__.append(sys.argv[1])
from db import connect, ingest, queries, statistics
from orchestrator.config.tables import FIGURES
from workloads.contract import RunResult
from workloads.files.run_dir import RunDir
from pathlib import Path

runs, database, run_id = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
attempt = RunDir.of(runs, run_id).attempt(1)
result = attempt.read_result()
result.metrics["samples_per_j"] = 2.5
attempt.write_result(result)
with connect.open_store(database) as store:
    ingest.collect(store, runs)
    rows = queries.summaries(store)
    (group,) = statistics.group_rows(rows, ["model"], ["samples_per_j"])
keys = list(json.loads(attempt.result.read_text()))
print(json.dumps([keys, list(rows[0]), [row["samples_per_j"] for row in rows], group, "samples_per_j" in FIGURES]))
"""


def _with_toy(folder: Path, campaign: Any, database: str, options: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "metrics").mkdir()
    (folder / "metrics" / "samples_per_j.py").write_text(TOY.format(options=options))
    run_id = campaign.done(seed=1).path.parents[1].name
    command = [sys.executable, "-c", WITH_TOY, folder / "metrics", campaign.runs, database, run_id]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_new_metric_is_one_file(campaign: Any, database: str, tmp_path: Path) -> None:
    """An existing store gets its column; earlier runs did not measure it."""
    campaign.done(seed=0)
    with open_store(database) as store:
        collect(store, campaign.runs)
    done = _with_toy(tmp_path, campaign, database)
    assert done.returncode == 0, done.stderr
    keys, columns, values, group, is_figure = json.loads(done.stdout)
    assert keys[keys.index("cpus_seen") + 1] == columns[columns.index("cpus_seen") + 1] == "samples_per_j"
    assert [key for key in keys if key != "samples_per_j"] == ["spec_version", *result_fields()]
    assert values == [None, 2.5]
    assert (group["n"], group["samples_per_j"], group["samples_per_j_max"]) == (2, 2.5, 2.5)
    assert is_figure
    with open_store(database) as store:  # by a version without it
        campaign.done(seed=2)
        assert collect(store, campaign.runs).problems == []


def test_a_metric_that_follows_an_unknown_key_is_an_error(campaign: Any, tmp_path: Path) -> None:
    database = str(tmp_path / "results.db")
    done = _with_toy(tmp_path, campaign, database, ', after="energy_jay"')
    assert "workloads/metrics/samples_per_j.py: it follows 'energy_jay', which is not a key" in done.stderr


def test_metrics_and_fields_of_a_result_are_distinct() -> None:
    """Values are written and read back by name; NaN is null and named; a missing value has no entry."""
    assert set(all_metrics()) & set(RunResult.__dataclass_fields__) == set()
    result = RunResult(run_id="a", attempt=1, state="succeeded", metrics={"step_time_s": 0.5, "warmup_s": float("nan")})
    data = result.to_json()
    assert (data["step_time_s"], data["warmup_s"], data["samples_per_s"]) == (0.5, None, None)
    assert data["nonfinite"] == {"warmup_s": "nan"}
    assert RunResult.from_json(data).metrics == {"step_time_s": 0.5}


@pytest.mark.parametrize("metric", all_metrics().values(), ids=lambda metric: metric.name)
def test_the_documentation_has_each_metric_s_meaning(metric: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "experiment.md").read_text(encoding="utf-8")
    assert f"\n| `{metric.name}` | {metric.meaning} |\n" in page
