"""``tf_model_parallel``: a Keras model in two parts on two devices, one of which always waits for the other.

What ``model_parallel`` is in torch, with the same option: as many layers, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workloads.contract import Topology
from workloads.errors import InputError
from workloads.registry import TENSORFLOW, Option, StrategyDeclaration
from workloads.strategies import model_parallel
from workloads.strategies.shared.partition import misfit, share_out
from workloads.strategies.tf_eager import unsupported_compile, unsupported_training

if TYPE_CHECKING:
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
        # A tape for each part: what is computed backwards goes where a tape is asked.
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
    """How many layers the first device has.

    Raises:
        InputError: ``balance`` does not add up.
    """
    balance = task.options["balance"]
    assert isinstance(balance, tuple)
    if why := misfit(len(layers), model_parallel.PARTS, task.options):
        raise InputError(
            f"tf_model_parallel cannot cut {task.config.model}: {why}",
            where="experiment.toml: strategy",
            hint="leave balance out to have layers shared out by number of parameters",
        )
    sizes = balance or share_out(task.sizes(), model_parallel.PARTS)
    task.note_cut(sizes)
    return sizes[0]


DECLARATION = StrategyDeclaration(
    name="tf_model_parallel",
    summary="A Keras model in two parts on two devices, which take turns: saves memory, costs time.",
    framework=TENSORFLOW,
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=lambda hardware, options: model_parallel.unsupported_hardware(
        "tf_model_parallel", hardware, options
    ),
    unsupported_layers=lambda layers, _hardware, options: misfit(layers, model_parallel.PARTS, options),
    unsupported_training=unsupported_training,
    unsupported_compile=unsupported_compile,
    splits_batch=False,
    packages=("tensorflow|tensorflow-cpu",),
    options=(
        Option(
            name="balance",
            type=tuple[int, ...],
            default=(),
            minimum=1,
            summary="Layers on each of the two devices; [] shares them out by number of parameters",
        ),
    ),
    batch_norm_treatment="whole_batch",
    create=lambda: TfModelParallel,
)
