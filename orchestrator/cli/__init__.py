"""The command line ``orchestrate VERB``.

A verb is one file of ``cli/verbs``: its docstring is the help, ``ORDER`` its place in the list of verbs, and it defines
a function of the verb's name, or, where a verb has sub-verbs, a Typer called ``app``. The file of a verb is imported
only when that verb runs; the other files of this package serve several verbs.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from orchestrator import own_packages

_NO_MARKUP = None
"""As ``rich_markup_mode``. Rich's markup would drop ``[cluster.NAME]`` and keep the line breaks of docstrings."""


@cache
def list_verbs() -> dict[str, str]:
    """Return verb -> summary, in the order of use.

    The summary is the first line of the verb's docstring, read as text: importing every verb for ``orchestrate --help``
    would take longer than everything else it does.
    """
    found = []
    for path in (Path(__file__).parent / "verbs").glob("[!_]*.py"):
        text = path.read_text(encoding="utf-8")
        order = re.search(r"^ORDER = (\d+)$", text, re.MULTILINE)
        assert order is not None and text.startswith('"""'), f"{path} has no docstring or no ORDER"
        found.append((int(order[1]), path.stem, text[3:].partition("\n")[0].removesuffix('"""')))
    return {name: summary for _, name, summary in sorted(found)}


def load_verb(verb: str) -> Any:
    """Import a verb and return its command."""
    module = importlib.import_module(f"orchestrator.cli.verbs.{verb}")
    parent = typer.Typer(rich_markup_mode=_NO_MARKUP)
    if hasattr(module, "app"):
        parent.add_typer(module.app, name=verb, help=module.__doc__, no_args_is_help=True)
    else:
        parent.command(verb, help=module.__doc__)(getattr(module, verb))
    command = typer.main.get_group(parent).commands[verb]
    for sub_verb in getattr(command, "commands", {}).values():
        sub_verb.short_help = sub_verb.help.partition("\n")[0]  # without it, a listing cuts the help
    return command


class _LazyGroup(TyperGroup):
    """Lists all verbs, and imports the one that runs."""

    _resolving = False

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (the base class's signature)
        return list(list_verbs())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in list_verbs() and (near := difflib.get_close_matches(args[0], list_verbs(), n=1)):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        self._resolving = True
        try:
            return super().resolve_command(ctx, args)
        finally:
            self._resolving = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in list_verbs():
            return super().get_command(ctx, cmd_name)
        return load_verb(cmd_name) if self._resolving else TyperCommand(cmd_name, short_help=list_verbs()[cmd_name])


app = typer.Typer(
    cls=_LazyGroup,
    name="orchestrate",
    no_args_is_help=True,
    rich_markup_mode=_NO_MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(importlib.metadata.version("orchestrate-hpc"))
        raise typer.Exit


@app.callback()
def _orchestrate(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Find out which way of parallel training is faster on this GPU cluster, by how much, at what cost, and why.

    Example: orchestrate init --study demo && orchestrate plan --local && orchestrate submit --local --wait
    """


def main() -> None:
    """Run the command line of this process, and exit."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 wrong input, 3 partly done."""
    _prepare_streams()
    if intruder := own_packages.imported_intruder():
        name, path = intruder
        print(
            f"{path}: another project's package {name!r} was imported before orchestrate's own\n"
            "  fix: rename it, or remove it from PYTHONPATH and from sitecustomize.py",
            file=sys.stderr,
        )
        return 1
    from workloads.errors import OrchestrateError

    code = 0  # when the reader of a pipe closes it early, it has what it wanted
    try:
        code = _run_verb(argv)
        # The interpreter flushes at exit too, but then a full disk can no longer be reported with an exit code.
        sys.stdout.flush()
    except OrchestrateError as error:
        print(error.text(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno == errno.EPIPE:
            _discard_stdout()
            return code
        return _report_system_error(error)
    return code


def _run_verb(argv: list[str]) -> int:
    if os.environ.get("_ORCHESTRATE_COMPLETE") == "complete_bash":
        from orchestrator.cli import completion

        completion.join_words(os.environ)
    try:
        app(argv, prog_name="orchestrate")
    except SystemExit as exit_:
        # Typer exits with 1 on a closed pipe.
        if isinstance(exit_.__context__, OSError) and exit_.__context__.errno == errno.EPIPE:
            return 0
        return exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    return 0


def _prepare_streams() -> None:
    for name in ("stdin", "stdout", "stderr"):
        # A caller may have closed one. Its file descriptor would go to the next file that is opened.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115 (stays open)
    for stream in (sys.stdout, sys.stderr):
        # Under LC_ALL=C the name of a run may still contain any character.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(encoding="utf-8", errors="backslashreplace")


def _discard_stdout() -> None:
    """Send the rest of standard output to /dev/null after a reader closed the pipe."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Python flushes its buffer once more at exit, and would print "Exception ignored ... BrokenPipeError" (see the note
    # on SIGPIPE in the documentation of the signal module).
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_FIXES = {
    errno.ENOSPC: "free some space and try again",
    errno.EDQUOT: "free some space and try again",
    errno.EROFS: "work on a writable disk, or name places there with --runs, --db, --experiment and --data",
}


def _report_system_error(error: OSError) -> int:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    place = " -> ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None)
    what = f"{place}: {error.strerror}" if place else str(error.strerror)
    fix = _FIXES.get(error.errno or 0)
    print(f"{what}\n  fix: {fix}" if fix else what, file=sys.stderr)
    return 1
