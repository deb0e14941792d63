"""``compile``: a training step as it is written, with a compiled model, or recorded once as a CUDA graph and replayed.

Compiled code and graphs have fixed shapes, so they are for whole batches; an epoch's odd last batch takes the step as
written. A graph holds all of a step: the forward pass, the loss, the backward pass with the gradients' all-reduce where
there is one, and the optimiser's update. Dropout draws from the device's generator, whose state every replay reads and
moves on as the step itself would. The learning rate is a number on the device there, rounded to single precision, as
torch's fused optimisers read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from workloads.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.protocol import Task

Model = Callable[["Tensor"], "Tensor"]
Step = Callable[[Model, "Batch"], "Tensor"]
"""(what to call as the model, batch) -> the rank's share of the summed loss, after one whole optimiser step."""

WARMUP_STEPS = 3
"""Before recording: libraries choose kernels and take memory, and the optimiser makes its state."""


class Steps:
    """Carries out a strategy's training steps the way that ``config.compile`` names.

    Args:
        step: the step as it is written; it uses ``optimizer``.
        model: what is called in it.
        tensors: everything that a step changes but the optimiser's state: parameters and statistics.
        warmup: steps before one is recorded.
        compile_model: (model) -> what is called in its place when it is to be compiled.
    """

    def __init__(
        self,
        task: Task,
        step: Step,
        model: Model,
        optimizer: torch.optim.Optimizer,
        tensors: Iterable[Tensor],
        *,
        warmup: int = WARMUP_STEPS,
        compile_model: Callable[[Model], Model] | None = None,
    ) -> None:
        self._task = task
        self._step = step
        self._plain = self._model = model
        self._optimizer = optimizer
        self._tensors = list(tensors)
        self._warmup = warmup
        self._compile_model = compile_model or compiled
        self._num_global: int | None = None
        """Samples of a whole batch; on all ranks the same, so all ranks go the same way."""
        self._recorded: _Recorded | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """One training step."""
        if batch.num_global != self._num_global:
            return self._step(self._plain, batch)
        if self._recorded is not None:
            return self._recorded.replay(batch)
        return self._step(self._model, batch)

    def prepare(self, batch: Batch) -> None:
        """Compile and record what whole batches need; afterwards everything that learns is as it was. Collective.

        The random state is not put back: the loop sets it at the start of every epoch.

        Args:
            batch: a whole one.

        Raises:
            InputError: the compiler does not work here.
        """
        how = self._task.config.compile
        if how == "off":
            return
        self._num_global = batch.num_global
        with unchanged(self._tensors, self._optimizer):
            if how in ("default", "default_graphs"):
                self._model = self._compile_model(self._plain)
                with explained():
                    self._step(self._model, batch)
            if how in ("graphs", "default_graphs"):
                self._recorded = _Recorded(self._task, self._step, self._model, self._optimizer, batch, self._warmup)

    def close(self) -> None:
        """Give the recorded step up: NCCL cannot close a communicator as long as a graph holds work of it."""
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None


class _Recorded:
    """One step as a CUDA graph, with a batch and a learning rate of its own that each replay fills in."""

    def __init__(
        self, task: Task, step: Step, model: Model, optimizer: torch.optim.Optimizer, batch: Batch, warmup: int
    ) -> None:
        import dataclasses

        import torch

        self._optimizer = optimizer
        self._batch = dataclasses.replace(batch, x=batch.x.clone(), y=batch.y.clone())
        self._rate = torch.zeros((), device=task.device)
        with beside(task.device), _rate_on_device(optimizer, self._rate):
            for _ in range(warmup):
                step(model, self._batch)
        torch.cuda.synchronize(task.device)
        # Gradients shall lie in the graph's own memory.
        optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with _rate_on_device(optimizer, self._rate, recording=True), recording(self._graph, task.device):
            self._loss = step(model, self._batch)

    def replay(self, batch: Batch) -> Tensor:
        """The step for another batch of the same shape, at the optimiser's learning rate of now."""
        self._batch.x.copy_(batch.x)
        self._batch.y.copy_(batch.y)
        self._rate.fill_(self._optimizer.param_groups[0]["lr"])
        self._graph.replay()
        # The next replay writes over it, and losses are collected many steps later.
        return self._loss.clone()

    def close(self) -> None:
        """Nothing can be replayed afterwards."""
        self._graph.reset()


def compiled(model: Any) -> Any:
    """A model through ``torch.compile``, once for each shape: code for any shape would replace the faster one."""
    import torch

    return torch.compile(model, dynamic=False)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Work on the stream on which steps are recorded, after all that was queued before and ahead of all that follows.

    The default stream cannot be recorded, nor can work that depends on it, such as the end of a backward pass through
    parameters that were first used there.
    """
    import torch

    side, current = _side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Any:
    """What is queued inside becomes a graph, and is not carried out.

    Args:
        pool: memory of another graph, whose replays come before this one's each time.
    """
    import torch

    # Other threads, such as a loader's, may go on allocating.
    return torch.cuda.graph(graph, pool=pool, stream=_side_stream(device), capture_error_mode="thread_local")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What the compiler has to say, in a sentence for people who have no compiler."""
    try:
        yield
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        if not names & {"InductorError", "BackendCompilerFailed", "TorchDynamoException"}:
            raise
        raise InputError(
            "torch.compile cannot compile the model here",
            where="experiment.toml: compile",
            why=next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__),
            hint="it needs a C++ compiler in the job's PATH, and on GPUs Python's header files; "
            'or set compile = "off"',
        ) from error


@contextlib.contextmanager
def _rate_on_device(optimizer: torch.optim.Optimizer, rate: Tensor, *, recording: bool = False) -> Iterator[None]:
    """The update reads its learning rate from ``rate``, and is told when it is being recorded."""
    names = ("lr", "capturable")
    held: list[dict[str, Any]] = [{k: group[k] for k in names if k in group} for group in optimizer.param_groups]
    rate.fill_(held[0]["lr"])
    for group in optimizer.param_groups:
        group.update({"lr": rate, "capturable": True} if recording and "capturable" in group else {"lr": rate})
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, held, strict=True):
            group.update(values)


@contextlib.contextmanager
def unchanged(tensors: list[Tensor], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put everything back in place, where a recorded step will look for it.

    What the optimiser had not made before becomes zero, which is how momenta, averages and counters start.
    """
    import torch

    # On the host, so that a device's peak of memory stays that of a step.
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    states = {
        (parameter, key): value.to("cpu", copy=True)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.detach().copy_(value)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    before = states.get((parameter, key))
                    value.zero_() if before is None else value.copy_(before)
