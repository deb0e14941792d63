"""One stage of a pipeline as its schedule calls it: as written, compiled, or captured as CUDA graphs.

A captured stage has two graphs for each micro-batch of a step, forward and backward pass, so that a micro-batch costs
two launches however many layers there are. Tensors that one micro-batch keeps between the two lie in the memory pool of
its own graphs, so schedules may order the passes as they like. Gradients accumulate inside the graphs in fixed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workloads.strategies.shared import compiled_steps
from workloads.strategies.shared.protocol import Task

Work = Callable[[], Tensor | None]


Capture = Callable[[Work, list[Any]], tuple[Tensor | None, Callable[[], None]]]
"""(work on static tensors, pool) -> its output, which each replay overwrites, and the replay. Work that is replayed in
the order of its capture shares the memory of ``pool``, which the first call fills."""


class Stage(nn.Module):
    """Consecutive layers under the run's autocast."""

    def __init__(self, task: Task, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self._task = task
        self._model: list[Any] = [part]  # nn.Module registers attributes that are modules, but not those in a list
        self._captured: list[_MicroBatch] = []
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._compute(self.part, x)
        if not self._captured:
            return self._compute(self._model[0], x)
        micro_batch = self._captured[self._calls % len(self._captured)]
        self._calls += 1
        output: Tensor = _Replay.apply(x, micro_batch.anchor, micro_batch)
        return output

    def compile_part(self) -> None:
        """Run compiled code in training from now on."""
        self._model = [compiled_steps.compile_for_one_shape(self.part)]

    def capture(self, wire: Tensor, micro_batches: int, capture: Capture | None = None) -> None:
        """Replay CUDA graphs in training from now on; parameters keep their gradient tensors.

        The stage must be in training mode.

        Args:
            wire: an input of the size of a micro-batch.
            micro_batches: of a step; a schedule starts their forward passes in order.
        """
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        capture = capture or partial(_capture_graph, self._task.device)
        self._captured = [
            _MicroBatch(partial(self._compute, self._model[0]), wire, capture) for _ in range(micro_batches)
        ]

    def _compute(self, model: Any, x: Tensor) -> Tensor:
        output = self._task.forward(model, x).contiguous()
        # PipelineStage detaches outputs in place (detach_), which torch forbids for views.
        return output.clone() if output._is_view() else output


class _MicroBatch:
    """The two graphs of one micro-batch."""

    def __init__(self, compute: Callable[[Tensor], Tensor], wire: Tensor, capture: Capture) -> None:
        self._compute = compute
        self.x = torch.zeros_like(wire, requires_grad=wire.requires_grad)
        self.anchor = torch.zeros((), device=wire.device, requires_grad=True)
        """Makes autograd call _Replay.backward also where the input is an image, which requires no gradient."""
        self._output = self.x
        """With its autograd graph, for the backward pass."""
        pool: list[Any] = []
        output, self.forward = capture(self._forward, pool)
        assert output is not None
        self.output = output.detach()
        self.output_gradient = torch.zeros_like(self.output)
        self.input_gradient, self.backward = capture(self._backward, pool)

    def _forward(self) -> Tensor:
        with torch.enable_grad():
            self._output = self._compute(self.x)
        return self._output

    def _backward(self) -> Tensor | None:
        self.x.grad = None
        self._output.backward(self.output_gradient)  # type: ignore[no-untyped-call]
        return self.x.grad


class _Replay(torch.autograd.Function):
    """Stands for a stage in autograd's graph. It copies inputs and outputs, as the next replay overwrites them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, micro_batch: _MicroBatch) -> Tensor:
        ctx.micro_batch = micro_batch
        micro_batch.x.copy_(x)
        micro_batch.forward()
        return micro_batch.output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        micro_batch: _MicroBatch = ctx.micro_batch
        micro_batch.output_gradient.copy_(gradient)
        micro_batch.backward()
        found = micro_batch.input_gradient
        return None if found is None else found.clone(), None, None


def _capture_graph(device: torch.device, work: Work, pool: list[Any]) -> tuple[Tensor | None, Callable[[], None]]:
    output, graph = compiled_steps.capture_work(work, device, pool[0] if pool else None)
    pool[:] = [graph.pool()]
    return output, graph.replay


def warm_up(stage: Stage, wire: Tensor) -> None:
    """Let libraries choose kernels and allocate workspaces, on the stream on which the stage is captured then."""
    with compiled_steps.side_stream(wire.device):
        for _ in range(compiled_steps.WARMUP_STEPS):
            output = stage(torch.zeros_like(wire, requires_grad=wire.requires_grad))
            output.backward(torch.zeros_like(output))
