"""Base classes for torch strategies: ``eager`` itself, from which a strategy overrides what it does differently.

A strategy need not inherit from them: the engine needs a :class:`workloads.strategies.shared.protocol.Strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from workloads.lazy import lazy_imports
from workloads.strategies.shared.compiled_steps import WARMUP_STEPS, Model, StepRunner
from workloads.strategies.shared.protocol import Task

with lazy_imports(__name__):
    import torch
    from torch import Tensor, distributed, nn

    from workloads.engines import checkpoint
    from workloads.loaders.protocol import Batch


class TorchStrategy:
    """Train one copy of the model on this rank.

    The step is forward pass, summed loss, backward pass, update. Override :meth:`compute`, :meth:`backward`,
    :meth:`update`, :meth:`clear_gradients` or :meth:`set_training` to change a part of it, :meth:`train_step` to add
    work around it.

    Args:
        module: the model, already on its devices; ``task.module`` moved to ``task.device`` when None.
        model: what a training step calls, such as a wrapper around the module; the module when None.
        evaluated: what an evaluation calls; the module when None. Its training mode is set, unless
            :meth:`set_training` is overridden.
        parameters: the tensors that the optimizer updates; the module's parameters when None.
        optimizer: made from ``task.make_optimizer`` over ``parameters`` when None.
        warmup_steps: steps to run before one is recorded as a CUDA graph.
        compile_model: (model) -> its compiled form; ``torch.compile`` of the whole model when None.
    """

    inference_mode = True
    """Whether an evaluation may run under ``torch.inference_mode``. It marks tensors that it makes so that autograd
    rejects them later; where a strategy reuses such tensors in a training step, ``torch.no_grad`` takes its place."""

    def __init__(
        self,
        task: Task,
        module: nn.Module | None = None,
        *,
        model: Model | None = None,
        evaluated: Model | None = None,
        parameters: Iterable[nn.Parameter] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        warmup_steps: int = WARMUP_STEPS,
        compile_model: Callable[[Model], Model] | None = None,
    ) -> None:
        self.task = task
        self.module = task.module.to(task.device) if module is None else module
        self.evaluated: Any = self.module if evaluated is None else evaluated
        self.parameters = list(self.module.parameters() if parameters is None else parameters)
        self.optimizer = task.make_optimizer(self.parameters) if optimizer is None else optimizer
        self._runner = StepRunner(
            task,
            self._step,
            self.module if model is None else model,
            self.optimizer,
            [*self.parameters, *self.module.buffers()],
            warmup_steps=warmup_steps,
            compile_model=compile_model,
        )

    def train_step(self, batch: Batch) -> Tensor:
        return self._runner(batch)

    def prepare(self, batch: Batch) -> None:
        self._runner.prepare(batch)

    def logits(self, x: Tensor) -> Tensor | None:
        self.set_training(False)
        with torch.inference_mode() if self.inference_mode else torch.no_grad():
            return self.compute(self.evaluated, x).to(self.task.device)

    def state_dict(self) -> dict[str, Any]:
        return checkpoint.cpu_state(self.module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self._runner.close()

    def set_training(self, training: bool) -> None:
        """Set training or evaluation mode."""
        self.task.set_training(self.evaluated, training)

    def clear_gradients(self) -> None:
        """Drop the gradients of the step before."""
        self.optimizer.zero_grad(set_to_none=True)

    def compute(self, model: Model, x: Tensor) -> Tensor:
        """Return the logits of ``x``, under the run's autocast."""
        return self.task.forward(model, x)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Compute the gradients of ``weight * loss``."""
        self.task.backward(loss, weight)

    def update(self) -> None:
        """Update the parameters from their gradients."""
        self.optimizer.step()

    def _step(self, model: Model, batch: Batch) -> Tensor:
        self.set_training(True)
        self.clear_gradients()
        logits = self.compute(model, batch.x)
        # The last layers of a model in parts are on another device.
        loss = self.task.loss_sum(logits, batch.y.to(logits.device, non_blocking=True))
        if batch.num_local == 0:
            loss = loss * 0.0
        # DDP, FSDP2, Horovod and ZeRO divide the sum of the ranks' gradients by the number of ranks, whatever each
        # rank's share of the samples; so each rank multiplies by it.
        weight = self.task.world.size / batch.num_global  # rank weighting
        self.backward(loss, weight)
        self.update()
        return loss.detach().to(self.task.device, non_blocking=True)


class ReplicaStrategy(TorchStrategy):
    """Train on this rank's part of the batch, with gradients averaged over ranks.

    Each rank's batch norm sees its own part; running statistics are averaged before an evaluation and a checkpoint. A
    broadcast in every step, DDP's default, would cost a collective a step and keep one rank's statistics only.
    """

    def __init__(self, task: Task, module: nn.Module | None = None, **more: Any) -> None:
        super().__init__(task, module, **more)
        self._statistics = trained_statistics(task, self.module) if task.world.size > 1 else []
        self.statistics_differ = False
        """Whether ranks may have different running statistics."""

    def train_step(self, batch: Batch) -> Tensor:
        self.statistics_differ = True
        return super().train_step(batch)

    def logits(self, x: Tensor) -> Tensor | None:
        self.average_statistics()
        return super().logits(x)

    def state_dict(self) -> dict[str, Any]:
        self.average_statistics()
        return super().state_dict() if self.task.world.rank == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.statistics_differ = False

    def average_statistics(self) -> None:
        """Make the running statistics the same on all ranks. Collective; returns at once when nothing changed."""
        if self.statistics_differ:
            self.statistics_differ = False
            average(self._statistics, self.task.world.size)


def under_autocast(task: Task, module: nn.Module) -> nn.Module:
    """Return a module that computes ``task.forward(module, x)``.

    For libraries that run modules in threads of their own: autocast is a setting of the thread.
    """
    if task.config.precision != "bf16":
        return module

    class UnderAutocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return task.forward(self.module, x)

    return UnderAutocast().eval()


def trained_statistics(task: Task, module: nn.Module) -> list[Tensor]:
    """Return the running statistics that training changes: none where batch norm is frozen."""
    if task.config.batch_norm == "frozen":
        return []
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


def average(tensors: list[Tensor], ranks: int) -> None:
    """Replace tensors by their mean over ranks, in one message: hundreds of small ones are bound by latency."""
    if not tensors:
        return
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    if ranks > 1:
        distributed.all_reduce(flat)
    flat.div_(ranks)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view_as(tensor))  # autograd rejects in-place writes to parameters themselves
