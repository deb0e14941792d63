"""``synthetic``: images made from the seed, at any size. For measuring speed without data on disk; learnable, so that
accuracy still says whether training works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData, Split, statistics
from workloads.registry import DatasetDeclaration, DatasetShape, Problem

if TYPE_CHECKING:
    import numpy as np

IMAGE_SIZE, CHANNELS, CLASSES = 32, 3, 10
NUM_TRAIN, NUM_TEST = 2048, 512
"""Few, so that 224 x 224 pixels stay below 0.4 GB; multiples of 8, so that words make whole sets."""
PATCHES = 4
"""A class is a pattern of so many patches a side; noise of twice its spread lies over it."""
DIGEST = "synthetic-2"
"""Raised when the images of a seed change."""


def _shape(_root: Path | None, _name: str) -> DatasetShape:
    return DatasetShape(
        image_size=IMAGE_SIZE, channels=CHANNELS, classes=CLASSES, num_train=NUM_TRAIN, num_test=NUM_TEST
    )


def _check(_root: Path | None, _name: str) -> list[Problem]:
    return []


def _digest(_root: Path | None, _name: str) -> str:
    return DIGEST


def _prepare(_root: Path | None, _name: str, progress: Callable[[str], None]) -> None:
    progress("synthetic: made when a run starts, nothing to do")


def _load(_root: Path | None, _name: str, config: TrainConfig) -> ImageData:
    import numpy as np

    size = config.image_size or IMAGE_SIZE
    generator = np.random.Generator(np.random.Philox(key=config.seed % 2**64))
    patches = generator.integers(0, 64, (CLASSES, CHANNELS, PATCHES, PATCHES), np.uint8)
    nearest = np.arange(size) * PATCHES // size
    patterns = patches[:, :, nearest][:, :, :, nearest]
    train, test = (_split(generator, patterns, count) for count in (NUM_TRAIN, NUM_TEST))
    mean, std = statistics(train.images)
    return ImageData(
        train,
        test,
        class_names=tuple(f"pattern {number}" for number in range(CLASSES)),
        channels=CHANNELS,
        image_size=size,
        mean=mean,
        std=std,
        digest=DIGEST,
    )


def _split(generator: np.random.Generator, patterns: np.ndarray, count: int) -> Split:
    import numpy as np

    labels = np.arange(count, dtype=np.int64) % CLASSES
    shape = (count, *patterns.shape[1:])
    # Whole random words, of which seven bits a byte are kept, and all in place: most of what a run takes to start.
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
    shape=_shape,
    check=_check,
    digest=_digest,
    prepare=_prepare,
    load=_load,
)
