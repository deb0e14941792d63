"""Whether the input pipeline holds training up."""

from __future__ import annotations

from workloads.metrics import Measurements, Metric

STEPS = 20
"""At most so many steps on a resident batch, compared with at least so many steady ones ..."""
TIME_S = 5.0
"""... that fit into this ..."""
SHARE = 0.1
"""... and into this share of the training time; three at least."""


def measure(found: Measurements) -> float | None:
    """Time per sample with the real input over time per sample with one resident batch; None after too few steps."""
    tally, backend = found.tally, found.backend
    if len(tally.times_s) < STEPS:
        return None
    batch = next(iter(backend.batches(0)), None)
    if batch is None:
        return None
    step_s = found.maximum(tally.steady_time_s / len(tally.times_s))
    budget_s = min(TIME_S, SHARE * sum(found.epoch_times_s))
    steps = max(3, min(STEPS, int(budget_s / step_s)))
    backend.train_step(batch)
    started_s = backend.settle()
    for _ in range(steps):
        backend.train_step(batch)
        found.beat()
    resident_s, steady_s = backend.maximum([backend.settle() - started_s, tally.steady_time_s])
    return float((steady_s / tally.samples) / (resident_s / (steps * batch.num_global)))


DECLARATION = Metric(
    name="starvation_ratio",
    type=float,
    meaning=(
        "time per sample with the real input, divided by time per sample with one batch that stays on the device. "
        "About 1: the input pipeline is fast enough; above 1.02: it slows training down; 2: half of the time is "
        "spent waiting for input. Unreliable on a machine that is also busy with other work, above all on CPU. Empty "
        "after too few steps"
    ),
    measure=measure,
    after="samples_per_s",
    changes_model=True,
)
