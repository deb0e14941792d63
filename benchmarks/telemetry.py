"""What sampling GPUs once a second costs a training, from the runs themselves.

    python -m benchmarks.telemetry RUNS [RUNS ...] [--below-ms 50] [--json]

Every run on GPUs notes when NVML was asked and how long each step took. Steps around each of those moments are compared
with the steps shortly before and after, and so are steps half a second later, when nothing was asked: the difference is
what a sample cost. Nothing is trained here, so any results folder (``runs``) will do, and run ids lead back to what was
measured. Only steps below ``--below-ms`` count: in longer ones the GPU is the limit and hides what the host does.

The mean comes with a bootstrap 95 % interval over samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bootstrap import interval
from workloads.measurement.telemetry import SAMPLE_EVERY_S

TARGET_PCT = 1.0
AROUND_STEPS = 2
"""Before the one in which a sample was taken, and after it: one that the host is late for may be the next."""
NEIGHBOUR_STEPS = 12
"""On either side of those, whose median is what a step takes just then."""


def cost_s(starts_s: list[float], times_s: list[float], moment_s: float) -> float | None:
    """How much longer the steps around a moment took than their neighbours did; None too near an end of an epoch."""
    at = bisect_right(starts_s, moment_s) - 1
    first, last = at - AROUND_STEPS, at + AROUND_STEPS + 1
    if first < NEIGHBOUR_STEPS or last + NEIGHBOUR_STEPS > len(times_s) or moment_s > starts_s[at] + times_s[at]:
        return None
    neighbours = times_s[first - NEIGHBOUR_STEPS : first] + times_s[last : last + NEIGHBOUR_STEPS]
    return sum(times_s[first:last]) - (last - first) * statistics.median(neighbours)


def costs_s(events: list[dict[str, object]], below_s: float) -> Iterator[float]:
    """Seconds that each sample of an attempt cost its training."""
    asked = [
        moment
        for event in events
        if event["event"] == "telemetry"
        for moment, phase in zip(event["at"], event["phase"], strict=True)  # type: ignore[call-overload]
        if phase == "train"
    ]
    steps = [event for event in events if event["event"] == "steps"]
    for _, windows in itertools.groupby(steps, key=lambda event: event["epoch"]):
        window = list(windows)
        times_s: list[float] = [t for event in window for t in event["step_time_s"]]  # type: ignore[attr-defined]
        if statistics.median(times_s) >= below_s:
            continue
        # The last window is written when an epoch's last step is over; the others a window late.
        ended_s = float(window[-1]["time"])  # type: ignore[arg-type]
        starts_s = [ended_s - left for left in itertools.accumulate(reversed(times_s))][::-1]
        for moment in asked:
            with_sample = cost_s(starts_s, times_s, moment)
            without = cost_s(starts_s, times_s, moment + SAMPLE_EVERY_S / 2)
            if with_sample is not None and without is not None:
                yield with_sample - without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS")
    parser.add_argument("--below-ms", type=float, default=50.0, help="of an epoch's median step")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    for log in sorted(path for folder in arguments.runs for path in folder.glob("*/*/attempts/*/events.jsonl")):
        events = [json.loads(line) for line in log.read_text().splitlines()]
        costs = list(costs_s(events, arguments.below_ms / 1e3))
        if costs:
            found.setdefault(log.parents[2].name, []).extend(costs)
    every = [cost for costs in found.values() for cost in costs]
    if not every:
        parser.error("no run here has samples amid short steps; train small images on a GPU for some seconds")
    low, high = (100 * bound / SAMPLE_EVERY_S for bound in interval(every, statistics.fmean))
    mean = 100 * statistics.fmean(every) / SAMPLE_EVERY_S
    if arguments.json:
        print(json.dumps({"overhead_pct": mean, "overhead_pct_95": [low, high], "cost_s": found}, indent=2))
        return
    verdict = "met" if high <= TARGET_PCT else "MISSED"
    print(
        f"{len(every)} samples in {len(found)} runs: a sample a second costs {mean:.2f} % ({low:.2f} to {high:.2f} %)"
    )
    print(f"target: {TARGET_PCT:g} %, {verdict}; runs: {', '.join(found)}")


if __name__ == "__main__":
    main()
