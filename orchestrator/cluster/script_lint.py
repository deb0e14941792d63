"""Checks of a job script that need no Slurm. Every script passes them when it is rendered."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.cluster.sbatch_options import INDISPENSABLE, OWNED_DIRECTIVES, SHORT_OPTIONS, Directives

GPU_DIRECTIVES = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"})
MEMORY_DIRECTIVES = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that Slurm would reject or silently ignore."""

    what: str
    hint: str = ""


def script_faults(text: str, planned: Directives, forbid: Collection[str] = ()) -> Iterator[Fault]:
    """Compare the ``#SBATCH`` lines of a script with the planned options, and with those that the site forbids."""
    if not text.startswith("#!"):
        yield Fault("the script does not start with #!", "remove what stands before it")
        return
    found: list[tuple[str, str | bool]] = []
    started = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("#SBATCH"):
            if started or not line.startswith("#SBATCH"):
                yield Fault(
                    f"Slurm would ignore line {number} of the script: {line.strip()}",
                    "write #SBATCH lines in column 0 and before the first command, in the block directives",
                )
            try:
                found += options_in(line.removeprefix("#SBATCH"))
            except ValueError as error:
                yield Fault(f"line {number} of the script cannot be read ({error}): {line}")
        started = started or bool(line.strip() and not line.lstrip().startswith("#"))
    yield from _option_faults(found, planned, forbid)


def launch_faults(text: str) -> Iterator[Fault]:
    """Check that a script starts a rank, by reading its words as Bash does.

    Conditional parts are not judged: a script may end where something is missing.
    """
    commands = list(_commands(text.split("\n")))
    first = next((i for i, (_, line) in enumerate(commands) if _starts_a_rank(line)), None)
    if first is None:
        what = "the script starts no rank: nothing runs the command in the array rank"
        yield Fault(what, 'write srun {{ srun }} "${rank[@]}", or {{ super() }}, in the block launch')
        return
    open_parts: list[str] = []
    for number, line in commands[:first]:
        if _ends(line, open_parts):
            yield Fault(
                f"line {number} of the script ends it before any rank is started: {line.strip().splitlines()[0]}",
                "remove it from the prologue or your template; to end a job, let a line of the prologue fail",
            )
            return


_RANK = re.compile(r"\brank\[[@*]\]|submitit\.core\._submit")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?\s*[\\\"']?([A-Za-z_]\w*)")


def _starts_a_rank(line: str) -> bool:
    return not line.lstrip().startswith("rank=(") and _RANK.search(line) is not None


def _commands(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Lines as Bash joins them, with the number of the first; without comments and here-documents."""
    at = 0
    while at < len(lines):
        line, after = lines[at], at + 1
        comment = line.lstrip().startswith("#")
        while not comment and after < len(lines) and (line.endswith("\\") or _words(line) is None):
            line = (line.removesuffix("\\") if line.endswith("\\") else line + "\n") + lines[after]
            after += 1
        if not comment and _words(line) is None:  # an unclosed quote: leave the line as it is
            line, after = lines[at], at + 1
        if not comment:
            yield at + 1, line
            for word in _HEREDOC.findall(line):
                end = next((i for i in range(after, len(lines)) if lines[i].lstrip("\t") == word), after - 1)
                after = end + 1
        at = after


_CLOSED_BY = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done", "(": ")"}
_UNCONDITIONAL = "} of a group"
_COMMAND_STARTS_AFTER = frozenset({"", ";", "{", "then", "else", "do", "!"})
_CONDITIONAL_AFTER = frozenset({"&&", "||", "|", ")"})


def _ends(line: str, open_parts: list[str]) -> bool:
    """Whether a line ends the script under all circumstances.

    Args:
        line: as Bash joins it.
        open_parts: the words that close what earlier lines opened; changed in place.
    """
    before, of_function = "", False
    for word in _words(line) or ():
        starts = before in _COMMAND_STARTS_AFTER
        closing = open_parts[-1] if open_parts else ""
        if word == "(" or (word in _CLOSED_BY and (starts or before in _CONDITIONAL_AFTER)):
            open_parts.append(_CLOSED_BY[word])
        elif word == "{" and (starts or before in _CONDITIONAL_AFTER or of_function):
            open_parts.append(_UNCONDITIONAL if starts else "}")
        elif word == closing or (word == "}" and closing == _UNCONDITIONAL):
            open_parts.pop()
        elif starts and word == "exit" and all(part == _UNCONDITIONAL for part in open_parts):
            return True
        of_function = before == "function"
        before = word
    return False


def _words(line: str) -> list[str] | None:
    """Words and operators of a line; None where a quote is left open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return None
    return [part for word in words for part in (_OPERATORS.findall(word) if set(word) <= _PUNCTUATION else [word])]


_OPERATORS = re.compile(r"&&|\|\||.")
_PUNCTUATION = frozenset("();<>|&")


def _option_faults(
    found: list[tuple[str, str | bool]], planned: Directives, forbid: Collection[str]
) -> Iterator[Fault]:
    names = Counter(name for name, _ in found)
    for name, count in names.items():
        if count > 1:
            yield Fault(f"--{name} is given {count} times, and Slurm uses the last", _key(name))
        elif name in forbid:
            yield Fault(f"--{name} is forbidden at this site", "remove it from the block directives, or from forbid")
    for family, what in ((GPU_DIRECTIVES, "GPUs are"), (MEMORY_DIRECTIVES, "memory is")):
        ways = sorted(name for name in names if name in family)
        if len(ways) > 1:
            yield Fault(f"{what} requested in {len(ways)} ways: --{' and --'.join(ways)}", _key(ways[0]))
    for name, value in dict(found).items():
        if name in OWNED_DIRECTIVES and planned.get(name) != value:
            option = f"--{name}" if value is True else f"--{name}={value}"
            yield Fault(f"{option} differs from the plan", _key(name))
    needed = INDISPENSABLE | GPU_DIRECTIVES | MEMORY_DIRECTIVES | {"partition", "qos"}
    for name in (name for name in planned if name in needed and name not in names):
        yield Fault(f"--{name} is missing", "write {{ super() }} in the block directives")


def _key(name: str) -> str:
    key = OWNED_DIRECTIVES.get(name)
    return f"use {key}" if key else f"remove --{name} from the block directives"


def options_in(text: str) -> Iterator[tuple[str, str | bool]]:
    """Options of one ``#SBATCH`` line by their long names, split as sbatch does."""
    words = shlex.split(text, comments=True)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and len(word) > 1 and word[1] in SHORT_OPTIONS:
            name, value = SHORT_OPTIONS[word[1]], word[2:].removeprefix("=")
            equals = "=" if value else ""
        else:
            raise ValueError(f"{word} is not an option of sbatch")
        if not equals and words and not words[0].startswith("-"):
            equals, value = "=", words.pop(0)
        yield name, value if equals else True
