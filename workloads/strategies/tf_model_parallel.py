"""``tf_model_parallel``: a Keras model in two parts on two devices, one of which always waits for the other.

It is ``model_parallel`` in TensorFlow, with the same option ``balance`` over as many layers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workloads.lazy import lazy_imports
from workloads.strategies.shared import limits, partition
from workloads.strategies.shared.keras_protocol import KerasTask

with lazy_imports(__name__):
    import keras
    import tensorflow as tf


class TfModelParallel:
    """Both parts, in one process."""

    def __init__(self, task: KerasTask) -> None:
        self.distribution = tf.distribute.get_strategy()
        self._devices = task.devices
        layers = task.layers()
        partition.check_layers(task, len(layers), partition.TWO_PARTS, "number of parameters")
        balance = task.options["balance"] or partition.equal_parts(task.layer_sizes(), partition.TWO_PARTS)
        assert isinstance(balance, tuple)
        task.note_balance(list(balance))
        self._parts = [keras.Sequential(part) for part in (layers[: balance[0]], layers[balance[0] :])]
        x = task.example()
        for part, device in zip(self._parts, self._devices, strict=True):
            with tf.device(device):
                x = part(x)
        self._in_first = len(self._parts[0].trainable_variables)

    def logits(self, x: Any) -> Any:
        for part, device in zip(self._parts, self._devices, strict=True):
            with tf.device(device):
                x = part(x, training=False)
        return x

    def backward(
        self, x: Any, loss_of: Callable[[Any], Any], variables: Sequence[Any], weight: Any
    ) -> tuple[Any, list[Any]]:
        # A tape for each part, because tape.gradient places the backward pass on the device of the call.
        first, second = self._parts
        with tf.device(self._devices[0]), tf.GradientTape() as first_tape:
            between = first(x, training=True)
        with tf.device(self._devices[1]):
            with tf.GradientTape() as second_tape:
                second_tape.watch(between)
                loss = loss_of(second(between, training=True))
            *second_gradients, back = second_tape.gradient(
                loss, [*variables[self._in_first :], between], output_gradients=weight
            )
        with tf.device(self._devices[0]):
            first_gradients = first_tape.gradient(between, variables[: self._in_first], output_gradients=back)
        return loss, [*first_gradients, *second_gradients]


DECLARATION = limits.tensorflow_declaration(
    name="tf_model_parallel",
    summary="A Keras model in two parts on two devices, which take turns: saves memory, costs time.",
    unsupported_hardware=lambda hardware, options: partition.unsupported_on_two_devices(
        "tf_model_parallel", hardware, options
    ),
    unsupported_layers=lambda layers, _, options: partition.unsupported_layers(layers, partition.TWO_PARTS, options),
    splits_batch=False,
    options=(
        partition.balance_option("Layers on each of the two devices; [] shares them out by number of parameters"),
    ),
    batch_norm_treatment="whole_batch",
    create=lambda: TfModelParallel,
)
