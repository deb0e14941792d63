"""``tf_model_parallel``: a Keras model in two parts on two devices, one of which always waits for the other.

It is ``model_parallel`` in TensorFlow, with the same option ``balance`` over as many layers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workloads.contract import Topology
from workloads.errors import InputError
from workloads.registry import TENSORFLOW, StrategyDeclaration
from workloads.strategies.shared import limits, partition
from workloads.strategies.shared.keras_protocol import KerasTask


class TfModelParallel:
    """Both parts, in one process."""

    def __init__(self, task: KerasTask) -> None:
        import keras
        import tensorflow as tf

        self._tf = tf
        self.distribution = tf.distribute.get_strategy()
        self._devices = task.devices
        layers = task.layers()
        first = _layers_of_first(task, layers)
        self._parts = [keras.Sequential(part) for part in (layers[:first], layers[first:])]
        x = task.example()
        for part, device in zip(self._parts, self._devices, strict=True):
            with tf.device(device):
                x = part(x)
        self._in_first = len(self._parts[0].trainable_variables)

    def logits(self, x: Any) -> Any:
        for part, device in zip(self._parts, self._devices, strict=True):
            with self._tf.device(device):
                x = part(x, training=False)
        return x

    def backward(
        self, x: Any, loss_of: Callable[[Any], Any], variables: Sequence[Any], weight: Any
    ) -> tuple[Any, list[Any]]:
        # A tape for each part, because tape.gradient places the backward pass on the device of the call.
        tf, (first, second) = self._tf, self._parts
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


def _layers_of_first(task: KerasTask, layers: list[Any]) -> int:
    """Return how many layers the first device has.

    Raises:
        InputError: ``balance`` does not add up.
    """
    if why := partition.unsupported_layers(len(layers), partition.TWO_PARTS, task.options):
        raise InputError(
            f"tf_model_parallel cannot cut {task.config.model}: {why}",
            where="experiment.toml: strategy",
            hint="leave balance out to have layers shared out by number of parameters",
        )
    balance = task.options["balance"] or partition.equal_parts(task.layer_sizes(), partition.TWO_PARTS)
    assert isinstance(balance, tuple)
    task.note_balance(balance)
    return balance[0]


DECLARATION = StrategyDeclaration(
    name="tf_model_parallel",
    summary="A Keras model in two parts on two devices, which take turns: saves memory, costs time.",
    framework=TENSORFLOW,
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=lambda hardware, options: partition.unsupported_on_two_devices(
        "tf_model_parallel", hardware, options
    ),
    unsupported_layers=lambda layers, _, options: partition.unsupported_layers(layers, partition.TWO_PARTS, options),
    unsupported_training=limits.tensorflow_training,
    unsupported_compile=limits.tensorflow_compile,
    splits_batch=False,
    packages=("tensorflow|tensorflow-cpu",),
    options=(
        partition.balance_option("Layers on each of the two devices; [] shares them out by number of parameters"),
    ),
    batch_norm_treatment="whole_batch",
    create=lambda: TfModelParallel,
)
