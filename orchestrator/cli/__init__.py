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
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_VERBS = Path(__file__).parent / "verbs"


@cache
def verbs() -> dict[str, str]:
    """Verb -> its summary, in the order of use.

    The summary is the first line of the docstring of the verb's file, read as text: ``orchestrate --help`` imports no
    verb, and takes as long as it did with a table.
    """
    found = []
    for path in _VERBS.glob("[!_]*.py"):
        text = path.read_text(encoding="utf-8")
        order = re.search(r"^ORDER = (\d+)$", text, re.MULTILINE)
        assert order is not None and text.startswith('"""'), f"{path} has no docstring, or no ORDER"
        found.append((int(order[1]), path.stem, text[3:].partition("\n")[0].removesuffix('"""')))
    return {name: summary for _, name, summary in sorted(found)}


def load(verb: str) -> Any:
    """Import a verb and return its command: the function of its name, or a group of what its ``app`` has."""
    module = importlib.import_module(f"orchestrator.cli.verbs.{verb}")
    holder = typer.Typer(rich_markup_mode=_PLAIN)
    if hasattr(module, "app"):
        holder.add_typer(module.app, name=verb, help=module.__doc__, no_args_is_help=True)
    else:
        holder.command(verb, help=module.__doc__)(getattr(module, verb))
    command = typer.main.get_group(holder).commands[verb]
    for sub_verb in getattr(command, "commands", {}).values():
        sub_verb.short_help = sub_verb.help.partition("\n")[0]  # typer cuts the help in a listing otherwise
    return command


_PLAIN = None
"""How help is marked up: not at all. Rich's markup swallows ``[cluster.NAME]`` and keeps docstrings' line breaks."""


class _LazyGroup(TyperGroup):
    """Knows all verbs by name and imports the module of the one that is used."""

    _using = False

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (the base class's signature)
        return list(verbs())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in verbs() and (near := difflib.get_close_matches(args[0], verbs(), n=1)):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        self._using = True
        try:
            return super().resolve_command(ctx, args)
        finally:
            self._using = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in verbs():
            return super().get_command(ctx, cmd_name)
        # A listing needs the summary alone.
        return load(cmd_name) if self._using else TyperCommand(cmd_name, short_help=verbs()[cmd_name])


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
