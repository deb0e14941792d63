"""Overhead of sampling GPU telemetry once per second, computed from recorded runs.

    python -m benchmarks.telemetry_overhead RUNS [RUNS ...] [--below-ms 50] [--json]

Every run on GPUs records when it queried NVML and how long each step took. The benchmark compares the steps around each
query with their neighbours, and does the same half a second later, when there is no query: the difference is the cost
of one sample. It trains nothing; give it any ``runs`` folder. Only steps below ``--below-ms`` count: in longer steps
the GPU is the bottleneck and hides work of the host.

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
"""Steps counted before and after the one with the sample: a late host can also delay the next step."""
NEIGHBOUR_STEPS = 12
"""Steps on either side of those; their median is the reference."""


def cost_s(starts_s: list[float], times_s: list[float], moment_s: float) -> float | None:
    """Return the extra time of the steps around a moment over their neighbours'; None near an end of an epoch."""
    at = bisect_right(starts_s, moment_s) - 1
    first, last = at - AROUND_STEPS, at + AROUND_STEPS + 1
    if first < NEIGHBOUR_STEPS or last + NEIGHBOUR_STEPS > len(times_s) or moment_s > starts_s[at] + times_s[at]:
        return None
    neighbours = times_s[first - NEIGHBOUR_STEPS : first] + times_s[last : last + NEIGHBOUR_STEPS]
    return sum(times_s[first:last]) - (last - first) * statistics.median(neighbours)


def costs_s(events: list[dict[str, object]], below_s: float) -> Iterator[float]:
    """Yield the cost of each sample of an attempt, in seconds."""
    sampled_at = [
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
        # Only an epoch's last window is written directly after its last step; the others are written one window later.
        ended_s = float(window[-1]["time"])  # type: ignore[arg-type]
        starts_s = [ended_s - left for left in itertools.accumulate(reversed(times_s))][::-1]
        for moment in sampled_at:
            with_sample = cost_s(starts_s, times_s, moment)
            without = cost_s(starts_s, times_s, moment + SAMPLE_EVERY_S / 2)
            if with_sample is not None and without is not None:
                yield with_sample - without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS")
    parser.add_argument("--below-ms", type=float, default=50.0, help="maximum median step time of an epoch that counts")
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
        parser.error("no run has samples during short steps; train small images on a GPU for some seconds")
    low, high = (100 * bound / SAMPLE_EVERY_S for bound in interval(every, statistics.fmean))
    mean = 100 * statistics.fmean(every) / SAMPLE_EVERY_S
    if arguments.json:
        print(json.dumps({"overhead_pct": mean, "overhead_pct_95": [low, high], "cost_s": found}, indent=2))
        return
    outcome = "met" if high <= TARGET_PCT else "MISSED"
    print(
        f"{len(every)} samples in {len(found)} runs: one sample per second costs {mean:.2f} % "
        f"({low:.2f} to {high:.2f} %)"
    )
    print(f"target: {TARGET_PCT:g} %, {outcome}; runs: {', '.join(found)}")


if __name__ == "__main__":
    main()
