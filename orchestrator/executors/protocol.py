"""The seam between submitter, tracker and the ways of carrying out runs: local mode is one, a scheduler another.

Deliveries happen at least once (a killed ``submit`` is made up for by the next command), starts at most once: an
executor sees to the latter by the attempt's token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workloads.contract import RunSpec, State
from workloads.rundir import AttemptDir


@dataclass(frozen=True, slots=True)
class Delivery:
    """One attempt that may be sent: its intent is recorded in the store."""

    token: str
    attempt: AttemptDir
    spec: RunSpec


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the witnesses say of one attempt."""

    state: State
    reason: str = ""
    """A word for tables and filters."""
    message: str = ""
    """A sentence for people."""


class Executor(Protocol):
    """One way of carrying out attempts."""

    def send(self, deliveries: Sequence[Delivery]) -> None:
        """Hand attempts over, in order. One that was handed over before does no harm."""

    def look(self, attempts: Iterable[tuple[AttemptDir, str, State]]) -> list[Verdict]:
        """What is known now of each attempt, given as directory, token and the state that the store has."""

    def cancel(self, attempts: Sequence[tuple[AttemptDir, str]]) -> None:
        """Ask for an end of attempts, given as directory and token; one that has ended stays as it is."""

    def wake(self) -> None:
        """See to it that what was sent goes on."""
