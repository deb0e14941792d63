"""``sbatch --test-only``: would Slurm accept a script, when would it start, and in which queue first.

The answer holds for this moment: the start depends on the time limits of the jobs ahead. ``--test-only`` also ignores
limits that Slurm enforces later (a partition that is down, a time limit above the partition's), so the limits of the
cluster file count as well.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.slurm import commands
from orchestrator.backends.slurm.records import QueuePair

log = logging.getLogger(__name__)

_START = re.compile(r"\bto start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b")
_NOISE = re.compile(r"^(sbatch: )?(error: |allocation failure: )+")


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """Slurm's answer about a script that is not submitted."""

    start: str = ""
    """Local time of the cluster, ``2026-11-28T02:48:23``; empty if Slurm would reject it."""
    rejection: str = ""
    """Why Slurm would reject it."""


def estimate(script: Path, *arguments: str) -> StartEstimate:
    """Test a script with further arguments of ``sbatch``; nothing is submitted."""
    answer = commands.run("sbatch", "--test-only", *arguments, str(script))
    if answer.ok and (match := _START.search(answer.text)):
        return StartEstimate(start=match[1])
    lines = [_NOISE.sub("", line).strip() for line in answer.text.splitlines()]
    why = "; ".join(dict.fromkeys(filter(None, lines)))
    return StartEstimate(rejection=why or f"sbatch --test-only ended with exit code {answer.exit_code} and no message")


def queue_options(pair: QueuePair) -> list[str]:
    """Return a pair of partition and QOS as options of ``sbatch``, which override the lines of the script."""
    return [f"--{name}={value}" for name, value in (("partition", pair.partition), ("qos", pair.qos)) if value]


def earliest(
    script: Path, pairs: Sequence[QueuePair], options: Mapping[str, str], *, count: int, time_limit_s: int
) -> tuple[QueuePair, StartEstimate] | None:
    """Return the pair in which an array would start first; of equal ones the first in the cluster file.

    ``options`` of ``sbatch`` are by name, without dashes; pairs with a limit below ``time_limit_s`` are not tried. None
    if Slurm names no start for any pair; then the script decides.
    """
    if "partition" in options or "qos" in options:
        return None
    given = [f"--{name}={value}" for name, value in options.items()]
    found: list[tuple[QueuePair, StartEstimate]] = []
    for pair in pairs:
        if pair.max_time_s and time_limit_s > pair.max_time_s:
            continue
        answer = estimate(script, f"--array=0-{count - 1}", *given, *queue_options(pair))
        if answer.start:
            found.append((pair, answer))
        else:
            log.warning("queue %s is not considered: %s", pair, answer.rejection)
    return min(found, key=lambda one: one[1].start, default=None)
