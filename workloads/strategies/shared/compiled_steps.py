"""``compile``: a training step as written, with a compiled model, or captured once as a CUDA graph and replayed.

Compiled code and graphs have fixed shapes, so they run whole batches; an epoch's smaller last batch runs as written.
A graph holds the whole step: forward pass, loss, backward pass with the all-reduce of gradients, and update. Dropout
draws from the device's generator, which each replay advances as the step itself would. The learning rate of a captured
step is a single-precision number on the device, because torch's fused optimizers read it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from workloads.errors import InputError
from workloads.lazy import lazy_imports
from workloads.strategies.shared.protocol import Task

with lazy_imports(__name__):
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch

Model = Callable[["Tensor"], "Tensor"]
Step = Callable[[Model, "Batch"], "Tensor"]
"""(what to call as the model, batch) -> this rank's share of the summed loss, after one whole optimizer step."""

WARMUP_STEPS = 3
"""Before capture, libraries choose kernels and allocate workspaces and the optimizer creates its state; torch's note
"CUDA semantics: CUDA graphs" warms up for as many steps."""

COMPILED = ("default", "default_graphs")
CAPTURED = ("graphs", "default_graphs")
"""Values of ``compile`` that compile the model, and that capture CUDA graphs."""


class StepRunner:
    """Runs a strategy's training steps the way that ``config.compile`` names.

    Args:
        step: the step as written; it uses ``optimizer``.
        model: what the step calls.
        tensors: all that a step changes besides the optimizer's state: parameters and running statistics.
        warmup_steps: steps to run before one is captured.
        compile_model: (model) -> its compiled form.
    """

    def __init__(
        self,
        task: Task,
        step: Step,
        model: Model,
        optimizer: torch.optim.Optimizer,
        tensors: Iterable[Tensor],
        *,
        warmup_steps: int = WARMUP_STEPS,
        compile_model: Callable[[Model], Model] | None = None,
    ) -> None:
        self._task = task
        self._step = step
        self._model_as_written = self._model = model
        self._optimizer = optimizer
        self._tensors = list(tensors)
        self._warmup_steps = warmup_steps
        self._compile_model = compile_model or compile_for_one_shape
        self._whole_batch: int | None = None
        """Samples of a whole batch over all ranks, so that all ranks decide alike."""
        self._captured: _CapturedStep | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Run one training step."""
        if batch.num_global != self._whole_batch:
            return self._step(self._model_as_written, batch)
        if self._captured is not None:
            return self._captured.replay(batch)
        return self._step(self._model, batch)

    def prepare(self, batch: Batch) -> None:
        """Compile and capture what whole batches need, and restore what the trial steps changed. Collective.

        The random state is not restored: the loop seeds it at the start of every epoch.

        Args:
            batch: a whole one.

        Raises:
            InputError: the compiler does not work here.
        """
        how = self._task.config.compile
        if how == "off":
            return
        self._whole_batch = batch.num_global
        with preserved(self._tensors, self._optimizer):
            if how in COMPILED:
                self._model = self._compile_model(self._model_as_written)
                with compiler_errors_explained():
                    self._step(self._model, batch)
            if how in CAPTURED:
                self._captured = _CapturedStep(
                    self._task, self._step, self._model, self._optimizer, batch, self._warmup_steps
                )

    def close(self) -> None:
        """Free the captured step: destroying an NCCL communicator waits for the graphs that captured its collectives
        (pytorch/pytorch#115388)."""
        if self._captured is not None:
            self._captured.graph.reset()
            self._captured = None


class _CapturedStep:
    """One step as a CUDA graph, with its own batch and learning rate, which each replay fills in."""

    def __init__(
        self, task: Task, step: Step, model: Model, optimizer: torch.optim.Optimizer, batch: Batch, warmup_steps: int
    ) -> None:
        self._optimizer = optimizer
        self._batch = dataclasses.replace(batch, x=batch.x.clone(), y=batch.y.clone())
        self._rate = torch.zeros((), device=task.device)
        with side_stream(task.device), _learning_rate_on_device(optimizer, self._rate):
            for _ in range(warmup_steps):
                step(model, self._batch)
        # The captured backward pass must allocate the gradients in the graph's own memory pool.
        optimizer.zero_grad(set_to_none=True)
        with _learning_rate_on_device(optimizer, self._rate, capturing=True):
            self._loss, self.graph = capture_work(lambda: step(model, self._batch), task.device)

    def replay(self, batch: Batch) -> Tensor:
        """Run the step for another batch of the same shape at the optimizer's current learning rate."""
        self._batch.x.copy_(batch.x)
        self._batch.y.copy_(batch.y)
        self._rate.fill_(self._optimizer.param_groups[0]["lr"])
        self.graph.replay()
        # The next replay overwrites the loss, which is read many steps later.
        loss: Tensor = self._loss.clone()
        return loss


def compile_for_one_shape(model: Any) -> Any:
    """Compile a model anew for each input shape.

    With ``dynamic=None``, torch's default, the second shape would replace the code by slower code for any shape.
    """
    return torch.compile(model, dynamic=False)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run work on the stream on which graphs are captured, between the work before and the work after the block.

    CUDA cannot capture the legacy default stream, nor work that waits for it. Autograd makes a parameter's
    AccumulateGrad node on the stream of its first forward pass and runs it there ever after, so that pass belongs here
    (torch's note "CUDA semantics: stream semantics of backward passes").
    """
    side, current = _capture_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def capture_work(work: Callable[[], Any], device: torch.device, pool: Any = None) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Capture work as a CUDA graph instead of running it.

    Args:
        work: run on the side stream before, so that libraries have chosen kernels and allocated workspaces.
        pool: memory pool of a graph that is always replayed before this one.

    Returns:
        What ``work`` returns, in memory that each replay overwrites; and the graph.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # The default mode, "global", makes cudaMalloc in any thread an error, such as in the loader's.
    with torch.cuda.graph(graph, pool=pool, stream=_capture_stream(device), capture_error_mode="thread_local"):
        output = work()
    return output, graph


@contextlib.contextmanager
def compiler_errors_explained() -> Iterator[None]:
    """Turn the errors of ``torch.compile`` into InputError with the usual remedies."""
    try:
        yield
    except Exception as error:
        # By name, because torch._dynamo.exc and torch._inductor.exc are private and slow to import.
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
def _learning_rate_on_device(
    optimizer: torch.optim.Optimizer, rate: Tensor, *, capturing: bool = False
) -> Iterator[None]:
    """Let the update read its learning rate from ``rate``; while capturing, torch's Adam wants ``capturable`` set."""
    names = ("lr", "capturable")
    before: list[dict[str, Any]] = [{k: group[k] for k in names if k in group} for group in optimizer.param_groups]
    rate.fill_(before[0]["lr"])
    for group in optimizer.param_groups:
        group.update({"lr": rate, "capturable": True} if capturing and "capturable" in group else {"lr": rate})
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)


@contextlib.contextmanager
def preserved(tensors: list[Tensor], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore tensors and optimizer state afterwards, in the same memory, which a captured step addresses.

    State that the optimizer created meanwhile becomes zero, as momenta, averages and step counters start.
    """
    # Copies on the host do not raise the device's peak memory, which the run reports.
    saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    saved_states = {
        (parameter, key): value.to("cpu", copy=True)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.detach().copy_(value)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    before = saved_states.get((parameter, key))
                    value.zero_() if before is None else value.copy_(before)
