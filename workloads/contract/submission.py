"""One submission of an attempt: the content of ``submission.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from workloads.contract.flat import flat, from_flat
from workloads.contract.resource_shape import ResourceShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """Why recovery submitted an attempt, and what it changed."""

    failure: str = ""
    """Class of the failure that it recovers from (``tracking.recovery.FailureClass``)."""
    action: str = ""
    """``tracking.recovery.RecoveryAction``."""
    attempt: int = 0
    """The attempt that failed, and ``cause`` its message."""
    number: int = 0
    """Counts the attempts for this class of failure, from 1, of ``bound`` allowed ones."""
    bound: int = 0
    changes: str = ""
    """What the new attempt has that the failed one had not, in words."""
    cause: str = ""

    @property
    def message(self) -> str:
        """One sentence for people."""
        changes = f" with {self.changes}" if self.changes else ""
        return f"resubmitted{changes} after attempt {self.attempt} ({self.number} of {self.bound} for {self.failure})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What ``submission.json`` says of an attempt; its executor adds the job id."""

    token: str
    """Unique; the job carries it, so that an interrupted submission is found again."""
    target: str
    """``local`` or the cluster's name."""
    attempt: int
    submitted_at: str | None = None
    """UTC, ISO 8601."""
    time_limit_s: int = 0
    snapshot: str = ""
    """Name of the code that was submitted, see ``workloads.provenance.code_snapshot``."""
    shape: ResourceShape = field(default_factory=ResourceShape)
    recovery: RecoveryRecord | None = None
    """None where a person submitted it."""

    def to_json(self) -> dict[str, Any]:
        return {**flat(self), "shape": self.shape.to_json(), "recovery": flat(self.recovery) if self.recovery else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; raises ValueError if the token, target or attempt is missing."""
        recovery = data.get("recovery")
        parts = {
            "shape": from_flat(ResourceShape, data.get("shape") or {}),
            "recovery": from_flat(RecoveryRecord, recovery) if recovery else None,
        }
        try:
            return from_flat(cls, {**data, **parts})
        except TypeError as error:
            raise ValueError(f"not a submission: {error}") from error
