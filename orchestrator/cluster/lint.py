"""What is wrong with a job script, told without Slurm. Every script is checked when it is rendered."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.cluster.sbatch import INDISPENSABLE, OWNED_DIRECTIVES, SHORT_OPTIONS

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
