"""What ``doctor`` says: one line for each thing it looked at, with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a finding stands."""

    OK = "ok"
    NOTE = "note"
    """Usable, but worth knowing."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

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
