"""Times and losses of steps, measured without slowing the steps down.

On a GPU a step ends with an event in the CUDA stream. The host waits once per window, for the window *before*: that one
has finished by then, so the stream always has work. On a CPU the host's clock suffices.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import torch
    from torch import Tensor

Mark: TypeAlias = "float | torch.cuda.Event"

WINDOW_STEPS = 50
"""Steps whose times and losses are read together."""
WARMUP_STEPS = 10
"""Upper limit of warm-up steps; at most a tenth of all steps."""


def warmup_steps(steps: int) -> int:
    """Return how many of an attempt's steps are warm-up."""
    return min(WARMUP_STEPS, max(1, steps // 10)) if steps > 1 else 0


class Clock:
    """Marks in a device's stream, and the time between them; ``others`` are further devices of this process."""

    def __init__(self, device: torch.device, *others: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._devices = (device, *others)

    def mark(self) -> Mark:
        """Mark the end of the work queued so far."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> float:
        """Wait for all work of all devices; return the host's clock in seconds."""
        if self._on_gpu:
            for device in self._devices:
                torch.cuda.synchronize(device)
        return time.perf_counter()

    @staticmethod
    def between_s(marks: Sequence[Mark]) -> list[float]:
        """Return the seconds from each mark to the next; the device must have reached all of them."""
        pairs: Iterable[Any] = itertools.pairwise(marks)  # of one kind
        return [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in pairs]


@dataclass(slots=True)
class Window:
    """Consecutive steps whose times and losses may still be on the device."""

    first_step: int
    marks: list[Mark]
    """One before the first step and one after each step."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of each step's summed loss."""
    samples: list[int] = field(default_factory=list)
    """Samples of each step, over all ranks."""
    summed: Tensor | None = None
    """Losses summed over all ranks, being copied to the host."""
    copied: Mark | None = None
    """End of that copy."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times and losses of consecutive steps of one epoch."""

    first_step: int
    times_s: list[float]
    loss_sums: list[float]
    """Summed over the global batch."""
    samples: list[int]

    @property
    def losses(self) -> list[float]:
        """Mean over the global batch, of each step."""
        return [total / n for total, n in zip(self.loss_sums, self.samples, strict=True)]


class Recorder:
    """Records times and losses of every step, window by window.

    Args:
        add: sums a tensor over ranks, in place.
        deliver: called with each window in order, one window late.
    """

    def __init__(self, clock: Clock, add: Callable[[Tensor], Tensor], deliver: Callable[[StepTimes], None]) -> None:
        self._clock = clock
        self._add = add
        self._deliver = deliver
        self._open: Window | None = None
        self._waiting: Window | None = None

    def start_epoch(self, step: int) -> None:
        """Start before the step with number ``step``."""
        self._open = Window(step, [self._clock.mark()])

    def record(self, loss: Tensor, samples: int) -> None:
        """Record a queued step; waits only at the end of a window."""
        window = self._open
        assert window is not None, "call start_epoch first"
        window.losses.append(loss)
        window.samples.append(samples)
        window.marks.append(self._clock.mark())
        if len(window.losses) == WINDOW_STEPS:
            self._close(window)
            self._open = Window(window.first_step + WINDOW_STEPS, [window.marks[-1]])

    def finish_epoch(self) -> None:
        """Wait for all steps and deliver them."""
        if self._open is not None and self._open.losses:
            self._close(self._open)
        self._open = None
        self._deliver_waiting()

    def _close(self, window: Window) -> None:
        summed = self._add(torch.stack(window.losses).double())
        window.losses.clear()
        window.summed = summed.to("cpu", non_blocking=True)
        window.copied = self._clock.mark()
        self._deliver_waiting()
        self._waiting = window

    def _deliver_waiting(self) -> None:
        window, self._waiting = self._waiting, None
        if window is None:
            return
        assert window.summed is not None and window.copied is not None
        if not isinstance(window.copied, float):
            window.copied.synchronize()
        times_s = self._clock.between_s(window.marks)
        self._deliver(StepTimes(window.first_step, times_s, window.summed.tolist(), window.samples))


class Tally:
    """Sums over the steps of an attempt, with warm-up steps apart.

    Warm-up are the first steps, and later the first step of each new batch size, such as the smaller last batch of an
    epoch: libraries such as cuDNN choose and load kernels for each new shape.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._sizes_seen: set[int] = set()
        self.diverged = False
        """A loss was NaN or infinite."""
        self.warmup_time_s = 0.0
        self.times_s: list[float] = []
        """Of the steady steps."""
        self.samples = 0
        """Of the steady steps."""
        self.epoch_loss_sum = 0.0
        self.epoch_samples = 0

    def start_epoch(self) -> None:
        self.epoch_loss_sum, self.epoch_samples = 0.0, 0

    def take(self, steps: StepTimes) -> None:
        """Add a window."""
        self.diverged = self.diverged or not all(map(math.isfinite, steps.loss_sums))
        self.epoch_loss_sum += math.fsum(steps.loss_sums) if not self.diverged else sum(steps.loss_sums)
        self.epoch_samples += sum(steps.samples)
        for time_s, samples in zip(steps.times_s, steps.samples, strict=True):
            if self._warmup > 0 or samples not in self._sizes_seen:
                self._warmup -= 1
                self._sizes_seen.add(samples)
                self.warmup_time_s += time_s
            else:
                self.times_s.append(time_s)
                self.samples += samples

    @property
    def steady_time_s(self) -> float:
        return math.fsum(self.times_s)

    @property
    def median_step_s(self) -> float:
        """Median time of a steady step; 0 without any."""
        return statistics.median(self.times_s) if self.times_s else 0.0


def process_age_s() -> float:
    """Return the seconds since this process started, including the start of the interpreter."""
    try:
        # Field 2, the name in parentheses, may hold blanks and parentheses; field 22 is starttime (proc_pid_stat(5)).
        values = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(values[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
