"""The TensorFlow engine, for every TensorFlow strategy: one process over all devices.

It trains what the torch engine trains: the same loop around the steps, images in the same order with the same crops,
the same architecture from the same weights, the same optimizer. Where torch is not installed, it starts from Keras'
initial weights and records that in ``provenance.initial_weights``.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData
from workloads.engines import settings
from workloads.engines.training import Training
from workloads.errors import InputError
from workloads.job.context import Job
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import keras
    import tensorflow as tf

    from workloads.engines import recipe, tf_backend, tf_devices, tf_input
    from workloads.models.keras_forms import layers as keras_layers
    from workloads.strategies.shared import keras_protocol

_POLICIES = {"fp64": "float64", "bf16": "mixed_bfloat16"}


def train(job: Job) -> None:
    """Train, evaluate, checkpoint and measure one run; fills ``job.result`` except state and end.

    Raises:
        JobError: the hardware or the data differ from the plan.
        InputError: the configuration cannot be trained.
        Interrupted: a signal asked the job to end.
    """
    config = job.spec.train
    data = settings.load_data(job)
    if not isinstance(data, ImageData):
        raise InputError(f"{config.model} cannot be trained on {config.dataset} with TensorFlow: it takes images only")
    job.pulse.beat()
    size = settings.image_size(config, data)
    # Before TensorFlow: importing torchvision 0.29 after TensorFlow 2.21 kills the process.
    weights = _torch_weights(config, data, size, settings.data_root(job))
    job.pulse.beat()
    # Read by Keras and TensorFlow when they are imported.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    devices = tf_devices.choose(job)
    job.pulse.beat()
    backend = _make_backend(job, devices, data, size)
    if weights is not None:
        backend.set_model(weights)
    tf_devices.describe_world(job, devices, "keras" if weights is None else "torch")
    job.result.num_parameters = sum(int(v.shape.num_elements()) for v in backend.variables)
    job.result.num_train_samples = backend.num_train
    # All variables that are not trainable are running statistics.
    has_batch_norm = any(not entry.trainable for entry in backend.entries)
    job.result.batch_norm_treatment = settings.batch_norm_treatment(config, has_batch_norm)
    job.pulse.beat()
    Training(job, backend).run()


def _make_backend(job: Job, devices: tuple[str, ...], data: ImageData, size: int) -> tf_backend.KerasBackend:
    """Make the model under its strategy."""
    config = job.spec.train
    declaration, options = settings.strategy(config)
    classes = len(data.class_names)
    keras.config.set_dtype_policy(_POLICIES.get(config.precision, "float32"))
    keras.utils.set_random_seed(config.seed % 2**32)  # it seeds numpy too, whose seeds have 32 bits
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    make_layers = settings.model(config).keras_layers
    if make_layers is None:
        raise InputError(f"{config.model} is not written for TensorFlow, which {config.strategy} needs")

    new_maker = partial(keras_layers.Maker, dropout=config.dropout, freeze_batch_norm=config.batch_norm == "frozen")
    dtype = "float64" if config.precision == "fp64" else "float32"
    maker = new_maker()
    example = partial(tf.zeros, (1, size, size, data.channels), dtype)

    def layer_sizes() -> list[float]:
        x, counts = example(), []
        with tf.device("/CPU:0"):
            for layer in make_layers(new_maker(), config, classes):
                x = layer(x)
                counts.append(float(layer.count_params()))
        return counts

    task = keras_protocol.KerasTask(
        config=config,
        options=options,
        devices=devices,
        layers=partial(make_layers, maker, config, classes),
        layer_sizes=layer_sizes,
        note_balance=partial(setattr, job.result, "balance_applied"),
        example=example,
    )
    strategy: Any = declaration.create()(task)
    prepare, loader = tf_input.Preparation(data, size, dtype), tf_input.TfLoader(data, config)
    return tf_backend.KerasBackend(config, strategy, maker, prepare, loader, data.class_names, devices)


def _torch_weights(config: TrainConfig, data: ImageData, size: int, root: Path | None) -> dict[str, Any] | None:
    """Return the weights that the torch engine starts from; None where torch or torchvision is not installed."""
    try:
        module = recipe.build_model(config, data, size, root)
    except ImportError as error:
        if config.pretrained:
            raise InputError("pretrained weights are read by torch, which is not installed here") from error
        return None
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}
