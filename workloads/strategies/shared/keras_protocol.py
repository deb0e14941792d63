"""What the TensorFlow engine gives to a strategy (``KerasTask``) and calls on it (``KerasStrategy``).

The engine owns data, initial weights, loss, optimizer, evaluation and checkpoints. A strategy owns on which devices
layers live and which replicas there are; each replica takes its part of a batch, and sums, never means, leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workloads.contract import TrainConfig
from workloads.registry import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasTask:
    """What to train."""

    config: TrainConfig
    options: Options
    """Every option of the strategy's declaration, including defaults."""
    devices: tuple[str, ...]
    """TensorFlow's names of them."""
    layers: Callable[[], list[Any]]
    """Makes the model's layers; called once, in the scope that decides where variables live."""
    layer_sizes: Callable[[], list[float]]
    """Number of parameters of each layer."""
    note_balance: Callable[[list[int]], None]
    """Writes how many layers each part has into the result, where the model is cut."""
    example: Callable[[], Any]
    """A batch of one sample, to build the layers with."""


class KerasStrategy(Protocol):
    """Made as ``declaration.create()(task)``, which builds the layers. Methods are traced once for each batch size."""

    distribution: Any
    """A ``tf.distribute.Strategy``, in whose replicas the engine calls the methods."""

    def logits(self, x: Any) -> Any:
        """Return the logits, in evaluation mode."""

    def backward(
        self, x: Any, loss_of: Callable[[Any], Any], variables: Sequence[Any], weight: Any
    ) -> tuple[Any, list[Any]]:
        """Run forward and backward pass.

        Args:
            loss_of: logits to summed loss.
            variables: all parameters, in order of the layers.
            weight: factor of the gradients.

        Returns:
            The summed loss and the gradients.
        """
        ...
