"""What collect reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from orchestrator.cli import output
from orchestrator.units import counted

if TYPE_CHECKING:
    from db.ingest import CollectReport


def _say_collected(done: str, collected: CollectReport) -> None:
    counts = ", ".join(counted(getattr(collected, f"{name}s"), name) for name in ("run", "attempt", "result", "epoch"))
    typer.echo(f"{done}: {counts}")


def say_problems(collected: CollectReport) -> None:
    for problem in collected.problems:
        output.talk(f"left out: {problem.path}: {problem.what}")
