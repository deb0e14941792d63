"""Published figures beside measured ones, and ``--set hardware=KIND``, which keeps the numbers of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from db.connect import open_store
from orchestrator.cli import run
from orchestrator.config import experiment
from orchestrator.errors import ExperimentError
from workloads.contract import Hardware

STUDY = """
name = "study"
[defaults]
model = "cnn"
dataset = "digits"
[[zip]]
strategy = ["eager", "ddp", { name = "ddp", bucket_cap_mb = 5 }]
hardware = ["a100:1", "a100:2", "a30:2"]
[[when]]
if = { hardware = "a100:2" }
set = { batch_size = 64, hardware = "a100:4x2" }
[[exclude]]
match = { hardware = ["a30:2", "a30:4"] }
why = "too slow"
[[include]]
strategy = "eager"
hardware = "t4:1"
[[published]]
match = { strategy = "eager", hardware = "a100:1" }
test_accuracy = 0.99
epoch_time_s = 7
on = "1 x T4"
[[published]]
match = { strategy = ["eager", "ddp"] }
train_time_s = 60
on = "paper"
"""


def test_a_kind_of_hardware_replaces_the_kind_everywhere() -> None:
    """In axes, values, conditions and published figures; rows that became equal stay apart where options differ."""
    spec = experiment.parse(STUDY, "x", ["hardware=h100"])
    assert [row["hardware"] for row in spec.products[0][0]] == [
        Hardware("h100", 1),
        Hardware("h100", 2),
        Hardware("h100", 2),
    ]
    assert spec.whens[0].conditions == {"hardware": frozenset({Hardware("h100", 2)})}
    assert spec.whens[0].values["hardware"] == Hardware("h100", 4, 2)
    assert spec.excludes[0].match == {"hardware": frozenset({Hardware("h100", 2), Hardware("h100", 4)})}
    assert spec.includes[0]["hardware"] == Hardware("h100", 1)
    assert spec.published[0].match["hardware"] == frozenset({Hardware("h100", 1)})
    assert spec.overrides == ("--set hardware=h100 changes the kind and keeps the number of devices, in 6 places",)


def test_whole_hardware_still_replaces_the_numbers_too() -> None:
    """Other texts are errors."""
    spec = experiment.parse(STUDY, "x", ["hardware=cpu:2"])
    assert [row["hardware"] for row in spec.products[0][0]] == [
        Hardware("cpu", 2),
        Hardware("cpu", 2),
        Hardware("cpu", 2),
    ]
    assert spec.published[0].match["hardware"] == frozenset({Hardware("a100", 1)})
    with pytest.raises(ExperimentError, match='"a100:x" is not hardware') as caught:
        experiment.parse(STUDY, "x", ["hardware=a100:x"])
    assert "--set hardware=a100:x" in caught.value.text()


@pytest.fixture
def measured(campaign: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign.done(seed=0, hardware="cpu:1", result={"test_accuracy": 0.5, "epoch_time_s": 2.0, "train_time_s": 30.0})
    campaign.done(seed=0, strategy="local_sgd", hardware="cpu:2", result={"test_accuracy": 0.25})
    (tmp_path / "experiment.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    open_store("results.db").close()


def test_published_figures_are_right_of_measured_ones(measured: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each source; figures that the table would not show come with what was measured; others stay empty."""
    assert run(["results", "--published", "--set", "hardware=cpu", "--select", "label,test_accuracy", "-f", "csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "label,test_accuracy,published_test_accuracy,train_time_s,published_train_time_s,epoch_time_s,"
        "published_epoch_time_s,published_on",
        "cnn eager seed=0,0.5,0.99,30.0,,2.0,7.0,1 x T4",
        "cnn eager seed=0,0.5,,30.0,60.0,2.0,,paper",
        "cnn local_sgd seed=0,0.25,,,,1.5,,",
    ]
    assert run(["results", "--published", "--set", "hardware=cpu"]) == 0
    out = capsys.readouterr().out
    assert "published test accuracy (%)" in out and "99.00" in out and "published epoch time (s)" in out
    assert run(["results", "--published", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["strategy"], row["published_on"]) for row in rows] == [("eager", "paper"), ("local_sgd", None)]


def test_published_figures_can_be_selected(measured: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing is added to what was named; a figure that the file has not is no column."""
    command = ["results", "--published", "--set", "hardware=cpu", "-f", "csv", "--select"]
    assert run([*command, "seed,published_test_accuracy", "--sort", "published_test_accuracy"]) == 0
    assert capsys.readouterr().out.splitlines() == ["seed,published_test_accuracy", "0,0.99", "0,", "0,"]
    assert run([*command, "published_peak_memory_bytes"]) == 2
    assert "no column 'published_peak_memory_bytes'" in capsys.readouterr().err


def test_figures_of_a_strategy_with_options_match_runs_with_these_options(
    campaign: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign.done(strategy="gpipe", strategy_options={"balance": [1, 1], "chunks": 2}, hardware="cpu:2")
    campaign.done(strategy="gpipe", hardware="cpu:2", seed=1)
    study = STUDY.replace('{ strategy = ["eager", "ddp"] }', '{ strategy = { name = "gpipe", balance = [1, 1] } }')
    (tmp_path / "experiment.toml").write_text(study)
    monkeypatch.chdir(tmp_path)
    open_store("results.db").close()
    assert run(["results", "--published", "--select", "seed", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["seed"], row["published_on"]) for row in rows] == [(0, "paper"), (1, None)]


def test_runs_that_differ_from_the_published_work_are_noted(
    measured: None, campaign: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial on another kind of hardware, of fewer epochs, stands beside figures that are not of its kind."""
    assert run(["results", "--published", "--set", "hardware=cpu"]) == 0
    assert "not the work" not in capsys.readouterr().err
    campaign.done(seed=1, hardware="cpu:1", epochs=1, train_fraction=0.5)
    assert run(["results", "--published", "--set", "hardware=cpu", "--set", "epochs=1"]) == 0
    assert "these runs differ from the file in epochs, train_fraction" in capsys.readouterr().err


def test_published_goes_with_single_runs(measured: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["results", "--published", "--group-by", "strategy"]) == 2
    assert "--published is for single runs" in capsys.readouterr().err
    Path("experiment.toml").unlink()
    assert run(["results", "--published"]) == 2
    assert "there is no experiment file" in capsys.readouterr().err
