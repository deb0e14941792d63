"""Which runs a command means: those that it names, or all of a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from orchestrator.cli.completion import run_names
from orchestrator.errors import InputError
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.tracking import tracker

_MAX_LISTED = 10
"""Runs that an error lists."""

_RUN = "Run id or label, or the beginning of one."
RunsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN]...", help=_RUN, show_default=False, autocompletion=run_names)
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=_RUN, show_default=False, autocompletion=run_names)]


def select(
    runs: Sequence[tracker.RunStatus], names: Sequence[str] | None, kind: Callable[[tracker.RunStatus], bool]
) -> list[tracker.RunStatus]:
    """Return the named runs, or all of a kind where none is named."""
    return [find(runs, name) for name in names] if names else [run for run in runs if kind(run)]


def find(runs: Sequence[tracker.RunStatus], name: str) -> tracker.RunStatus:
    """Return the run whose run id begins so, else whose label is or begins so; raise InputError for none or several."""
    ways = (
        [run for run in runs if name and run.run_id.startswith(name)],
        [run for run in runs if run.label == name],
        [run for run in runs if name and run.label.startswith(name)],
    )
    matches = next((way for way in ways if way), [])
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise InputError(f"no run is named {name!r}", hint="orchestrate status lists run ids and labels")
    if len({run.label for run in matches}) > 1:
        why, hint = describe(matches), "give more of the run id or the label"
    else:
        details = describe(matches, lambda run: f"experiment {run.experiment}, {run.state}")
        why = f"all have the label {matches[0].label}: {details}"
        hint = f"give the run id of one, such as {matches[0].run_id}"
    raise InputError(f"{name!r} names {len(matches)} runs", why=why, hint=hint)


def describe(
    runs: Sequence[tracker.RunStatus], detail: Callable[[tracker.RunStatus], str] = lambda run: run.label
) -> str:
    """Return the first runs by id, each with a detail, and how many more there are."""
    more = f", and {len(runs) - _MAX_LISTED} more" if len(runs) > _MAX_LISTED else ""
    return ", ".join(f"{run.run_id} ({detail(run)})" for run in runs[:_MAX_LISTED]) + more


def require_selection(names: Sequence[str] | None, every: bool, verb: str, option: str) -> None:
    """Raise InputError unless either runs are named, or the option for all of a kind is given."""
    if bool(names) == every:
        raise InputError(
            f"{verb} which runs?" if not names else f"runs are named, and {option} is given too",
            hint=f"orchestrate {verb} RUN, or orchestrate {verb} {option}",
        )
