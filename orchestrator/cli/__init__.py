"""The command line. One file per group of verbs; a verb's module is imported only when that verb runs.

Each module named below binds ``app``, a Typer with its verbs. The one-line helps stand here so that
``orchestrate --help`` needs none of the modules; a test holds them against the verbs' own.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

VERBS: dict[str, tuple[str, str]] = {
    "init": ("starting", "Write a starter experiment.toml, or a cluster.toml for this site."),
    "doctor": ("starting", "Say whether this machine, cluster and data are usable, and what to fix."),
    "plan": ("planning", "Show what would run, what is done, what is excluded and why."),
    "submit": ("submitting", "Carry out the plan; safe to interrupt, safe to repeat."),
    "status": ("running", "Show the state of every run and why."),
    "watch": ("watching", "Show all runs live, until you leave."),
    "logs": ("running", "Show what a run printed."),
    "cancel": ("running", "Stop runs."),
    "retry": ("submitting", "Send failed runs again."),
    "collect": ("store", "Read new results from the runs folder into the database."),
    "results": ("results", "Show tables of results."),
    "query": ("results", "Run a read-only SQL query on the results."),
    "db": ("store", "Look after the database."),
    "clean": ("cleaning", "Remove checkpoints, logs and leftovers by rule; never a result."),
    "data": ("data", "Look after data sets."),
    "wheel": ("wheels", "Build Horovod for the installed torch, once, and print where the wheel is."),
}
"""Verb -> (module in this package, one-line help), in the order of use."""


_PLAIN = None
"""How help is marked up: not at all. Rich's markup swallows ``[cluster.NAME]`` and keeps docstrings' line breaks."""


class _LazyGroup(TyperGroup):
    """Knows all verbs by name and imports the module of the one that is used."""

    _using = False

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (the base class's signature)
        return list(VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS and (near := difflib.get_close_matches(args[0], VERBS, n=1)):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        self._using = True
        try:
            return super().resolve_command(ctx, args)
        finally:
            self._using = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return super().get_command(ctx, cmd_name)
        module_name, summary = VERBS[cmd_name]
        if not self._using:  # a listing: the summary will do
            return TyperCommand(cmd_name, short_help=summary)
        module = importlib.import_module(f"orchestrator.cli.{module_name}")
        module.app.rich_markup_mode = _PLAIN
        command = typer.main.get_group(module.app).commands[cmd_name]
        for below in getattr(command, "commands", {}).values():
            below.short_help = below.help.partition("\n")[0]  # else a listing cuts it
        return command


app = typer.Typer(
    cls=_LazyGroup,
    name="orchestrate",
    no_args_is_help=True,
    rich_markup_mode=_PLAIN,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(importlib.metadata.version("orchestrate-hpc"))
        raise typer.Exit


@app.callback()
def _orchestrate(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Find out which way of parallel training is faster on this GPU cluster, by how much, at what cost, and why.

    Example: orchestrate init --study demo && orchestrate plan --local && orchestrate submit --local --wait
    """


def main() -> None:
    """Entry point: runs a verb and turns an error of ours into its message and exit code."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 bad input, 3 partly done."""
    from workloads.errors import OrchestrateError

    _prepare_streams()
    code = 0  # a reader that leaves before the end has seen what it wanted
    try:
        code = _verb(argv)
        # Now, while a full disk can still be told: the interpreter's own flush comes too late for that.
        sys.stdout.flush()
    except OrchestrateError as error:
        print(error.text(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno == errno.EPIPE:
            _hush()
            return code
        return _unable(error)
    return code


def _verb(argv: list[str]) -> int:
    if os.environ.get("_ORCHESTRATE_COMPLETE") == "complete_bash":
        from orchestrator.cli import completion

        completion.join_words(os.environ)
    try:
        app(argv, prog_name="orchestrate")
    except SystemExit as ended:
        # Typer's word for a reader that left while there was more to print.
        if isinstance(ended.__context__, OSError) and ended.__context__.errno == errno.EPIPE:
            return 0
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


def _prepare_streams() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; a file opened later would get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115 (stays open)
    for stream in (sys.stdout, sys.stderr):
        # Under LC_ALL=C a run's name may still hold any character.
        reconfigure: Callable[..., Any] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")


def _hush() -> None:
    """Nothing more reaches a standard output that nobody reads."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Else Python, as it ends, complains of what is left in its buffer.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_REMEDIES = {
    errno.ENOSPC: "make room and try again",
    errno.EDQUOT: "make room and try again",
    errno.EROFS: "work on a disk that may be written, or name places there: --runs, --db, --experiment, --data",
}


def _unable(error: OSError) -> int:
    """Say what the system refused."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    place = " -> ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None)
    what = f"{place}: {error.strerror}" if place else str(error.strerror)
    remedy = _REMEDIES.get(error.errno or 0)
    print(f"{what}\n  fix: {remedy}" if remedy else what, file=sys.stderr)
    return 1
