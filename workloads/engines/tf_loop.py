"""The TensorFlow engine, whatever the strategy: one process over all devices. ``train`` is called once.

It trains what the torch engine trains: the same loop around the steps, images in the same order and crops, the same
architecture from the same weights, the same optimiser. Where torch is not installed, Keras' own initial weights are
taken and the result says so (``provenance.initial_weights``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workloads import registry
from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData
from workloads.engines import evaluation, settings
from workloads.engines.training import Training
from workloads.errors import InputError
from workloads.job.context import Job
from workloads.measurement import memory, timing

if TYPE_CHECKING:
    from workloads.engines.tf_input import TfBatch, TfLoader
    from workloads.engines.tf_step import Steps

Answer = TypeVar("Answer")

_POLICIES = {"fp64": "float64", "bf16": "mixed_bfloat16"}


def train(job: Job) -> None:
    """Train, evaluate, checkpoint and measure one run; ``job.result`` holds everything but state and end.

    Raises:
        JobError: what the job was given, or what it found, is not what was planned.
        InputError: what was asked for cannot be done.
        Interrupted: the job was told to end.
    """
    config = job.spec.train
    declaration, options = settings.strategy(config)
    data = settings.load_data(job)
    if not isinstance(data, ImageData):
        raise InputError(f"{config.model} cannot be trained on {config.dataset} with TensorFlow: it takes images only")
    job.pulse.beat()
    size = settings.image_size(config, data)
    # First, because torchvision 0.29 ends the process when it is imported after TensorFlow 2.21.
    weights = _weights_of_torch(config, data, size, settings.data_root(job))
    job.pulse.beat()
    _set_environment()
    from workloads.engines import tf_devices, tf_input

    devices = tf_devices.choose(job)
    job.pulse.beat()
    steps = _prepared(job, options, declaration, devices, data, size)
    if weights is not None:
        steps.set_model(weights)
    tf_devices.describe_world(job, devices, "keras" if weights is None else "torch")
    job.result.num_parameters = sum(int(v.shape.num_elements()) for v in steps.variables)
    # What does not learn by gradients is running statistics.
    has_batch_norm = any(not entry.trainable for entry in steps.entries)
    job.result.batch_norm_treatment = settings.batch_norm_treatment(config, has_batch_norm)
    job.pulse.beat()
    loader = tf_input.TfLoader(data, config)
    job.result.num_train_samples = loader.num_train
    Training(job, _TensorFlow(steps, loader, data.class_names, devices)).run()


def _set_environment() -> None:
    """What TensorFlow and Keras read when they are imported."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _prepared(
    job: Job,
    options: registry.Options,
    declaration: registry.StrategyDeclaration,
    devices: tuple[str, ...],
    data: ImageData,
    size: int,
) -> Steps:
    """The model under its strategy."""
    import keras
    import tensorflow as tf

    from workloads.engines.tf_input import Preparation
    from workloads.engines.tf_step import Steps
    from workloads.models.keras_forms.layers import Maker
    from workloads.strategies.shared.keras_protocol import KerasTask

    config = job.spec.train
    classes = len(data.class_names)
    keras.config.set_dtype_policy(_POLICIES.get(config.precision, "float32"))
    keras.utils.set_random_seed(config.seed % 2**32)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    make_layers = settings.model(config).keras_layers
    if make_layers is None:
        raise InputError(f"{config.model} is not written for TensorFlow, which {config.strategy} needs")

    def maker() -> Maker:
        return Maker(dropout=config.dropout, freeze_batch_norm=config.batch_norm == "frozen")

    dtype = "float64" if config.precision == "fp64" else "float32"
    own = maker()
    example: Callable[[], Any] = lambda: tf.zeros((1, size, size, data.channels), dtype)  # noqa: E731

    def layer_sizes() -> list[float]:
        x, counts = example(), []
        with tf.device("/CPU:0"):
            for layer in make_layers(maker(), config, classes):
                x = layer(x)
                counts.append(float(layer.count_params()))
        return counts

    def note_balance(sizes: Sequence[int]) -> None:
        job.result.balance_applied = list(sizes)

    task = KerasTask(
        config=config,
        options=options,
        devices=devices,
        layers=lambda: make_layers(own, config, classes),
        layer_sizes=layer_sizes,
        note_balance=note_balance,
        example=example,
    )
    strategy: Any = declaration.create()(task)
    return Steps(config, strategy, own, Preparation(data, size, dtype), classes)


