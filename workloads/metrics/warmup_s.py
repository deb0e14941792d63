"""Time of the steps that are no steady ones."""

from __future__ import annotations

from workloads.metrics import Measurements, Metric


def measure(found: Measurements) -> float | None:
    return found.maximum(found.tally.warmup_time_s) if found.tally.times_s else None


DECLARATION = Metric(
    name="warmup_s",
    type=float,
    meaning=("the first steps, and the first step of each new batch size, which are not counted as steady-state"),
    measure=measure,
    after="startup_s",
)
