"""Median time of a step."""

from __future__ import annotations

from workloads.metrics import Metric

DECLARATION = Metric(
    name="step_time_s",
    type=float,
    meaning="median of the steady-state steps",
    measure=lambda m: m.maximum(m.tally.median_step_s) if m.tally.times_s else None,
    after="evaluate_s",
)
