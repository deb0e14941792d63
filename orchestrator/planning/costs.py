"""What a plan would cost: GPU-hours from limits, and from measured history where there is some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestrator.errors import InputError
from orchestrator.planning.plan import CellState, GpuHours, Plan, PlannedRun
from workloads.contract import Hardware, TrainConfig

if TYPE_CHECKING:
    from db.queries import Duration


def gpu_hours(runs: Sequence[PlannedRun], durations: Sequence[Duration]) -> GpuHours:
    """GPU-hours of what would be sent: limits as upper bound, measured history as expectation where there is any."""
    high = sum(run.shape.gpu_hours_limit for run in runs)
    history = _per_unit_times(durations)
    known = [(run, times) for run in runs if (times := history.get(_history_key(run.cell.train)))]
    if not runs:
        return GpuHours(0.0, 0.0, 0.0, "nothing to send")
    if not known:
        return GpuHours(None, None, high, "no measured history yet: the limit is all that is known")

    def total(pick: Callable[[Sequence[float]], float]) -> float:
        hours = sum(pick(times) * _units(run.cell.train) * run.shape.gpus / 3600 for run, times in known)
        return hours + sum(run.shape.gpu_hours_limit for run in runs if _history_key(run.cell.train) not in history)

    basis = f"measured history for {len(known)} of {len(runs)} runs" + (
        ", the limit for the others" if len(known) < len(runs) else ""
    )
    return GpuHours(total(min), total(lambda times: sum(times) / len(times)), high, basis)


def check_limit(plan: Plan, max_gpu_hours: float, *, stale: bool = False) -> None:
    """Refuse a plan that may cost more, by time limit × GPUs of what would be sent and of what is under way of it.

    All or nothing: a part of a study is rarely what somebody wants who did not expect its cost. What is under way
    counts, so that the same command given again, after an interruption or as room appears, has one limit for all.

    Raises:
        InputError: it may; both numbers are named.
    """
    to_submit = plan.to_submit(stale=stale)
    under_way = [run for run in plan.runs if run.state is CellState.RUNNING]
    sending, going_on = (sum(run.shape.gpu_hours_limit for run in runs) for runs in (to_submit, under_way))
    if not to_submit or sending + going_on <= max_gpu_hours:
        return
    also = f", {going_on:,.1f} of {len(under_way)} that are under way" if under_way else ""
    raise InputError(
        f"this may use {sending + going_on:,.1f} GPU-hours, and --max-gpu-hours is {max_gpu_hours:g}: nothing was sent",
        why=f"time limit × GPUs: {sending:,.1f} of {len(to_submit)} runs to send{also}",
        hint="shorten time_limit, leave cells out, or allow more",
    )


def _per_unit_times(durations: Sequence[Duration]) -> dict[tuple[str | Hardware, ...], list[float]]:
    times: dict[tuple[str | Hardware, ...], list[float]] = {}
    for d in durations:
        units = d.steps if d.steps else d.epochs
        if d.total_time_s and units:
            key = (d.model, d.dataset, d.strategy, d.hardware, "steps" if d.steps else "epochs")
            times.setdefault(key, []).append(d.total_time_s / units)
    return times


def _history_key(train: TrainConfig) -> tuple[str | Hardware, ...]:
    return (train.model, train.dataset, train.strategy, train.hardware, "steps" if train.steps else "epochs")


def _units(train: TrainConfig) -> int:
    return train.steps or train.epochs
