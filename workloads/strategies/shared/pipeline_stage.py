"""A pipeline's stage as the schedule calls it: as written, compiled, or recorded as CUDA graphs.

A recorded stage has two graphs for each micro-batch of a step, its forward and its backward pass, so that a micro-batch
costs two launches however many layers there are. What one micro-batch must keep between the two lies in its own graphs'
memory; schedules may do the two in any order. Gradients add up inside the graphs, in memory that stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from workloads.strategies.shared.compiled_steps import WARMUP_STEPS, beside, compiled, recording

if TYPE_CHECKING:
    from workloads.strategies.shared.protocol import Task

Work = Callable[[], Tensor | None]


class Recorder(Protocol):
    """Records work on static tensors; answers what it computes, in memory that each replay fills anew, and the
    replay. Work recorded with the same ``pool`` is replayed in the order in which it was recorded."""

    def __call__(self, work: Work, pool: list[Any]) -> tuple[Tensor | None, Callable[[], None]]: ...


class Stage(nn.Module):
    """Consecutive layers under the run's autocast."""

    def __init__(self, task: Task, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self._task = task
        self._model: list[Any] = [part]  # in a list, so that compiled code is no second module with its parameters
        self._recorded: list[_MicroBatch] = []
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._compute(self.part, x)
        if not self._recorded:
            return self._compute(self._model[0], x)
        micro_batch = self._recorded[self._calls % len(self._recorded)]
        self._calls += 1
        answer: Tensor = _Replay.apply(x, micro_batch.anchor, micro_batch)
        return answer

    def compile_part(self) -> None:
        """From now on, training runs compiled code."""
        self._model = [compiled(self.part)]

    def record(self, wire: Tensor, micro_batches: int, recorder: Recorder | None = None) -> None:
        """From now on, training replays graphs; in training mode. Parameters keep their gradient tensors.

        Args:
            wire: what comes in, of the size of a micro-batch.
            micro_batches: of a step; their forward passes come in order.
        """
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        device = self._task.device
        recorder = recorder or _on_gpu(device)
        self._recorded = [
            _MicroBatch(lambda x: self._compute(self._model[0], x), wire, recorder) for _ in range(micro_batches)
        ]

    def _compute(self, model: Any, x: Tensor) -> Tensor:
        answer = self._task.forward(model, x).contiguous()
        # torch detaches in place what leaves a stage, which a view does not suffer.
        return answer.clone() if answer._is_view() else answer


class _MicroBatch:
    """The two graphs of one micro-batch."""

    def __init__(self, compute: Callable[[Tensor], Tensor], wire: Tensor, recorder: Recorder) -> None:
        self._compute = compute
        self.x = torch.zeros_like(wire, requires_grad=wire.requires_grad)
        self.anchor = torch.zeros((), device=wire.device, requires_grad=True)
        """Makes the answer one that asks for a gradient, also where the input is an image."""
        self._live = self.x
        """The answer, with the way back from it."""
        pool: list[Any] = []
        answer, self.forward = recorder(self._forward, pool)
        assert answer is not None
        self.answer = answer.detach()
        self.gradient = torch.zeros_like(self.answer)
        self.input_gradient, self.backward = recorder(self._backward, pool)

    def _forward(self) -> Tensor:
        with torch.enable_grad():
            self._live = self._compute(self.x)
        return self._live

    def _backward(self) -> Tensor | None:
        self.x.grad = None
        self._live.backward(self.gradient)  # type: ignore[no-untyped-call]
        return self.x.grad


class _Replay(torch.autograd.Function):
    """Stands for a stage in the graph that autograd sees. Copies go in and out: the next replay writes over all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, micro_batch: _MicroBatch) -> Tensor:
        ctx.micro_batch = micro_batch
        micro_batch.x.copy_(x)
        micro_batch.forward()
        return micro_batch.answer.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        micro_batch: _MicroBatch = ctx.micro_batch
        micro_batch.gradient.copy_(gradient)
        micro_batch.backward()
        found = micro_batch.input_gradient
        return None if found is None else found.clone(), None, None


def _on_gpu(device: torch.device) -> Recorder:
    """Records CUDA graphs."""

    def record(work: Work, pool: list[Any]) -> tuple[Tensor | None, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, device, pool[0] if pool else None):
            answer = work()
        pool[:] = [graph.pool()]
        return answer, graph.replay

    return record


def warm_up(stage: Stage, wire: Tensor) -> None:
    """Let libraries choose kernels and take memory, on the stream on which the stage is recorded then."""
    device = wire.device
    with beside(device):
        for _ in range(WARMUP_STEPS):
            x = torch.zeros_like(wire, requires_grad=wire.requires_grad)
            answer = stage(x)
            answer.backward(torch.zeros_like(answer))
    torch.cuda.synchronize(device)
