"""Times of steps and memory of a rank, at a cost that does not show in what is measured. Engines only.

On a GPU a step ends with an event in the device's queue. The host waits once a window, and then for the one *before*:
that one is over by then, so the queue never runs dry. On a CPU the clock is read.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Mark = float | torch.cuda.Event

WINDOW_STEPS = 50
"""Steps between two looks at times and losses."""

WARMUP_STEPS = 10
"""At most so many first steps are kept apart, and at most a tenth of all."""


def warmup_steps(steps: int) -> int:
    """How many of an attempt's steps are warm-up."""
    return min(WARMUP_STEPS, max(1, steps // 10)) if steps > 1 else 0


class Clock:
    """Marks in a device's stream of work, and the time between them.

    Args:
        device: the one whose work is marked.
        others: of the same kind, which work for the same process.
    """

    def __init__(self, device: torch.device, *others: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._devices = (device, *others)

    def mark(self) -> Mark:
        """The moment when all that was queued so far is done."""
        if not self._on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        """Until the moment has come."""
        if not isinstance(mark, float):
            mark.synchronize()

    def settle(self) -> float:
        """Wait for all devices to finish everything; the host's clock then, in seconds."""
        if self._on_gpu:
            import torch

            for device in self._devices:
                torch.cuda.synchronize(device)
        return time.perf_counter()

    @staticmethod
    def between_s(marks: Sequence[Mark]) -> list[float]:
        """Seconds from each mark to the next; all must have come."""
        times = []
        for first, second in itertools.pairwise(marks):
            if isinstance(first, float):
                assert isinstance(second, float)
                times.append(second - first)
            else:
                assert not isinstance(second, float)
                times.append(first.elapsed_time(second) / 1e3)
        return times


@dataclass(slots=True)
class Window:
    """Consecutive steps, whose times and losses are still on the device at first."""

    first_step: int
    marks: list[Mark]
    """One before the first step, then one after each."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of each step's summed loss."""
    samples: list[int] = field(default_factory=list)
    """Of each step, over all ranks."""
    summed: Tensor | None = None
    """Losses over all ranks, on their way to the host."""
    arrived: Mark | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """What is known of consecutive steps of one epoch."""

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
    """Times and losses of every step, window by window.

    Args:
        add: sums a tensor over ranks, in place.
        deliver: called with each window, in order, a window late.
    """

    def __init__(self, clock: Clock, add: Callable[[Tensor], Tensor], deliver: Callable[[Steps], None]) -> None:
        self._clock = clock
        self._add = add
        self._deliver = deliver
        self._open: Window | None = None
        self._waiting: Window | None = None

    def start_epoch(self, step: int) -> None:
        """The next step is ``step``."""
        self._open = Window(step, [self._clock.mark()])

    def record(self, loss: Tensor, samples: int) -> None:
        """A step was queued; never waits except at the end of a window."""
        window = self._open
        assert window is not None, "start_epoch comes first"
        window.losses.append(loss)
        window.samples.append(samples)
        window.marks.append(self._clock.mark())
        if len(window.losses) == WINDOW_STEPS:
            self._seal(window)
            self._open = Window(window.first_step + WINDOW_STEPS, [window.marks[-1]])

    def finish_epoch(self) -> None:
        """Wait for all steps and deliver them."""
        if self._open is not None and self._open.losses:
            self._seal(self._open)
        self._open = None
        self._hand_over()

    def _seal(self, window: Window) -> None:
        import torch

        summed = self._add(torch.stack(window.losses).double())
        window.losses.clear()
        window.summed = summed.to("cpu", non_blocking=True)
        window.arrived = self._clock.mark()
        self._hand_over()
        self._waiting = window

    def _hand_over(self) -> None:
        window, self._waiting = self._waiting, None
        if window is None:
            return
        assert window.summed is not None and window.arrived is not None
        self._clock.wait(window.arrived)
        self._deliver(
            Steps(window.first_step, self._clock.between_s(window.marks), window.summed.tolist(), window.samples)
        )


class Tally:
    """Sums up the steps of an attempt; warm-up apart.

    Warm-up are the first steps, and later the first one of a batch size not seen before, as an epoch's odd last batch
    is: libraries choose and load kernels for each new shape.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._sizes_seen: set[int] = set()
        self.diverged = False
        """A loss was NaN or infinite."""
        self.warmup_time_s = 0.0
        self.times_s: list[float] = []
        """Steady steps."""
        self.samples = 0
        """Of the steady steps."""
        self.epoch_loss_sum = 0.0
        self.epoch_samples = 0

    def start_epoch(self) -> None:
        self.epoch_loss_sum, self.epoch_samples = 0.0, 0

    def take(self, steps: Steps) -> None:
        """The next window."""
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
        """0 without steady steps."""
        return statistics.median(self.times_s) if self.times_s else 0.0


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    try:
        # The process name, in parentheses, may hold blanks and parentheses itself.
        values = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(values[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
