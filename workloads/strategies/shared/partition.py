"""Cutting a model into consecutive parts, one for each device or stage, so that each takes its share."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from workloads.errors import InputError
from workloads.registry import Options

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workloads.strategies.shared.protocol import Task

REPEATS = 3
"""Measurements of a layer, of which the shortest counts: anything else only ever makes it longer."""


def sizes_of_parts(task: Task, layers: Sequence[nn.Module], parts: int, samples: int) -> tuple[int, ...]:
    """How many consecutive layers each part has, by the options ``balance``, ``balance_by`` and, if any, ``segments``.

    An attempt that goes on from another one's checkpoint has that one's parts.

    Args:
        samples: of a micro-batch, with which layers are measured.

    Raises:
        InputError: ``balance`` does not add up, or there are more parts than layers.
    """
    if why := misfit(len(layers), parts, task.options):
        raise InputError(
            f"{task.config.strategy} cannot cut {task.config.model}: {why}",
            where="experiment.toml: strategy",
            hint="leave balance out to have layers shared out by measured time",
        )
    return task.cut(lambda: _decided(task, layers, parts, samples))


def _decided(task: Task, layers: Sequence[nn.Module], parts: int, samples: int) -> list[int]:
    balance, segments = _asked(task.options)
    groups = (1,) * len(layers)
    costs: list[float] = []
    if segments or not balance:
        by_size = task.options["balance_by"] == "size"
        costs = [_size(layer) for layer in layers] if by_size else measure_s(task, layers, samples)
    if segments:
        groups = share_out(costs, segments)
        costs = runs(costs, groups)
    return [int(n) for n in runs(groups, balance or share_out(costs, parts))]


def misfit(layers: int, parts: int, options: Options) -> str:
    """Why so many layers cannot be cut into these parts, in plan and job alike; empty when they can."""
    balance, segments = _asked(options)
    if max(parts, segments) > layers:
        return f"{layers} layers cannot be shared out to {max(parts, segments)} parts"
    if balance and sum(balance) != (segments or layers):
        what = f"{segments} segments" if segments else f"{layers} layers"
        return f"balance {list(balance)} adds up to {sum(balance)}, and there are {what}"
    return ""


def ignores_balance_by(options: Options, default: str) -> str:
    """Why ``balance_by`` would change nothing; empty where nobody set it, or it means something."""
    balance, segments = _asked(options)
    if not balance or segments or options["balance_by"] == default:
        return ""
    return f'balance_by = "{options["balance_by"]}" means nothing beside balance {list(balance)}: leave one of them out'


def _asked(options: Options) -> tuple[tuple[int, ...], int]:
    """What ``balance`` and, where a strategy has them, ``segments`` say."""
    balance, segments = options["balance"], options.get("segments", 0)
    assert isinstance(balance, tuple) and isinstance(segments, int)
    return balance, segments


def runs(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Sums of consecutive runs of so many values each."""
    ends = list(accumulate(lengths))
    return [sum(values[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _size(layer: nn.Module) -> float:
    return float(sum(p.numel() for p in layer.parameters()))


def share_out(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Lengths of consecutive runs of costs, none empty, such that the dearest run is as cheap as can be."""
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[k][n]: (cost of the dearest run, start of the last run) when the first n costs are shared out to k runs.
    best: list[list[tuple[float, int]]] = [[(0.0 if n == 0 else float("inf"), 0) for n in range(count + 1)]]
    for _ in range(parts):
        before = best[-1]
        best.append(
            [
                min(((max(before[m][0], sums[n] - sums[m]), m) for m in range(n)), default=(float("inf"), 0))
                for n in range(count + 1)
            ]
        )
    lengths: list[int] = []
    end = count
    for row in reversed(best[1:]):
        start = row[end][1]
        lengths.append(end - start)
        end = start
    return tuple(reversed(lengths))


def measure_s(task: Task, layers: Sequence[nn.Module], samples: int) -> list[float]:
    """Seconds that each layer takes for forward and backward pass, measured one after another on this rank's device.

    Layers are copied, so neither their place nor their statistics change. Where stages will be recorded as graphs, so
    are the layers: written out, small ones take as long as their launches.
    """
    import torch

    settle: Callable[[], object] = torch.cuda.synchronize if task.device.type == "cuda" else (lambda: None)
    x = task.example(samples)
    times_s = []
    for layer in layers:
        trial = _Trial(task, copy.deepcopy(layer).to(task.device).eval(), x)
        work = trial.recorded() if task.config.compile in ("graphs", "default_graphs") else trial.work
        measured_s = []
        for _ in range(REPEATS + 1):
            settle()
            started = time.perf_counter()
            work()
            settle()
            measured_s.append(time.perf_counter() - started)
        times_s.append(min(measured_s[1:]))
        x = trial.answer.detach().clone()
    return times_s


class _Trial:
    """One layer at work, forwards and backwards."""

    def __init__(self, task: Task, layer: nn.Module, x: Tensor) -> None:
        self._task, self._layer = task, layer
        self._given = x.detach().requires_grad_(x.is_floating_point())
        self.answer = x

    def work(self) -> None:
        self._given.grad = None
        # An in-place layer may not write into a leaf of the graph.
        self.answer = self._task.forward(self._layer, self._given * 1)
        self.answer.sum().backward()  # type: ignore[no-untyped-call]

    def recorded(self) -> Callable[[], None]:
        """The same work as a graph."""
        import torch

        from workloads.strategies.shared.compiled_steps import beside, recording

        with beside(self._task.device):
            self.work()
        torch.cuda.synchronize(self._task.device)
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._task.device):
            self.work()
        return graph.replay
