"""``synthetic``: images generated from the seed, at any size, to measure speed without data on disk.

A model can learn them, so accuracy still shows whether training works.
"""

from __future__ import annotations

import math
from pathlib import Path

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.lazy import lazy_imports
from workloads.registry import DatasetDeclaration, DatasetShape

with lazy_imports(__name__):
    import numpy as np

IMAGE_SIZE, CHANNELS, CLASSES = 32, 3, 10
NUM_TRAIN, NUM_TEST = 2048, 512
"""Few, so that 224 x 224 pixels stay below 0.4 GB; multiples of 8, so that 64-bit words fill them exactly."""
PATCHES = 4
"""Patches per side of a class's pattern; noise of twice its spread is added."""
DIGEST = "synthetic-2"
"""A new one whenever the images of a seed change."""


def _load(_root: Path | None, _name: str, config: TrainConfig) -> ImageData:
    size = config.image_size or IMAGE_SIZE
    generator = np.random.Generator(np.random.Philox(key=config.seed % 2**64))
    patches = generator.integers(0, 64, (CLASSES, CHANNELS, PATCHES, PATCHES), np.uint8)
    nearest = np.arange(size) * PATCHES // size
    patterns = patches[:, :, nearest][:, :, :, nearest]
    train, test = (_split(generator, patterns, count) for count in (NUM_TRAIN, NUM_TEST))
    names = tuple(f"pattern {number}" for number in range(CLASSES))
    return ImageData.of(train, test, class_names=names, digest=DIGEST)


def _split(generator: np.random.Generator, patterns: np.ndarray, count: int) -> Split:
    labels = np.arange(count, dtype=np.int64) % CLASSES
    shape = (count, *patterns.shape[1:])
    # 64-bit words instead of bytes, masked in place: this takes most of a run's start-up.
    words = generator.integers(0, 2**64, math.prod(shape) // 8, np.uint64).astype("<u8", copy=False)
    images = words.view(np.uint8).reshape(shape)
    images &= np.uint8(127)
    for label, pattern in enumerate(patterns):
        images[label::CLASSES] += pattern
    return Split(labels, images)


DECLARATION = DatasetDeclaration(
    name="synthetic",
    summary="2,560 learnable images of 10 classes made from the seed, 32 x 32 RGB or image_size.",
    packages=("numpy",),
    needs_root=False,
    shape=lambda _root, _name: DatasetShape(
        image_size=IMAGE_SIZE, channels=CHANNELS, classes=CLASSES, num_train=NUM_TRAIN, num_test=NUM_TEST
    ),
    digest=lambda _root, _name: DIGEST,
    load=_load,
)
