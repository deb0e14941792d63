"""GPU-hours of a plan: from time limits, and from measured history where there is some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestrator.errors import InputError
from orchestrator.planning.plan import CellState, GpuHours, Plan, PlannedRun
from orchestrator.units import counted
from workloads.contract import Hardware, TrainConfig

if TYPE_CHECKING:
    from db.queries import Duration

_Key = tuple[str, str, str, Hardware, bool]
"""Runs of one key take the same time a step or epoch: model, data set, strategy, hardware, whether steps count."""


def gpu_hours(runs: Sequence[PlannedRun], durations: Sequence[Duration]) -> GpuHours:
    """GPU-hours of runs to submit: time limits as the upper bound, measured history as the expectation."""
    high = sum(run.shape.gpu_hours_limit for run in runs)
    if not runs:
        return GpuHours(0.0, 0.0, 0.0, "nothing to submit")
    history: dict[_Key, list[float]] = {}
    for duration in durations:
        if duration.total_time_s and (units := _units(duration)):
            history.setdefault(_key(duration), []).append(duration.total_time_s / units)
    known = [(run, times) for run in runs if (times := history.get(_key(run.cell.train)))]
    if not known:
        return GpuHours(None, None, high, "no measured history: only the time limit is known")
    unknown_hours = sum(run.shape.gpu_hours_limit for run in runs if _key(run.cell.train) not in history)

    def total(pick: Callable[[Sequence[float]], float]) -> float:
        hours = sum(pick(times) * _units(run.cell.train) * run.shape.gpus / 3600 for run, times in known)
        return hours + unknown_hours

    basis = f"measured history for {len(known)} of {len(runs)} runs"
    if len(known) < len(runs):
        basis += ", the limit for the others"
    return GpuHours(total(min), total(lambda times: sum(times) / len(times)), high, basis)


def check_limit(plan: Plan, max_gpu_hours: float, *, stale: bool = False) -> None:
    """Raise InputError for a plan whose runs, to submit and under way, may use more GPU-hours: time limit × GPUs.

    All or nothing: who did not expect the cost of a study rarely wants a part of it. Runs under way count, so that
    repeating a command, after an interruption or for the backlog, does not raise the limit.
    """
    to_submit = plan.to_submit(stale=stale)
    under_way = [run for run in plan.runs if run.state is CellState.RUNNING]
    new, old = (sum(run.shape.gpu_hours_limit for run in runs) for runs in (to_submit, under_way))
    if not to_submit or new + old <= max_gpu_hours:
        return
    also = f", {old:,.1f} of {len(under_way)} under way" if under_way else ""
    raise InputError(
        f"the plan may use {new + old:,.1f} GPU-hours and --max-gpu-hours is {max_gpu_hours:g}: nothing was submitted",
        why=f"time limit × GPUs: {new:,.1f} of {counted(len(to_submit), 'run')} to submit{also}",
        hint="shorten time_limit, exclude cells, or raise --max-gpu-hours",
    )


def _key(run: TrainConfig | Duration) -> _Key:
    return run.model, run.dataset, run.strategy, run.hardware, bool(run.steps)


def _units(run: TrainConfig | Duration) -> int:
    return run.steps or run.epochs
