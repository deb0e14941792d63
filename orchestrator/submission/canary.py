"""Which runs go first when one of each resource shape shall prove that it works there. Pure: decided from the plan.

Nothing else is kept of it, so a command that was killed is simply given again: a shape is proven by a run that is done,
and one that is under way is waited for instead of sending another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.planning.plan import Action, Plan, PlannedRun

_STEPS_AN_EPOCH = 10_000
"""Only for sorting: epochs are not known in steps before the data set is."""


@dataclass(frozen=True, slots=True)
class Canaries:
    """One run for each resource shape that is not proven yet."""

    to_send: list[PlannedRun] = field(default_factory=list)
    under_way: list[PlannedRun] = field(default_factory=list)
    """Sent before, by whatever command."""

    @property
    def run_ids(self) -> list[str]:
        return [run.cell.run_id for run in (*self.to_send, *self.under_way)]


def choose(plan: Plan, *, stale: bool = False) -> Canaries:
    """The cheapest run of each shape of which something is to be sent and nothing is done: with the fewest steps or
    epochs, then the first of the plan."""
    wanted = plan.to_send(stale=stale)
    shapes = dict.fromkeys(run.shape for run in wanted)
    proven = {run.shape for run in plan.runs if run.action is Action.DONE}
    under_way = {run.shape: run for run in reversed(plan.runs) if run.action is Action.RUNNING}
    found = Canaries()
    for shape in shapes:
        if shape in proven:
            continue
        if shape in under_way:
            found.under_way.append(under_way[shape])
        else:
            found.to_send.append(min((run for run in wanted if run.shape == shape), key=_work))
    return found


def _work(run: PlannedRun) -> int:
    train = run.cell.train
    return train.steps or train.epochs * _STEPS_AN_EPOCH
