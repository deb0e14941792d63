"""Which runs a command means: those that are named, or all of a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.completion import run_names
from orchestrator.errors import InputError

if TYPE_CHECKING:
    from orchestrator.tracking.tracker import RunStatus

_LISTED = 10
"""How many runs an error lists."""

RunsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="A run id or a label, or the start of one.",
        show_default=False,
        autocompletion=run_names,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run id or a label, or the start of one.", show_default=False, autocompletion=run_names
    ),
]


def one(found: Sequence[RunStatus], name: str) -> RunStatus:
    """The run that a name means: a run id or its start, else a label, else the start of one.

    Raises:
        InputError: none, or several; lists them.
    """
    ways = (
        [run for run in found if name and run.run_id.startswith(name)],
        [run for run in found if run.label == name],
        [run for run in found if name and run.label.startswith(name)],
    )
    matches = next((way for way in ways if way), [])
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise InputError(f"no run is called {name!r}", hint="orchestrate status lists run ids and labels")
    if len({run.label for run in matches}) > 1:
        why, hint = listed(matches), "give more of the run id or the label"
    else:
        apart = listed(matches, lambda run: f"experiment {run.experiment}, {run.state}")
        why = f"all have the label {matches[0].label}: {apart}"
        hint = f"name one by its run id, such as {matches[0].run_id}"
    raise InputError(f"{name!r} is the name of {len(matches)} runs", why=why, hint=hint)


def listed(found: Sequence[RunStatus], told: Callable[[RunStatus], str] = lambda run: run.label) -> str:
    """The first runs by id and what tells them apart, and how many more there are."""
    more = f", and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(f"{run.run_id} ({told(run)})" for run in found[:_LISTED]) + more


def insist(names: Sequence[str] | None, every: bool, verb: str, option: str) -> None:
    """See to it that runs are named, or all of a kind are meant, and not both.

    Raises:
        InputError: neither is so, or both.
    """
    if bool(names) == every:
        raise InputError(
            f"{verb} which runs?" if not names else f"runs are named, and {option} is given too",
            hint=f"orchestrate {verb} RUN, or orchestrate {verb} {option}",
        )
