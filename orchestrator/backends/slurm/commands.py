"""Run Slurm's client commands: with a time limit, and without variables that would change what they do."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.backends import processes
from orchestrator.errors import CommandError

QUERY_TIMEOUT_S = 60.0
SBATCH_TIMEOUT_S = 180.0
"""Longer than a client retries a busy controller by itself."""

_OPTION_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SCANCEL)_.*")
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and how it ended."""

    argv: tuple[str, ...]
    exit_code: int | None
    """None if it did not end in time or was not found."""
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Both outputs, standard error first."""
        return "\n".join(part.strip() for part in (self.stderr, self.stdout) if part.strip())

    def error(self, *, hint: str = "") -> CommandError:
        return CommandError(self.argv, self.exit_code, self.stdout, self.stderr, hint=hint)


def option_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that clients read as options, such as those of a job around ``submit``."""
    return sorted(name for name in environ if _OPTION_VARIABLE.fullmatch(name) and name not in _KEPT)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a client command: it keeps the choice of the cluster, but no other option."""
    dropped = set(option_variables(environ))
    # squeue(1): by default squeue cuts the task list of an array to 64 bytes and ends it with "...".
    return {k: v for k, v in environ.items() if k not in dropped} | {"SLURM_BITSTR_LEN": "0"}


def run(*argv: str, timeout_s: float = QUERY_TIMEOUT_S) -> Answer:
    """Run a client command; the kernel kills it if this process ends first."""
    try:
        done = subprocess.run(
            argv,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            preexec_fn=partial(processes.die_with_parent, os.getpid()),
        )
    except FileNotFoundError:
        return Answer(argv, None, "", f"there is no {argv[0]} on PATH")
    except subprocess.TimeoutExpired:
        return Answer(argv, None, "", f"{argv[0]} did not end within {timeout_s:.0f} s")
    return Answer(argv, done.returncode, done.stdout, done.stderr)


def batches(items: Sequence[str], size: int) -> list[Sequence[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
