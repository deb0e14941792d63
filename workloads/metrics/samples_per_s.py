"""Throughput over all ranks; the slowest rank counts."""

from __future__ import annotations

from workloads.metrics import Measurements, Metric


def measure(found: Measurements) -> float | None:
    tally = found.tally
    return tally.samples / found.maximum(tally.steady_time_s) if tally.times_s else None


DECLARATION = Metric(
    name="samples_per_s", type=float, meaning="over the steady-state steps", measure=measure, after="step_time_s"
)
