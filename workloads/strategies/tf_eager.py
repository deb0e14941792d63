"""``tf_eager``: TensorFlow on one device: ``eager`` in the other framework. Steps are traced into graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workloads.contract import Topology
from workloads.registry import TENSORFLOW, StrategyDeclaration
from workloads.strategies.shared import limits
from workloads.strategies.shared.keras_protocol import KerasTask


class TfEager:
    """The whole model on each replica, of which there is one."""

    def __init__(self, task: KerasTask) -> None:
        import keras
        import tensorflow as tf

        self._tape: Callable[[], Any] = tf.GradientTape
        self.distribution = self.make_distribution(task)
        with self.distribution.scope():
            self._model = keras.Sequential(task.layers())
            self._model(task.example())

    def make_distribution(self, task: KerasTask) -> Any:  # noqa: ARG002 (overridden)
        """Return the ``tf.distribute.Strategy`` in whose scope the layers are made."""
        import tensorflow as tf

        return tf.distribute.get_strategy()

    def logits(self, x: Any) -> Any:
        return self._model(x, training=False)

    def backward(
        self, x: Any, loss_of: Callable[[Any], Any], variables: Sequence[Any], weight: Any
    ) -> tuple[Any, list[Any]]:
        with self._tape() as tape:
            loss = loss_of(self._model(x, training=True))
        return loss, tape.gradient(loss, variables, output_gradients=weight)


DECLARATION = StrategyDeclaration(
    name="tf_eager",
    summary="TensorFlow on one device, from the same weights as eager and with the same batches.",
    framework=TENSORFLOW,
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=lambda hardware, _options: limits.one_device("tf_eager", hardware),
    unsupported_training=limits.tensorflow_training,
    unsupported_compile=limits.tensorflow_compile,
    splits_batch=False,
    packages=("tensorflow|tensorflow-cpu",),
    batch_norm_treatment="whole_batch",
    create=lambda: TfEager,
)
