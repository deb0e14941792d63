"""``tf_eager``: TensorFlow on one device: what ``eager`` is, in the other framework. Steps are traced into graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import TENSORFLOW, Options, StrategyDeclaration

if TYPE_CHECKING:
    from workloads.strategies.shared.keras_protocol import KerasTask


class TfEager:
    """The whole model on each replica, of which there is one."""

    def __init__(self, task: KerasTask) -> None:
        import keras
        import tensorflow as tf

        self._tape: Callable[[], Any] = tf.GradientTape
        self.distribution = self._distribution(task)
        with self.distribution.scope():
            self._model = keras.Sequential(task.layers())
            self._model(task.example())

    def _distribution(self, _task: KerasTask) -> Any:
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


def unsupported_training(train: Mapping[str, Any], _options: Options) -> str:
    """What no strategy of TensorFlow can do."""
    if train["channels_last"]:
        return "TensorFlow keeps channels last whatever channels_last says: leave it out"
    if train["loader"] != "resident":
        return (
            f'the loader {train["loader"]} is PyTorch\'s; TensorFlow reads arrays through tf.data: loader = "resident"'
        )
    return ""


def unsupported_compile(_how: str, _options: Options) -> str:
    """Why the values of ``compile`` mean nothing here."""
    return "TensorFlow traces its steps into graphs whatever compile says: leave it out"


def _unsupported_hardware(hardware: Hardware, _options: Options) -> str:
    if hardware.devices > 1:
        return f"tf_eager trains on one device and {hardware} has {hardware.devices}"
    return ""


DECLARATION = StrategyDeclaration(
    name="tf_eager",
    summary="TensorFlow on one device, from the same weights as eager and with the same batches.",
    framework=TENSORFLOW,
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=_unsupported_hardware,
    unsupported_training=unsupported_training,
    unsupported_compile=unsupported_compile,
    splits_batch=False,
    packages=("tensorflow|tensorflow-cpu",),
    batch_norm_treatment="whole_batch",
    create=lambda: TfEager,
)
