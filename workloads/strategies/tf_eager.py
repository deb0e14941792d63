"""``tf_eager``: TensorFlow on one device: ``eager`` in the other framework. Steps are traced into graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workloads.lazy import lazy_imports
from workloads.strategies.shared import limits
from workloads.strategies.shared.keras_protocol import KerasTask

with lazy_imports(__name__):
    import keras
    import tensorflow as tf


class TfEager:
    """The whole model on each replica, of which there is one."""

    def __init__(self, task: KerasTask) -> None:
        self.distribution = self.make_distribution(task)
        with self.distribution.scope():
            self._model = keras.Sequential(task.layers())
            self._model(task.example())

    def make_distribution(self, task: KerasTask) -> Any:  # noqa: ARG002 (overridden)
        """Return the ``tf.distribute.Strategy`` in whose scope the layers are made."""
        return tf.distribute.get_strategy()

    def logits(self, x: Any) -> Any:
        return self._model(x, training=False)

    def backward(
        self, x: Any, loss_of: Callable[[Any], Any], variables: Sequence[Any], weight: Any
    ) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss = loss_of(self._model(x, training=True))
        return loss, tape.gradient(loss, variables, output_gradients=weight)


DECLARATION = limits.tensorflow_declaration(
    name="tf_eager",
    summary="TensorFlow on one device, from the same weights as eager and with the same batches.",
    unsupported_hardware=lambda hardware, _options: limits.one_device("tf_eager", hardware),
    splits_batch=False,
    batch_norm_treatment="whole_batch",
    create=lambda: TfEager,
)
