"""What is wrong with a job script, told without Slurm. Every script is checked when it is rendered."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.cluster.sbatch_options import INDISPENSABLE, OWNED_DIRECTIVES, SHORT_OPTIONS

GPU_DIRECTIVES = frozenset({"gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"})
MEMORY_DIRECTIVES = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that Slurm would refuse, or pass over in silence."""

    what: str
    hint: str = ""


Options = Mapping[str, str | bool]
"""Long option name to value; True for an option without one."""


def script_faults(text: str, wanted: Options, forbid: Collection[str] = ()) -> Iterator[Fault]:
    """Compare the ``#SBATCH`` lines of a script with what was decided for its run.

    Args:
        text: the script.
        wanted: the options that the run was given.
        forbid: options that the site rejects.
    """
    if not text.startswith("#!"):
        yield Fault("the script does not start with #!", "nothing may stand before it")
        return
    found: list[tuple[str, str | bool]] = []
    started = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("#SBATCH"):
            if started or not line.startswith("#SBATCH"):
                yield Fault(
                    f"line {number} of the script would be ignored by Slurm: {line.strip()}",
                    "#SBATCH lines stand in column 0 and before the first command, in the block directives",
                )
            try:
                found += options_in(line.removeprefix("#SBATCH"))
            except ValueError as error:
                yield Fault(f"line {number} of the script cannot be read ({error}): {line}")
        started = started or bool(line.strip() and not line.lstrip().startswith("#"))
    yield from _against(found, wanted, forbid)


def launch_faults(text: str) -> Iterator[Fault]:
    """Whether a script comes to starting a rank; told by its words, as Bash would read them.

    What stands under a condition is left to the job: a script may well end where something is missing.
    """
    commands = list(_commands(text.split("\n")))
    first = next((i for i, (_, line) in enumerate(commands) if _starts_a_rank(line)), None)
    if first is None:
        what = "the script starts no rank: nothing runs the command that rank holds"
        yield Fault(what, 'write srun {{ srun }} "${rank[@]}", or {{ super() }}, in the block launch')
        return
    open_parts: list[str] = []
    for number, line in commands[:first]:
        if _ends(line, open_parts):
            yield Fault(
                f"line {number} of the script ends it before any rank is started: {line.strip().splitlines()[0]}",
                "take it out of the prologue, or of your template; to end a job, let a line of the prologue fail",
            )
            return


_RANK = re.compile(r"\brank\[[@*]\]|submitit\.core\._submit")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?\s*[\\\"']?([A-Za-z_]\w*)")


def _starts_a_rank(line: str) -> bool:
    return not line.lstrip().startswith("rank=(") and _RANK.search(line) is not None


def _commands(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Lines as Bash joins them, with the number of the first; neither comments nor texts that are fed to a command."""
    at = 0
    while at < len(lines):
        line, after = lines[at], at + 1
        comment = line.lstrip().startswith("#")
        while not comment and after < len(lines) and (line.endswith("\\") or _words(line) is None):
            line = (line.removesuffix("\\") if line.endswith("\\") else line + "\n") + lines[after]
            after += 1
        if not comment and _words(line) is None:  # a quote that nothing closes: not read as Bash does
            line, after = lines[at], at + 1
        if not comment:
            yield at + 1, line
            for word in _HEREDOC.findall(line):
                end = next((i for i in range(after, len(lines)) if lines[i].lstrip("\t") == word), after - 1)
                after = end + 1
        at = after


_CLOSED_BY = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done", "(": ")"}
_AS_IT_STANDS = "} of a group"
_STARTS = frozenset({"", ";", "{", "then", "else", "do", "!"})
_PERHAPS = frozenset({"&&", "||", "|", ")"})


def _ends(line: str, open_parts: list[str]) -> bool:
    """Whether a line ends the script whatever happens.

    Args:
        line: it.
        open_parts: the words that close what earlier lines have opened; changed in place.
    """
    before, of_function = "", False
    for word in _words(line) or ():
        starts = before in _STARTS
        closing = open_parts[-1] if open_parts else ""
        if word == "(" or (word in _CLOSED_BY and (starts or before in _PERHAPS)):
            open_parts.append(_CLOSED_BY[word])
        elif word == "{" and (starts or before in _PERHAPS or of_function):
            open_parts.append(_AS_IT_STANDS if starts else "}")
        elif word == closing or (word == "}" and closing == _AS_IT_STANDS):
            open_parts.pop()
        elif starts and word == "exit" and all(part == _AS_IT_STANDS for part in open_parts):
            return True
        of_function = before == "function"
        before = word
    return False


def _words(line: str) -> list[str] | None:
    """The words and operators of a line; None where a quote is left open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return None
    return [part for word in words for part in (_OPERATORS.findall(word) if set(word) <= _PUNCTUATION else [word])]


_OPERATORS = re.compile(r"&&|\|\||.")
_PUNCTUATION = frozenset("();<>|&")


def _against(found: list[tuple[str, str | bool]], wanted: Options, forbid: Collection[str]) -> Iterator[Fault]:
    names = Counter(name for name, _ in found)
    for name, count in names.items():
        if count > 1:
            yield Fault(f"--{name} is said {count} times, and Slurm takes the last", _key(name))
        elif name in forbid:
            yield Fault(f"--{name} is forbidden at this site", "take it out of the block directives, or of forbid")
    for family, what in ((GPU_DIRECTIVES, "GPUs are"), (MEMORY_DIRECTIVES, "memory is")):
        ways = sorted(name for name in names if name in family)
        if len(ways) > 1:
            yield Fault(f"{what} asked for in {len(ways)} ways: --{' and --'.join(ways)}", _key(ways[0]))
    for name, value in dict(found).items():
        if name in OWNED_DIRECTIVES and wanted.get(name) != value:
            said = f"--{name}" if value is True else f"--{name}={value}"
            yield Fault(f"{said} is not what was planned for this run", _key(name))
    needed = [name for name in wanted if name in INDISPENSABLE | GPU_DIRECTIVES | MEMORY_DIRECTIVES]
    for name in (name for name in needed if name not in names):
        yield Fault(f"--{name} is missing", "write {{ super() }} in the block directives")


def _key(name: str) -> str:
    key = OWNED_DIRECTIVES.get(name)
    return f"say it with {key}" if key else f"remove --{name} from the block directives"


def options_in(text: str) -> Iterator[tuple[str, str | bool]]:
    """The options of one ``#SBATCH`` line, long names, as Slurm splits it."""
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
