"""Which runs are canaries, and what --max-gpu-hours allows: decided from the plan alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.planning import costs
from orchestrator.planning.matrix import Cell
from orchestrator.planning.plan import CellState, GpuHours, Plan, PlannedRun
from orchestrator.submission import canary
from workloads.contract import Execution, Hardware, ResourceShape, TrainConfig


def shape(gpus: int) -> ResourceShape:
    return ResourceShape(
        target="lab",
        gpu="a100",
        nodes=1,
        ranks_per_node=gpus,
        gpus_per_node=gpus,
        ask_gpus_per_node=gpus,
        cpus_per_rank=1,
        mem_bytes=None,
        time_limit_s=7200,
    )


def run(gpus: int, seed: int, action: CellState = CellState.NEW, *, epochs: int = 3, steps: int = 0) -> PlannedRun:
    train = TrainConfig(
        model="cnn",
        dataset="digits",
        strategy="ddp",
        hardware=Hardware("a100", gpus),
        cpus=gpus,
        seed=seed,
        epochs=epochs,
        steps=steps,
    )
    cell = Cell(train=train, execution=Execution(), run_id=train.run_id(), label=f"{gpus}-{seed}")
    return PlannedRun(cell, shape(gpus), action)


def plan(*runs: PlannedRun) -> Plan:
    return Plan(
        experiment="x",
        target="lab",
        digests={},
        runs=list(runs),
        excluded=[],
        merged=0,
        gpu_hours=GpuHours(None, None, 0.0, ""),
        checks=[],
        runs_folder=Path("/runs"),
        data_root=None,
        dataset_digests={},
    )


def labels(runs: list[PlannedRun]) -> list[str]:
    return [one.cell.label for one in runs]


def test_the_cheapest_of_each_shape_goes_first() -> None:
    """Fewest steps before fewest epochs, then the first of the plan."""
    chosen = canary.choose_canaries(
        plan(run(1, 0), run(1, 1, epochs=2), run(1, 2, epochs=2), run(2, 3), run(2, 4, epochs=9, steps=50))
    )
    assert labels(chosen.to_submit) == ["1-1", "2-4"] and chosen.running == []


def test_a_shape_is_proven_by_a_run_that_is_done_and_waits_for_one_under_way() -> None:
    """A command that was killed continues when it is repeated."""
    runs = [run(1, 0), run(1, 1, CellState.DONE), run(2, 2), run(2, 3, CellState.RUNNING), run(2, 4, CellState.RUNNING)]
    chosen = canary.choose_canaries(plan(*runs))
    assert chosen.to_submit == [] and labels(chosen.running) == ["2-3"]
    assert chosen.run_ids == [runs[3].cell.run_id]


def test_stale_runs_prove_nothing_and_failed_runs_may_be_canaries() -> None:
    """The code changed since; a failed run is submitted like a new one."""
    chosen = canary.choose_canaries(plan(run(1, 0, CellState.STALE), run(1, 1, CellState.FAILED)))
    assert labels(chosen.to_submit) == ["1-1"]
    assert canary.choose_canaries(plan(run(1, 0, CellState.STALE))).run_ids == []
    assert labels(canary.choose_canaries(plan(run(1, 0, CellState.STALE)), stale=True).to_submit) == ["1-0"]


def test_a_limit_of_gpu_hours_counts_runs_to_submit_and_under_way() -> None:
    """2 h × 2 GPUs each; done runs do not count."""
    runs = [run(2, 0), run(2, 1, CellState.FAILED), run(2, 2, CellState.RUNNING), run(2, 3, CellState.DONE)]
    costs.check_limit(plan(*runs), 12.0)
    with pytest.raises(InputError) as caught:
        costs.check_limit(plan(*runs), 11.9)
    assert caught.value.what == "the plan may use 12.0 GPU-hours and --max-gpu-hours is 11.9: nothing was submitted"
    assert caught.value.why == "time limit × GPUs: 8.0 of 2 runs to submit, 4.0 of 1 under way"
    assert caught.value.exit_code == 2 and "shorten time_limit" in caught.value.hint
    with pytest.raises(InputError):
        costs.check_limit(plan(*runs), float("nan"))
    costs.check_limit(plan(run(2, 2, CellState.RUNNING)), 0.0)


def test_stale_runs_cost_when_they_are_submitted() -> None:
    """With --stale only."""
    only_stale = plan(run(1, 0, CellState.STALE))
    costs.check_limit(only_stale, 0.0)
    with pytest.raises(InputError, match=r"the plan may use 2\.0 GPU-hours"):
        costs.check_limit(only_stale, 0.0, stale=True)
