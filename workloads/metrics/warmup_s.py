"""Time of the steps that are no steady ones."""

from __future__ import annotations

from workloads.metrics import Metric

DECLARATION = Metric(
    name="warmup_s",
    type=float,
    meaning="the first steps, and the first step of each new batch size, which are not counted as steady-state",
    measure=lambda m: m.maximum(m.tally.warmup_time_s) if m.tally.times_s else None,
    after="startup_s",
)
