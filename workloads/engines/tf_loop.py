"""The TensorFlow engine, for every TensorFlow strategy: one process over all devices.

It trains what the torch engine trains: the same loop around the steps, images in the same order with the same crops,
the same architecture from the same weights, the same optimizer. Where torch is not installed, it starts from Keras'
initial weights and records that in ``provenance.initial_weights``.
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
    from workloads.engines.tf_step import KerasTrainer

Answer = TypeVar("Answer")

_POLICIES = {"fp64": "float64", "bf16": "mixed_bfloat16"}


def train(job: Job) -> None:
    """Train, evaluate, checkpoint and measure one run; fills ``job.result`` except state and end.

    Raises:
        JobError: the hardware or the data differ from the plan.
        InputError: the configuration cannot be trained.
        Interrupted: a signal asked the job to end.
    """
    config = job.spec.train
    declaration, options = settings.strategy(config)
    data = settings.load_data(job)
    if not isinstance(data, ImageData):
        raise InputError(f"{config.model} cannot be trained on {config.dataset} with TensorFlow: it takes images only")
    job.pulse.beat()
    size = settings.image_size(config, data)
    # Before TensorFlow: importing torchvision 0.29 after TensorFlow 2.21 kills the process.
    weights = _torch_weights(config, data, size, settings.data_root(job))
    job.pulse.beat()
    _set_environment()
    from workloads.engines import tf_devices, tf_input

    devices = tf_devices.choose(job)
    job.pulse.beat()
    trainer = _make_trainer(job, options, declaration, devices, data, size)
    if weights is not None:
        trainer.set_model(weights)
    tf_devices.describe_world(job, devices, "keras" if weights is None else "torch")
    job.result.num_parameters = sum(int(v.shape.num_elements()) for v in trainer.variables)
    # All variables that are not trainable are running statistics.
    has_batch_norm = any(not entry.trainable for entry in trainer.entries)
    job.result.batch_norm_treatment = settings.batch_norm_treatment(config, has_batch_norm)
    job.pulse.beat()
    loader = tf_input.TfLoader(data, config)
    job.result.num_train_samples = loader.num_train
    Training(job, _TensorFlow(trainer, loader, data.class_names, devices)).run()


def _set_environment() -> None:
    """Set what TensorFlow and Keras read when they are imported."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _make_trainer(
    job: Job,
    options: registry.Options,
    declaration: registry.StrategyDeclaration,
    devices: tuple[str, ...],
    data: ImageData,
    size: int,
) -> KerasTrainer:
    """Make the model under its strategy."""
    import keras
    import tensorflow as tf

    from workloads.engines.tf_input import Preparation
    from workloads.engines.tf_step import KerasTrainer
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
    return KerasTrainer(config, strategy, own, Preparation(data, size, dtype), classes)


def _torch_weights(config: TrainConfig, data: ImageData, size: int, root: Path | None) -> dict[str, Any] | None:
    """Return the weights that the torch engine starts from; None where torch or torchvision is not installed."""
    try:
        from workloads.engines import recipe

        module = recipe.build_model(config, data, size, root)
    except ImportError as error:
        if config.pretrained:
            raise InputError("pretrained weights are read by torch, which is not installed here") from error
        return None
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


class _TensorFlow:
    """Implements :class:`workloads.engines.backend.Backend`."""

    def __init__(
        self, trainer: KerasTrainer, loader: TfLoader, class_names: tuple[str, ...], devices: tuple[str, ...]
    ) -> None:
        from workloads.engines import tf_checkpoint

        self._trainer = trainer
        self._loader = loader
        self._class_names = class_names
        self._devices = devices
        self.num_train, self.num_test = loader.num_train, loader.num_test
        self.steps_per_epoch = loader.steps_per_epoch
        self.batches: Callable[[int], Iterator[TfBatch]] = loader.train
        self.train_step: Callable[[TfBatch], Any] = trainer.train_step
        self.seed = trainer.seed
        self.state_dict = trainer.state_dict
        self.load_state_dict = trainer.load_state_dict
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

    def recorder(self, deliver: Callable[[timing.StepTimes], None]) -> _Recorder:
        return _Recorder(deliver)

    def set_rate(self, rate: float) -> None:
        self._trainer.optimizer.rate = rate

    def rate(self) -> float:
        return float(self._trainer.optimizer.rate)

    def memory_bytes(self) -> tuple[int, int]:
        from workloads.engines import tf_devices

        return tf_devices.memory_bytes(self._devices) or memory.process_memory_bytes()

    def evaluate(self, between_batches: Callable[[], None]) -> evaluation.Evaluation:
        total: Any = 0.0
        for batch in self._loader.test():
            total = total + self._trainer.count(batch)
            between_batches()
        samples, loss_sum, *flat = total.numpy().tolist()
        classes = len(self._class_names)
        rows = [flat[i * classes : (i + 1) * classes] for i in range(3)]
        return evaluation.from_counts(self._class_names, round(samples), loss_sum, rows, self.num_test)


class _Recorder:
    """Times and losses of steps.

    TensorFlow's Python API has no events with the time at which a step ended. So the host waits for each loss, one step
    late, which leaves the device a step to work on.
    """

    def __init__(self, deliver: Callable[[timing.StepTimes], None]) -> None:
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
        previous, self._newest = self._newest, loss
        self._samples.append(samples)
        if previous is not None:
            self._read(previous)

    def finish_epoch(self) -> None:
        if self._newest is not None:
            self._read(self._newest)
            self._newest = None
        self._flush()

    def _read(self, loss: Any) -> None:
        self._losses.append(float(loss.numpy()))
        self._marks.append(time.perf_counter())
        if len(self._losses) == timing.WINDOW_STEPS:
            self._flush()

    def _flush(self) -> None:
        count = len(self._losses)
        if not count:
            return
        samples, self._samples = self._samples[:count], self._samples[count:]
        times_s = [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]
        self._deliver(timing.StepTimes(self._first_step, times_s, self._losses, samples))
        self._first_step += count
        self._marks, self._losses = self._marks[-1:], []
