"""Cut a model into consecutive parts, one for each device or pipeline stage, of about equal cost."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from workloads.contract import Hardware
from workloads.errors import InputError
from workloads.lazy import lazy_imports
from workloads.registry import Option, Options
from workloads.strategies.shared.compiled_steps import CAPTURED, capture_work, side_stream
from workloads.strategies.shared.keras_protocol import KerasTask
from workloads.strategies.shared.protocol import Task

with lazy_imports(__name__):
    import torch
    from torch import Tensor, nn

REPEATS = 3
"""Measurements of a layer, of which the shortest counts: disturbances only ever make it longer."""

CHUNKS = Option("chunks", 4, "Micro-batches a batch", minimum=1)

TWO_PARTS = 2


def balance_option(summary: str) -> Option:
    """Return the option ``balance``: how many layers, or segments, each part has."""
    return Option("balance", (), summary, minimum=1)


def balance_by_option(default: str) -> Option:
    """Return the option ``balance_by``, of which the default is named first."""
    other = {"time": "size", "size": "time"}[default]
    words = {"time": "measured time", "size": "number of parameters"}
    summary = f"Layers are shared out by {words[default]} or by {words[other]}"
    return Option("balance_by", default, summary, choices=(default, other))


def decide_balance(task: Task, layers: Sequence[nn.Module], parts: int, samples: int) -> tuple[int, ...]:
    """Return how many consecutive layers each part has.

    The options ``balance``, ``balance_by`` and, where a strategy has it, ``segments`` decide; an attempt that resumes
    keeps the balance of its checkpoint.

    Args:
        samples: of a micro-batch, with which layers are measured.

    Raises:
        InputError: ``balance`` does not add up, or there are more parts than layers.
    """
    check_layers(task, len(layers), parts, "measured time")
    return task.balance(lambda: _balance_anew(task, layers, parts, samples))


def _balance_anew(task: Task, layers: Sequence[nn.Module], parts: int, samples: int) -> list[int]:
    balance, segments = _balance_and_segments(task.options)
    groups = (1,) * len(layers)
    costs: list[float] = []
    if segments or not balance:
        if task.options["balance_by"] == "size":
            costs = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
        else:
            costs = measure_layers_s(task, layers, samples)
    if segments:
        groups = equal_parts(costs, segments)
        costs = sums_of_runs(costs, groups)
    return [int(n) for n in sums_of_runs(groups, balance or equal_parts(costs, parts))]


def check_layers(task: Task | KerasTask, layers: int, parts: int, default: str) -> None:
    """Check that a model of so many layers can be cut; ``default`` names what shares them out without ``balance``.

    Raises:
        InputError: ``balance`` does not add up, or there are more parts than layers.
    """
    if why := unsupported_layers(layers, parts, task.options):
        raise InputError(
            f"{task.config.strategy} cannot cut {task.config.model}: {why}",
            where="experiment.toml: strategy",
            hint=f"leave balance out to have layers shared out by {default}",
        )


def unsupported_layers(layers: int, parts: int, options: Options) -> str:
    """Return why a model of so many layers cannot be cut into the parts, for plan and job alike; empty when it can."""
    balance, segments = _balance_and_segments(options)
    if max(parts, segments) > layers:
        return f"{layers} layers cannot be split into {max(parts, segments)} parts"
    if balance and sum(balance) != (segments or layers):
        what = f"{segments} segments" if segments else f"{layers} layers"
        return f"balance {list(balance)} adds up to {sum(balance)}, and there are {what}"
    return ""


def unsupported_on_two_devices(name: str, hardware: Hardware, options: Options) -> str:
    """Return why a strategy of two parts cannot run on that hardware; empty when it can."""
    balance, _ = _balance_and_segments(options)
    if hardware.devices != TWO_PARTS or hardware.nodes > 1:
        return f"{name} has two parts for two devices of one node, not for {hardware}"
    if balance and len(balance) != TWO_PARTS:
        return f"{name} has two parts, and balance {list(balance)} names {len(balance)}"
    return ""


def ignored_balance_by(options: Options, default: str) -> str:
    """Return why ``balance_by`` would change nothing; empty where it has its default, or decides."""
    balance, segments = _balance_and_segments(options)
    if not balance or segments or options["balance_by"] == default:
        return ""
    return f'balance_by = "{options["balance_by"]}" is ignored with balance {list(balance)}: remove one of them'


def _balance_and_segments(options: Options) -> tuple[tuple[int, ...], int]:
    balance, segments = options["balance"], options.get("segments", 0)
    assert isinstance(balance, tuple) and isinstance(segments, int)
    return balance, segments


def sums_of_runs(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return the sums of consecutive runs of values."""
    ends = list(accumulate(lengths))
    return [sum(values[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def equal_parts(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the lengths of consecutive runs of costs, none empty, that minimize the sum of the dearest run."""
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[k][n]: (cost of the dearest run, start of the last run) of the best cut of the first n costs into k runs.
    best: list[list[tuple[float, int]]] = [[(0.0 if n == 0 else float("inf"), 0) for n in range(count + 1)]]
    for _ in range(parts):
        before = [cost for cost, _ in best[-1]]
        cuts = [[(max(before[m], sums[n] - sums[m]), m) for m in range(n)] for n in range(count + 1)]
        best.append([min(row, default=(float("inf"), 0)) for row in cuts])
    ends = [count]
    for row in reversed(best[1:]):
        ends.append(row[ends[-1]][1])
    return tuple(end - start for start, end in pairwise(reversed(ends)))


def measure_layers_s(task: Task, layers: Sequence[nn.Module], samples: int) -> list[float]:
    """Return the seconds of each layer's forward and backward pass, measured one after another on this rank's device.

    Layers are copied, so neither their devices nor their statistics change. Where stages are captured as CUDA graphs,
    layers are too: as written, small layers would take as long as their kernel launches.
    """
    settle: Callable[[], object] = torch.cuda.synchronize if task.device.type == "cuda" else (lambda: None)
    x = task.example(samples)
    times_s = []
    for layer in layers:
        trial = _Trial(task, copy.deepcopy(layer).to(task.device).eval(), x)
        work = trial.captured() if task.config.compile in CAPTURED else trial.work
        measured_s = []
        for _ in range(REPEATS + 1):
            settle()
            started = time.perf_counter()
            work()
            settle()
            measured_s.append(time.perf_counter() - started)
        times_s.append(min(measured_s[1:]))
        x = trial.output.detach().clone()
    return times_s


class _Trial:
    """Forward and backward pass of one layer."""

    def __init__(self, task: Task, layer: nn.Module, x: Tensor) -> None:
        self._task, self._layer = task, layer
        self._input = x.detach().requires_grad_(x.is_floating_point())
        self.output = x

    def work(self) -> None:
        self._input.grad = None
        # Autograd rejects in-place layers, such as ReLU(inplace=True), on a leaf that requires a gradient.
        self.output = self._task.forward(self._layer, self._input * 1)
        self.output.sum().backward()  # type: ignore[no-untyped-call]

    def captured(self) -> Callable[[], None]:
        """Return the replay of the same work as a CUDA graph."""
        with side_stream(self._task.device):
            self.work()
        return capture_work(self.work, self._task.device)[1].replay
