"""Models whose training state is unlikely to fit: a note from the GPU memory of a profile or of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.local.machine import Gpu, Machine
from orchestrator.cluster import cluster_file
from orchestrator.config import experiment, starter_studies
from orchestrator.environment.interpreter import Packages
from orchestrator.planning import checks, planner
from orchestrator.workspace import Workspace
from workloads.contract import Hardware, TrainConfig


def notes(tmp_path: Path, *sets: str, memory_gb: float = 0.0) -> dict[str, str]:
    """Label of each run with a note of it, and what the note says; on Sol, or on a machine with two such GPUs."""
    spec = experiment.parse(starter_studies.read("too-large"), "x", list(sets))
    gpus = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H100", round(memory_gb * 1e9)) for i in range(2))
    made = planner.make_plan(
        Workspace.at(runs=tmp_path / "runs"),
        spec,
        None if memory_gb else cluster_file.load("sol"),
        Machine(gpus, tuple(range(8)), "host") if memory_gb else None,
        {},
        [],
        Packages("python", None),
    )
    assert not any(check.blocking for check in made.checks if "fit" in check.what)
    told = [check for check in made.checks if " is unlikely to fit: " in check.what]
    assert all("fsdp" in check.fix and "pipeline" in check.fix and "ddp" not in check.fix.split() for check in told)
    return dict(check.what.split(" is unlikely to fit: ") for check in told)


def test_strategies_that_copy_the_model_are_noted_and_those_that_shard_it_are_not(tmp_path: Path) -> None:
    found = notes(tmp_path)
    assert list(found) == ["wide_transformer/96GB-eager-gpu1-s0", "wide_transformer/96GB-ddp-gpu2-s0"]
    assert set(found.values()) == {
        "weights, gradients and optimizer state take about 97 GB on each device, and one has 80"
    }


def test_the_memory_of_this_machine_counts_without_a_profile(tmp_path: Path) -> None:
    """Larger GPUs get no note, smaller ones one for every strategy, a CPU none."""
    assert notes(tmp_path, memory_gb=140) == {}
    assert len(notes(tmp_path, memory_gb=85)) == 2
    assert len(notes(tmp_path, memory_gb=40)) == 6
    assert notes(tmp_path, "hardware=cpu", memory_gb=40) == {}


@pytest.mark.parametrize(
    ("train", "copies"),
    [
        ({}, 3),
        ({"momentum": 0.0}, 2),
        ({"optimizer": "adam"}, 4),
        ({"optimizer": "adamw", "precision": "fp64"}, 8),
        ({"optimizer": "adam", "precision": "bf16"}, 4),
        ({"optimizer": "adam", "strategy": "fsdp", "hardware": "gpu:2x2"}, 1),
        ({"optimizer": "adam", "strategy": "deepspeed", "hardware": "gpu:2"}, 4),
        ({"optimizer": "adam", "strategy": "deepspeed", "strategy_options": {"stage": 3}, "hardware": "gpu:2"}, 2),
    ],
)
def test_state_is_copies_of_the_weights(train: dict[str, Any], copies: int) -> None:
    """In fp32: weights and gradients, one momentum, or two moments; a model of 1 GB of weights has 0.25e9 of them."""
    fields = {"model": "wide_transformer/4GB", "strategy": "eager", "hardware": "gpu:1", **train}
    found = checks.state_gb(TrainConfig.from_json({"dataset": "characters", "cpus": 1, **fields}))
    assert found == pytest.approx(copies, rel=0.1)


def test_a_model_without_a_declared_size_gets_no_note() -> None:
    assert (
        checks.state_gb(
            TrainConfig(model="cnn", dataset="digits", strategy="eager", hardware=Hardware("gpu", 1), cpus=1)
        )
        is None
    )


@pytest.mark.parametrize("size", ["96XB", "0GB", "-1GB", "96GB"])
def test_a_probe_trains_no_model_so_any_name_will_do(size: str) -> None:
    train = TrainConfig(
        model=f"wide_transformer/{size}", dataset="characters", strategy="probe", hardware=Hardware("cpu", 1), cpus=1
    )
    assert checks.state_gb(train) is None
