"""What the torch engine gives to a strategy (``Task``) and calls on it (``Strategy``). Imports no framework.

The engine owns everything that must not differ between strategies: data order, initial model, precision, loss,
optimizer settings, learning rate, evaluation, checkpoints, measurement. A strategy owns where parameters and
activations live and which ranks communicate. The engine makes it as ``declaration.create()(task)`` on every rank, with
torch's process group already up where the topology is one process per device.

Three rules make strategies comparable:

* *Sums, never means, leave a rank.* ``train_step`` returns this rank's share of the summed loss. The shares of all
  ranks, added and divided by ``batch.num_global``, are the mean loss of the global batch, however it is split. A
  pipeline stage that does not compute the loss returns zero.
* *One rank answers for each sample.* Over all ranks, the rows of ``logits`` that are not None have each test sample
  once. A strategy that splits the batch answers for its own part; one that does not (a pipeline) answers on one rank
  and returns None elsewhere.
* *Calls are collective.* All ranks make the same calls in the same order, so a strategy may communicate in any of them;
  therefore a rank without samples still gets a stand-in batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from workloads.contract import TrainConfig
from workloads.registry import Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from workloads.job.world import World
    from workloads.loaders.protocol import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train; the same for every strategy."""

    module: nn.Module
    """The initialized model, on the CPU, in the run's dtype and memory format; the strategy moves it to its devices."""
    config: TrainConfig
    options: Options
    """Every option of the strategy's declaration, including defaults."""
    world: World
    device: torch.device
    """This rank's device; the first one, for a strategy of one process over several."""
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """The configured optimizer over the parameters that this rank updates."""
    forward: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    """(module, x) -> logits, under the run's autocast."""
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    """(logits, y) -> training loss *summed* over the samples."""
    backward: Callable[[Tensor, float], None]
    """(loss, weight) -> computes the gradients of weight times the loss, and leaves the loss unchanged."""
    set_training: Callable[[nn.Module, bool], None]
    """(module, training) -> sets the mode, keeping frozen batch norm in evaluation mode; returns at once when the mode
    is unchanged. ``module`` starts in evaluation mode, so a wrapper around it must too, or its first change is none."""
    layers: Callable[[], list[nn.Module]]
    """The model as a list of layers that share its modules; raises InputError when the model cannot be cut."""
    balance: Callable[[Callable[[], Sequence[int]]], tuple[int, ...]]
    """(decide) -> how many layers each part has: the balance in the checkpoint that this attempt resumes, otherwise
    ``decide()``. Measured times differ between attempts, and another cut changes dropout's random numbers. The engine
    writes rank 0's balance into result and checkpoint."""
    example: Callable[[int], Tensor]
    """(samples) -> input of that many samples on ``device``, as the loader yields it, for trying the model out."""
    host_group: ProcessGroup | None
    """A process group of all ranks for Python objects and CPU tensors; None where torch's default group carries them,
    as NCCL does not."""
    devices: tuple[torch.device, ...]
    """All devices of this rank, ``device`` first. On a CPU, where one process may stand for several devices, the CPU
    several times."""


class Strategy(Protocol):
    """One way of parallel training. Six members, none optional.

    :class:`workloads.strategies.shared.torch_strategy.TorchStrategy` implements them for one copy of the model.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose ``param_groups`` hold the learning rate; the engine sets it before each step."""

    def train_step(self, batch: Batch) -> Tensor:
        """Run one optimizer step on this rank's part of the global batch, without waiting for the device.

        With ``batch.num_local == 0`` the samples are stand-ins and must not count.

        Returns:
            This rank's share of the loss summed over the global batch: a detached scalar on the device.
        """

    def logits(self, x: Tensor) -> Tensor | None:
        """Evaluate the model without gradients.

        Args:
            x: ``Batch.x``, on ``task.device``.

        Returns:
            (samples, classes), or (samples, classes, positions); None when another rank answers for these samples.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"model": ..., "optimizer": ...}``: the whole of both, in CPU tensors with eager's names.

        Collective. The engine keeps rank 0's; other ranks may return an empty one.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what rank 0's :meth:`state_dict` returned; every rank gets the same. Collective."""

    def close(self) -> None:
        """Free what garbage collection does not: hooks, threads, shared memory. Called on success only."""


class PreparingStrategy(Strategy, Protocol):
    """A strategy whose declaration supports a ``compile`` other than ``off``."""

    def prepare(self, batch: Batch) -> None:
        """Compile and capture what ``train_step`` will run, before the first step and after :meth:`load_state_dict`.

        Parameters and state must be unchanged afterwards. Never called with ``compile = "off"``. Collective.

        Args:
            batch: the first of an epoch, which is a whole one.
        """
