"""Run Slurm's client commands: with a time limit, and without variables that would change what they do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from orchestrator.backends.processes import Answer, run_command

T = TypeVar("T")

QUERY_TIMEOUT_S = 60.0
SBATCH_TIMEOUT_S = 180.0
"""Longer than a client retries a busy controller by itself."""

_OPTION_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SCANCEL)_.*")
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER"}


def option_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that clients read as options, such as those of a job around ``submit``."""
    return sorted(name for name in environ if _OPTION_VARIABLE.fullmatch(name) and name not in _KEPT)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a client command: it keeps the choice of the cluster, but no other option."""
    dropped = set(option_variables(environ))
    # squeue(1): by default squeue cuts the task list of an array to 64 bytes and ends it with "...".
    return {k: v for k, v in environ.items() if k not in dropped} | {"SLURM_BITSTR_LEN": "0"}


def run(*argv: str, timeout_s: float = QUERY_TIMEOUT_S) -> Answer:
    return run_command(*argv, timeout_s=timeout_s, environ=environment())


def batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
