"""Asking ``sbatch --test-only``: would Slurm take a script, when would it start, and in which queue first.

Slurm answers for now, not for good: an estimate is worth as much as the time limits of the jobs that are before it. It
also passes over limits that it enforces later (a partition that is down, a time above the partition's), so what the
cluster file says of a queue counts as well.
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
    """What Slurm says of a script that is not sent."""

    start: str = ""
    """Local time of the cluster, ``2026-11-28T02:48:23``; empty when it would not take it."""
    refusal: str = ""
    """Its words."""


def estimate(script: Path, *arguments: str) -> StartEstimate:
    """Ask for a script with further arguments of ``sbatch``; nothing is queued."""
    answer = commands.run("sbatch", "--test-only", *arguments, str(script))
    if answer.ok and (match := _START.search(answer.text)):
        return StartEstimate(start=match[1])
    lines = [_NOISE.sub("", line).strip() for line in answer.text.splitlines()]
    said = "; ".join(dict.fromkeys(filter(None, lines)))
    return StartEstimate(
        rejection=said or f"sbatch --test-only ended with exit code {answer.exit_code} and said nothing"
    )


def arguments(pair: QueuePair) -> list[str]:
    """A pair of partition and QOS as arguments of ``sbatch``, which win over the lines of the script."""
    named = {"partition": pair.partition, "qos": pair.qos}
    return [f"--{name}={value}" for name, value in named.items() if value]


def earliest(
    script: Path, pairs: Sequence[QueuePair], others: Mapping[str, str], *, count: int, time_limit_s: int
) -> tuple[QueuePair, StartEstimate] | None:
    """The pair in which an array would start first; of equal ones the one that stands first in the cluster file.

    Args:
        script: of the array.
        pairs: those that take a run of its shape.
        others: further arguments by name, without dashes.
        count: tasks.
        time_limit_s: of each; pairs that end jobs before are not asked.

    Returns:
        None where Slurm names no start for any of them, so that the script decides.
    """
    if "partition" in others or "qos" in others:
        return None
    given = [f"--{name}={value}" for name, value in others.items()]
    found: list[tuple[QueuePair, StartEstimate]] = []
    for pair in pairs:
        if pair.max_time_s and time_limit_s > pair.max_time_s:
            continue
        said = estimate(script, f"--array=0-{count - 1}", *given, *arguments(pair))
        if said.start:
            found.append((pair, said))
        else:
            log.warning("queue %s is left out: %s", pair, said.rejection)
    return min(found, key=lambda one: one[1].start, default=None)
