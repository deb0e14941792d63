"""Throughput over all ranks; the slowest rank counts."""

from __future__ import annotations

from workloads.metrics import Metric

DECLARATION = Metric(
    name="samples_per_s",
    type=float,
    meaning="over the steady-state steps",
    measure=lambda m: m.tally.samples / m.maximum(m.tally.steady_time_s) if m.tally.times_s else None,
    after="step_time_s",
)
