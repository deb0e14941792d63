"""What the torch loop hands to a strategy (``Task``) and asks of it (``Strategy``). Imports no framework when it runs.

The loop owns everything that must not differ between strategies: data order, model initialisation, precision, loss,
optimiser settings, learning rate, evaluation, checkpoints, measurement. A strategy owns where parameters and
activations live and who talks to whom. It is constructed as ``declaration.create()(task)`` on every rank of the world,
with torch's process group already up where the topology is one process per device.

The three rules that make strategies comparable:

* *Sums, never means, leave a rank.* ``train_step`` returns this rank's share of the summed loss. Shares added over
  ranks and divided by ``batch.num_global`` are the mean loss of the global batch, whatever the split. A pipeline stage
  that does not see the loss returns zero.
* *Every sample is answered once.* Added over ranks, the rows of ``logits`` that are not None are each test sample once.
  A strategy that splits the batch answers its own part; one that does not (a pipeline) answers on one rank, None
  elsewhere.
* *Calls are collective.* All ranks make the same calls in the same order, so a strategy may communicate in any of them;
  that is also why a rank without samples still gets a stand-in batch.
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

    from workloads.job.world import World
    from workloads.loaders.protocol import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be trained, the same for every strategy."""

    module: nn.Module
    """The initialised model, on the CPU, in the run's dtype and memory format; the strategy places it."""
    config: TrainConfig
    options: Options
    """Every option of the strategy's declaration, the defaults filled in."""
    world: World
    device: torch.device
    """This rank's device (the first one, for a strategy of one process over several)."""
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """The configured optimiser over the parameters that this rank updates."""
    forward: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    """(module, x) -> logits, under the run's autocast."""
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    """(logits, y) -> training loss *summed* over the samples."""
    backward: Callable[[Tensor, float], None]
    """(loss, weight) -> gradients of weight times the loss, which stays as it is."""
    set_training: Callable[[nn.Module, bool], None]
    """Training or evaluation mode, with batch norm frozen where the run asks for it; cheap when nothing changes.

    ``module`` comes in evaluation mode, and a wrapper around it must be put there too, or the first change is none."""
    layers: Callable[[], list[nn.Module]]
    """The model as a list of layers that share its modules; raises InputError when it cannot be cut."""
    cut: Callable[[Callable[[], Sequence[int]]], tuple[int, ...]]
    """(deciding) -> how many layers each part has: what the attempt decided that this one goes on from, else what
    ``deciding`` does now. Measured time never answers twice the same, and another cut draws other random numbers for
    dropout. Rank 0's is written into result and checkpoint."""
    example: Callable[[int], Tensor]
    """(samples) -> input of that many samples on ``device``, as it comes from the loader; for trying the model out."""
    devices: tuple[torch.device, ...]
    """All devices that this rank computes on; the first is ``device``. On a CPU, where one process may stand for
    several devices, the same one several times."""


class Strategy(Protocol):
    """One way of training a model in parallel. Six members, none optional."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser whose ``param_groups`` carry the learning rate in force; the loop sets it before each step."""

    def train_step(self, batch: Batch) -> Tensor:
        """One optimiser step on this rank's part of the global batch.

        Never synchronises host and device. With ``batch.num_local == 0`` the samples are stand-ins and weigh nothing.

        Returns:
            This rank's share of the loss summed over the global batch: a detached scalar on the device.
        """

    def logits(self, x: Tensor) -> Tensor | None:
        """Evaluate without gradients, as the trained model would be served.

        Args:
            x: ``Batch.x``, on ``task.device``.

        Returns:
            (samples, classes), or (samples, classes, positions); None when another rank answers for these samples.
        """

    def state_dict(self) -> dict[str, Any]:
        """Whole model and optimiser as ``{"model": ..., "optimizer": ...}`` of CPU tensors, named as eager names them.

        Collective. Rank 0's answer is the one that is kept; other ranks may return an empty one.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what rank 0's :meth:`state_dict` returned; every rank is given the same. Collective."""

    def close(self) -> None:
        """Give back what garbage collection does not: hooks, threads, shared memory. Called on success only."""


class Prepares(Protocol):
    """What a strategy has besides when its declaration takes a ``compile`` other than ``off``."""

    def prepare(self, batch: Batch) -> None:
        """Compile and record what ``train_step`` will run, before the first step and after :meth:`load_state_dict`.

        Nothing that learns may differ afterwards. Called with ``compile = "off"`` never. Collective.

        Args:
            batch: the first of an epoch, which is a whole one.
        """
