"""What the TensorFlow engine hands to a strategy (``KerasTask``) and asks of it (``KerasStrategy``). No framework here.

The engine owns data, weights at the start, loss, optimiser, evaluation and checkpoints. A strategy owns where layers
live and which replicas there are; each takes its part of a batch, and sums, never means, leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workloads.contract import TrainConfig
from workloads.registry import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasTask:
    """What is to be trained."""

    config: TrainConfig
    options: Options
    """Every option of the strategy's declaration, the defaults filled in."""
    devices: tuple[str, ...]
    """As TensorFlow names them."""
    layers: Callable[[], list[Any]]
    """Makes the model's layers; to be called once, where variables are to live."""
    sizes: Callable[[], list[float]]
    """Parameters of each layer."""
    note_cut: Callable[[Sequence[int]], None]
    """Told how many layers each part has, where the model is cut: for the result."""
    example: Callable[[], Any]
    """A batch of one sample, to build the layers with."""


class KerasStrategy(Protocol):
    """Made as ``declaration.create()(task)``; layers are built then. Methods are traced, once for each batch size."""

    distribution: Any
    """A ``tf.distribute.Strategy``; the other members are called in its replicas."""

    def logits(self, x: Any) -> Any:
        """Evaluate."""

    def backward(
        self, x: Any, loss_of: Callable[[Any], Any], variables: Sequence[Any], weight: Any
    ) -> tuple[Any, list[Any]]:
        """Forward and backward pass.

        Args:
            loss_of: logits to summed loss.
            variables: all parameters, in order of the layers.
            weight: what the gradients are multiplied by.

        Returns:
            The summed loss and the gradients.
        """
        ...
