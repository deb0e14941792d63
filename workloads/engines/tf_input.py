"""The resident loader's batches through tf.data: same arrays, same order, same crops, for the whole run in one process.

An epoch's order and crops are drawn when it starts; tf.data gathers and crops uint8 images ahead of the steps, and a
step normalizes and resizes them on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData
from workloads.loaders.augment import Augmentation
from workloads.loaders.protocol import Shard
from workloads.loaders.sample_order import SamplePlan, epoch_order

AHEAD = 2
"""Batches that tf.data prepares in advance."""


@dataclass(frozen=True, slots=True, eq=False)
class TfBatch:
    """A global batch."""

    pixels: Any
    """(samples, height, width, channels) uint8, as stored or cropped."""
    labels: Any
    """(samples,) int64."""
    num_global: int


class TfLoader(SamplePlan):
    """Training and test images of a run."""

    def __init__(self, data: ImageData, config: TrainConfig) -> None:
        super().__init__(data.train.labels, len(data.test), config, Shard(0, 1))
        self._augmentation = Augmentation.of(config.augment, image_size=data.size, seed=config.seed)
        with tf.device("/CPU:0"):
            images = data.train.images if self.num_train == len(data.train) else data.train.images[self._chosen]
            self._labels = tf.constant(data.train.labels[self._chosen])
            self._order, *self._crops = (
                tf.Variable(tf.zeros(self.num_train, tf.int64), trainable=False) for _ in range(4)
            )
            take = self._take(images)
            starts = tf.constant([part.start for part in self._training_parts], tf.int64)
            sizes = tf.constant([part.num_global for part in self._training_parts], tf.int64)
            steps = tf.data.Dataset.from_tensor_slices((starts, sizes))
            self._training = steps.map(lambda start, size: take(tf.range(start, start + size))).prefetch(AHEAD)
            pixels = tf.constant(np.ascontiguousarray(data.test.images.transpose(0, 2, 3, 1)))
            test = tf.data.Dataset.from_tensor_slices((pixels, tf.constant(data.test.labels)))
            self._test = test.batch(config.batch_size).prefetch(AHEAD)

    def train(self, epoch: int) -> Iterator[TfBatch]:
        """The batches of an epoch (0-based)."""
        order = epoch_order(self._chosen, self._seed, epoch)
        self._order.assign(order)
        if not self._augmentation.is_identity:
            drawn = self._augmentation.draw_many(epoch, self._chosen[order])
            for variable, values in zip(self._crops, drawn, strict=True):
                variable.assign(values)
        for part, (pixels, labels) in zip(self._training_parts, self._training, strict=True):
            yield TfBatch(pixels, labels, part.num_global)

    def test(self) -> Iterator[TfBatch]:
        """The test images in stored order."""
        for pixels, labels in self._test:
            yield TfBatch(pixels, labels, int(labels.shape[0]))

    def _take(self, images: np.ndarray) -> Callable[[Any], Any]:
        """(rows of the epoch's order) -> (pixels, labels)."""
        side, augmentation = images.shape[-1], self._augmentation
        plain = augmentation.is_identity
        # Pixels outside of an image come from one black row and column behind it.
        margin = 0 if plain else 1
        stored = np.zeros((len(images), side + margin, side + margin, images.shape[1]), np.uint8)
        stored[:, :side, :side] = images.transpose(0, 2, 3, 1)
        pixels = tf.constant(stored)
        sources = np.arange(side) + np.arange(augmentation.offsets)[:, None] - augmentation.padding
        table = np.where((sources < 0) | (sources >= side), side, sources)
        down, across = tf.constant(table), tf.constant(np.stack([table, table[:, ::-1]]))

        def take(rows: Any) -> Any:
            positions = tf.gather(self._order, rows)
            batch, labels = tf.gather(pixels, positions), tf.gather(self._labels, positions)
            if plain:
                return batch, labels
            top, left, mirrored = (tf.gather(crop, rows) for crop in self._crops)
            batch = tf.gather(batch, tf.gather(down, top), axis=1, batch_dims=1)
            columns = tf.gather_nd(across, tf.stack([mirrored, left], axis=1))
            return tf.gather(batch, columns, axis=2, batch_dims=1), labels

        return take


class Preparation:
    """Turns uint8 pixels into the model's input inside a step: normalized, then resized as the resident loader does."""

    def __init__(self, data: ImageData, image_size: int, dtype: str) -> None:
        self.dtype = dtype
        deviations = np.array(data.std)
        self._scale, self._shift = 1 / (255 * deviations), -np.array(data.mean) / deviations
        self._weights = None if image_size == data.size else _resampling(data.size, image_size)

    def __call__(self, pixels: Any) -> Any:
        x = tf.cast(pixels, self.dtype)
        x = x * tf.constant(self._scale, self.dtype) + tf.constant(self._shift, self.dtype)
        if self._weights is None:
            return x
        weights = tf.constant(self._weights, self.dtype)
        return tf.einsum("oh,bhwc,pw->bopc", weights, x, weights)


def _resampling(inputs: int, outputs: int) -> np.ndarray:
    """Return the (outputs, inputs) weights of bilinear interpolation with torch's ``antialias``.

    ``tf.image.resize`` returns float32 for every method but nearest neighbor, so it cannot serve fp64 runs.
    """
    scale = inputs / outputs
    support = max(scale, 1.0)
    weights = np.zeros((outputs, inputs))
    for output in range(outputs):
        center = scale * (output + 0.5)
        first = max(int(center - support + 0.5), 0)
        sources = np.arange(first, min(int(center + support + 0.5), inputs))
        near = np.maximum(0.0, 1.0 - np.abs(sources - center + 0.5) / support)
        weights[output, sources] = near / near.sum()
    return weights
