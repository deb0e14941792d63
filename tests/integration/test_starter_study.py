"""A published study in miniature, from ``init`` to its published figures beside measured ones, as its head says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

SETS = ("hardware=cpu", "model=mobilenet_v2", "epochs=1", "train_fraction=0.5", "dataset=imagefolder/cifar10")
SMALL = [word for text in SETS for word in ("--set", text)]


def _orchestrate(folder: Path, *argv: str, within_s: float = 300) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pictures(folder: Path) -> None:
    """``imagefolder/cifar10`` in small: 40 training and 21 test pictures of two classes."""
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 21)):
        for number in range(count):
            place = folder / split / f"class {number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels.integers(0, 256, (32, 32, 3), np.uint8)).save(place / f"{number:02d}.png")


def test_a_study_runs_on_two_cores_and_shows_published_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row but DataParallel's, which needs GPUs and says so; memory in bytes both times."""
    monkeypatch.setenv("ORCHESTRATE_DATA", str(tmp_path / "data"))
    _pictures(tmp_path / "data" / "cifar10")
    _orchestrate(tmp_path, "init", "--study", "fsdp")
    planned = json.loads(_orchestrate(tmp_path, "plan", "--local", "--json", *SMALL))
    assert [(run["strategy"], run["hardware"]) for run in planned["runs"]] == [
        ("eager", "cpu:1"),
        ("fsdp", "cpu:2"),
        ("ddp", "cpu:2"),
    ]
    assert [excluded["rule"] for excluded in planned["excluded"]] == ["strategy data_parallel"]
    _orchestrate(tmp_path, "submit", "--local", "--wait", *SMALL)
    table = json.loads(_orchestrate(tmp_path, "results", "--published", "--json", *SMALL))
    rows = {row["strategy"]: row for row in table}
    assert {row["state"] for row in table} == {"succeeded"} and len(table) == 3
    assert {row["num_test_samples"] for row in table} == {21}
    shown = ("published_on", "published_test_accuracy", "published_epoch_time_s", "published_peak_memory_bytes")
    assert [rows["eager"][name] for name in shown] == ["1 GPU of Sol", 0.52, 34.12, 0.24e9]
    assert [rows["fsdp"][name] for name in shown] == ["2 GPUs of Sol", 0.536, 35.0, 0.21e9]
    assert [rows["ddp"][name] for name in shown] == [None] * 4
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "results", "--published", *SMALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "differ from the file in dataset, epochs, train_fraction" in done.stderr
    assert all(row["epoch_time_s"] > 0 and row["peak_memory_bytes"] > 0 for row in table)


@pytest.mark.optional
@pytest.mark.parametrize("study", ["fsdp", "gpipe-horovod", "mnist-dp-ddp", "frameworks"])
def test_a_whole_study_runs_on_real_data(study: str, tmp_path: Path) -> None:
    """Many minutes each; where ORCHESTRATE_DATA has what ``orchestrate data prepare mnist cifar10`` makes."""
    data = Path(os.environ.get("ORCHESTRATE_DATA", "nowhere"))
    if not (data / "MNIST").is_dir() or not (data / "cifar-10-batches-py").is_dir():
        pytest.skip("no real data here")
    _orchestrate(tmp_path, "init", "--study", study)
    sets = ["hardware=cpu", "epochs=1", "train_fraction=0.004", "test_fraction=0.02", "checkpoint_every=0"]
    small = [word for text in sets for word in ("--set", text)]
    _orchestrate(tmp_path, "submit", "--local", "--wait", *small, within_s=7200)
    table = json.loads(_orchestrate(tmp_path, "results", "--published", "--json", *small))
    assert table and {row["state"] for row in table} == {"succeeded"}
    assert any(row["published_on"] for row in table)
