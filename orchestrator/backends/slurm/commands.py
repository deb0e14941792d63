"""Running Slurm's client commands: bounded in time, and free of what an outer job or a habit would slip in."""

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
"""Longer than a client tries by itself to reach a controller that is busy."""

_LEAKING = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SCANCEL)_.*")
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER"}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended."""

    argv: tuple[str, ...]
    exit_code: int | None
    """None: it did not end in time, or was not found."""
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """All that it said."""
        return "\n".join(part.strip() for part in (self.stderr, self.stdout) if part.strip())

    def error(self, *, hint: str = "") -> CommandError:
        return CommandError(self.argv, self.exit_code, self.stdout, self.stderr, hint=hint)


def leaking(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that would change what is sent, such as those of a job that ``submit`` is run in."""
    return sorted(name for name in environ if _LEAKING.fullmatch(name) and name not in _KEPT)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a client command: which cluster it talks to stays, what it asks for does not."""
    dropped = set(leaking(environ))
    # Else the clients shorten long lists of array tasks to "...".
    return {k: v for k, v in environ.items() if k not in dropped} | {"SLURM_BITSTR_LEN": "0"}


def run(*argv: str, timeout_s: float = QUERY_TIMEOUT_S) -> Answer:
    """Run a client command; it ends with us, however we end."""
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
            preexec_fn=partial(processes.die_with, os.getpid()),
        )
    except FileNotFoundError:
        return Answer(argv, None, "", f"there is no {argv[0]} on PATH")
    except subprocess.TimeoutExpired:
        return Answer(argv, None, "", f"{argv[0]} did not end within {timeout_s:.0f} s")
    return Answer(argv, done.returncode, done.stdout, done.stderr)


def batches(items: Sequence[str], size: int) -> list[Sequence[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
