"""What a ``TrainConfig`` means in every framework: plug-ins, data, seeds, image size, learning rate."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path

from workloads import registry
from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData
from workloads.datasets.shared.sequence_data import SequenceData
from workloads.errors import DatasetError, InputError
from workloads.job import staging
from workloads.job.context import Job
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import numpy as np

    from workloads.loaders import sample_order


def strategy(config: TrainConfig) -> tuple[registry.StrategyDeclaration, registry.Options]:
    """Return the declaration of the configured strategy and all its options, including defaults."""
    declaration = registry.find(registry.strategies(), config.strategy)
    if declaration is None:
        raise InputError(f"no strategy is named {config.strategy!r} here")
    return declaration, declaration.options_with_defaults(config.strategy_options)


def check_batch_norm(config: TrainConfig, num_train: int) -> None:
    """Check a model with batch norm again: of some models, the plan cannot know that they have it.

    Args:
        num_train: samples of an epoch.

    Raises:
        InputError: the strategy cannot train batch norm with these options or batches.
    """
    declaration, options = strategy(config)
    why = declaration.unsupported_batch_norm(options) or declaration.unsupported_batches(
        config.to_json(), options, config.hardware, num_train
    )
    if why:
        raise InputError(
            f"{config.model} has batch norm, and {why}", where="experiment.toml", hint="change that, and submit again"
        )


def batch_norm_treatment(config: TrainConfig, has_batch_norm: bool) -> str:
    """Return what batch norm sees, for the result."""
    if not has_batch_norm:
        return "none"
    return "frozen" if config.batch_norm == "frozen" else strategy(config)[0].batch_norm_treatment


def model(config: TrainConfig) -> registry.ModelDeclaration:
    """Return the declaration of the configured model.

    Raises:
        InputError: there is none of that name, or a key that is set means nothing for it.
    """
    declaration = registry.find(registry.models(), config.model)
    if declaration is None:
        raise InputError(f"no model is named {config.model!r} here", hint="is the package that brings it installed?")
    for key, why in declaration.ignored_keys(config.to_json()).items():
        raise InputError(why, where=f"experiment.toml: {key}", hint="plan and submit again")
    return declaration


def data_root(job: Job) -> Path | None:
    """Return the folder of data sets and pretrained weights; None when the run has none."""
    return Path(job.spec.data_root) if job.spec.data_root else None


def load_data(job: Job) -> ImageData | SequenceData:
    """Load the planned data set.

    Raises:
        DatasetError: it is damaged, or its content differs from the plan.
        InputError: there is none of that name, or a key that is set means nothing for it.
    """
    config = job.spec.train
    declaration = registry.find(registry.datasets(), config.dataset)
    if declaration is None:
        raise InputError(f"no data set is named {config.dataset!r} here")
    for why in declaration.ignored_keys(config.to_json()).values():
        raise InputError(why, where="experiment.toml", hint="plan and submit again")
    data = declaration.load(staging.data_root(job, declaration), config.dataset, config)
    planned = job.spec.dataset_digest
    if planned and data.digest and data.digest != planned:
        raise DatasetError(
            f"the content of data set {config.dataset!r} is not what was planned",
            where=job.spec.data_root,
            why=f"digest {data.digest}, planned {planned}",
            hint="plan and submit again",
        )
    job.result.dataset_digest = data.digest
    return _with_test_fraction(data, config) if config.test_fraction < 1.0 else data


def _with_test_fraction(data: ImageData | SequenceData, config: TrainConfig) -> ImageData | SequenceData:
    """Keep the share of the test samples that ``test_fraction`` names."""
    labels = np.zeros(len(data.test), np.int64) if isinstance(data, SequenceData) else data.test.labels
    chosen = sample_order.subset(labels, config.test_fraction, config.seed)
    if isinstance(data, SequenceData):
        return dataclasses.replace(data, test=data.test[chosen])
    return dataclasses.replace(data, test=data.test.part(chosen))


def seed_of(*parts: int) -> int:
    """Return a seed that depends on every part and is the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def image_size(config: TrainConfig, data: ImageData | SequenceData) -> int:
    """Return the side of the model's input in pixels; for sequences, their length.

    Raises:
        InputError: the model does not support that size.
    """
    try:
        return model(config).input_size(config.model, config.image_size, data.size)
    except ValueError as error:
        raise InputError(
            str(error), where="experiment.toml: image_size", hint="set image_size to one that fits"
        ) from error


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (0-based) of ``steps``.

    Warm-up rises linearly and reaches ``lr`` at its last step; no step has a rate of zero. ``cosine`` and ``linear``
    fall from ``lr`` in the step after it and would reach zero one step after the last.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (1.0 - done) if config.schedule == "linear" else config.lr
