"""Which runs are canaries: one of each resource shape runs first and proves that the shape works. Pure.

Everything follows from the plan, so repeating an interrupted command is enough: a done run proves its shape, and a
shape with a run under way waits for that one instead of getting another canary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.planning.plan import CellState, Plan, PlannedRun

_STEPS_PER_EPOCH = 10_000
"""For sorting only: how many steps an epoch has is not known before the data set is read."""


@dataclass(frozen=True, slots=True)
class Canaries:
    """One run for each resource shape that is not proven yet."""

    to_submit: list[PlannedRun] = field(default_factory=list)
    running: list[PlannedRun] = field(default_factory=list)
    """Submitted by an earlier command."""

    @property
    def run_ids(self) -> list[str]:
        return [run.cell.run_id for run in (*self.to_submit, *self.running)]


def choose_canaries(plan: Plan, *, stale: bool = False) -> Canaries:
    """Choose the cheapest run of each shape without a done run: fewest steps or epochs, then first in the plan."""
    wanted = plan.to_submit(stale=stale)
    proven = {run.shape for run in plan.runs if run.state is CellState.DONE}
    running = {run.shape: run for run in reversed(plan.runs) if run.state is CellState.RUNNING}
    canaries = Canaries()
    for shape in dict.fromkeys(run.shape for run in wanted):
        if shape in running and shape not in proven:
            canaries.running.append(running[shape])
        elif shape not in proven:
            canaries.to_submit.append(min((run for run in wanted if run.shape == shape), key=_steps))
    return canaries


def _steps(run: PlannedRun) -> int:
    train = run.cell.train
    return train.steps or train.epochs * _STEPS_PER_EPOCH
