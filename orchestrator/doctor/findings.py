"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    NOTE = "note"
    """Usable, but worth knowing."""
    FAIL = "fail"
    """Must be fixed before runs can succeed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one subject, and how to fix it."""

    level: Level
    subject: str
    what: str
    fix: str = ""


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
fail = partial(Finding, Level.FAIL)