def _weights_of_torch(config: TrainConfig, data: ImageData, size: int, root: Path | None) -> dict[str, Any] | None:
    """What the torch engine starts from; None where the torch form cannot be built."""
    try:
        from workloads.engines import recipe

        module = recipe.build_model(config, data, size, root)
    except ImportError as error:
        if config.pretrained:
            raise InputError("pretrained weights are read by torch, which is not installed here") from error
        return None
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


class _TensorFlow:
    """See :class:`workloads.engines.training.Backend`."""

    def __init__(self, steps: Steps, loader: TfLoader, class_names: tuple[str, ...], devices: tuple[str, ...]) -> None:
        from workloads.engines import tf_checkpoint

        self._steps = steps
        self._loader = loader
        self._class_names = class_names
        self._devices = devices
        self.num_train, self.num_test = loader.num_train, loader.num_test
        self.steps_per_epoch = loader.steps_per_epoch
        self.batches: Callable[[int], Iterator[TfBatch]] = loader.train
        self.train_step: Callable[[TfBatch], Any] = steps.train_step
        self.seed = steps.seed
        self.state_dict = steps.state_dict
        self.load_state_dict = steps.load_state_dict
        self.save = tf_checkpoint.save
        self.load = tf_checkpoint.load

    def settle(self) -> float:
        import tensorflow as tf

        if self._devices[0].startswith("/GPU"):
            tf.test.experimental.sync_devices()
        return time.perf_counter()

    def maximum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gather(self, answer: Answer) -> list[Answer]:
        return [answer]

    def recorder(self, deliver: Callable[[timing.Steps], None]) -> _Recorder:
        return _Recorder(deliver)

    def set_rate(self, rate: float) -> None:
        self._steps.optimizer.rate = rate

    def rate(self) -> float:
        return float(self._steps.optimizer.rate)

    def memory_bytes(self) -> tuple[int, int]:
        from workloads.engines import tf_devices

        return tf_devices.memory_bytes(self._devices) or memory.process_memory_bytes()

    def evaluate(self, between_batches: Callable[[], None]) -> evaluation.Evaluation:
        total: Any = 0.0
        for batch in self._loader.test():
            total = total + self._steps.count(batch)
            between_batches()
        samples, loss_sum, *flat = total.numpy().tolist()
        classes = len(self._class_names)
        rows = [flat[i * classes : (i + 1) * classes] for i in range(3)]
        return evaluation.evaluation(self._class_names, round(samples), loss_sum, rows, self.num_test)


class _Recorder:
    """Times and losses of steps. TensorFlow has no events that tell when a step was over, so the host waits: for the
    step before the newest, which leaves the device one to work on.
    """

    def __init__(self, deliver: Callable[[timing.Steps], None]) -> None:
        self._deliver = deliver
        self._first_step = 0
        self._marks: list[float] = []
        self._losses: list[float] = []
        self._samples: list[int] = []
        self._newest: Any = None

    def start_epoch(self, step: int) -> None:
        self._first_step = step
        self._marks = [time.perf_counter()]

    def record(self, loss: Any, samples: int) -> None:
        before, self._newest = self._newest, loss
        self._samples.append(samples)
        if before is not None:
            self._read(before)

    def finish_epoch(self) -> None:
        if self._newest is not None:
            self._read(self._newest)
            self._newest = None
        self._hand_over()

    def _read(self, loss: Any) -> None:
        self._losses.append(float(loss.numpy()))
        self._marks.append(time.perf_counter())
        if len(self._losses) == timing.WINDOW_STEPS:
            self._hand_over()

    def _hand_over(self) -> None:
        count = len(self._losses)
        if not count:
            return
        samples, self._samples = self._samples[:count], self._samples[count:]
        times_s = [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]
        self._deliver(timing.Steps(self._first_step, times_s, self._losses, samples))
        self._first_step += count
        self._marks, self._losses = self._marks[-1:], []
