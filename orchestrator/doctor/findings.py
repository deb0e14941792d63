"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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

    subject: str
    level: Level
    what: str
    fix: str = ""


def ok(subject: str, what: str) -> Finding:
    return Finding(subject, Level.OK, what)


def note(subject: str, what: str, fix: str = "") -> Finding:
    return Finding(subject, Level.NOTE, what, fix)


def fail(subject: str, what: str, fix: str = "") -> Finding:
    return Finding(subject, Level.FAIL, what, fix)
