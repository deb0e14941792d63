"""What sampling a GPU once a second costs a training: steps with the sampler beside steps without it.

    python benchmarks/telemetry.py [--turns 20] [--seconds 4] [--output telemetry.json]

One process trains ResNet-50 on 128 images of 32 pixels, where the host launches kernels as fast as it can, so that
anything else it does shows at once. Turns with the sampler that every run has (NVML once a second, events to a file)
and turns without it alternate; a ratio is that of two neighbours' mean steps, since an answer of NVML may hold up one
step in fifty, which no median would show. The median over pairs comes with a bootstrap 95 % interval. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch.nn import functional

from workloads.job import Events
from workloads.telemetry import Sampler

BATCH, SIZE = 128, 32
WARMUP_STEPS = 30
TARGET = 1.01


def training(device: torch.device) -> Callable[[], None]:
    """A step of a plain loop."""
    model = torchvision.models.resnet50(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = torch.rand(BATCH, 3, SIZE, SIZE, device=device)
    y = torch.randint(0, 10, (BATCH,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def turn(step: Callable[[], None], seconds: float) -> float:
    """The mean step of so many seconds, in seconds."""
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        step()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[-1]) / 1e3 / (len(marks) - 1)


def interval(values: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the median (Efron, 1979)."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="a turn lasts")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    step = training(device)
    for _ in range(WARMUP_STEPS):
        step()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    samples, ratios, steps_s = 0, [], []
    with tempfile.TemporaryDirectory() as name:
        events = Events(Path(name) / "events.jsonl")
        for number in range(arguments.turns):
            times_s = {}
            # Which of two comes first alternates too, so that a drift favours neither.
            for sampled in (True, False) if number % 2 else (False, True):
                sampler = Sampler([uuid], lambda: "train", events.write)
                with sampler if sampled else contextlib.nullcontext():
                    times_s[sampled] = turn(step, arguments.seconds)
                    samples += sampler.figures().samples if sampled else 0
            ratios.append(times_s[True] / times_s[False])
            steps_s.append(times_s[False])
    assert samples >= arguments.turns, "NVML did not answer: nothing was measured"
    low, high = interval(ratios)
    row = {
        "turns": arguments.turns,
        "seconds": arguments.seconds,
        "samples": samples,
        "step_s": statistics.median(steps_s),
        "ratio": statistics.median(ratios),
        "ratio_95": [low, high],
        "ratios": ratios,
        "met": high <= TARGET,
    }
    print(
        f"{samples} samples in {arguments.turns} turns of {arguments.seconds:g} s: time with sampler / without "
        f"{row['ratio']:.4f} ({low:.4f} to {high:.4f}); target {TARGET:g} {'met' if row['met'] else 'MISSED'}"
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
