"""``digits``: scikit-learn's 1,797 real handwritten digits of 8 x 8 pixels. They come with the package: no download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import UNSIGNED_8, ImageData, Split, statistics
from workloads.errors import DatasetError
from workloads.registry import DatasetDeclaration, DatasetShape, Problem

NUM_TRAIN, NUM_TEST = 1437, 360
MAX_LEVEL = 16.0
"""scikit-learn counts the dark pixels of a 4 x 4 block: 0 to 16."""
SHA256 = "0b7e9c3202d7bcd255d6a19a238d3743bf5e320ba74812a6679958a017c55382"
"""Of all images as uint8, then all labels as int64, both in stored order."""


def _shape(_root: Path | None, _name: str) -> DatasetShape:
    return DatasetShape(image_size=8, channels=1, classes=10, num_train=NUM_TRAIN, num_test=NUM_TEST)


def _check(_root: Path | None, _name: str) -> list[Problem]:
    return []  # comes with a package, and packages are checked apart


def _digest(_root: Path | None, _name: str) -> str:
    return SHA256


def _prepare(_root: Path | None, _name: str, progress: Callable[[str], None]) -> None:
    progress("digits: comes with scikit-learn, nothing to do")


def _load(_root: Path | None, _name: str, _config: TrainConfig) -> ImageData:
    """Every fifth image of the classes laid end to end is a test image: fixed, and stratified to within one image."""
    import hashlib

    import numpy as np
    from sklearn.datasets import load_digits

    stored = load_digits()
    images = np.round(stored.images * (UNSIGNED_8 / MAX_LEVEL)).astype(np.uint8)[:, None]
    labels = stored.target.astype("<i8")
    found = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    if found != SHA256:
        raise DatasetError(
            "scikit-learn's digits are not the 1,797 images that results of this name stand for",
            where="sklearn.datasets.load_digits",
            why=f"SHA-256 {found}, not {SHA256}",
            hint="install scikit-learn again",
        )
    by_class = np.argsort(labels, kind="stable")
    is_test = np.zeros(len(labels), bool)
    is_test[by_class[::5]] = True
    train, test = (Split(labels[chosen].astype(np.int64), images[chosen]) for chosen in (~is_test, is_test))
    mean, std = statistics(train.images)
    return ImageData(
        train,
        test,
        class_names=tuple(str(digit) for digit in range(10)),
        channels=1,
        image_size=8,
        mean=mean,
        std=std,
        digest=SHA256,
    )


DECLARATION = DatasetDeclaration(
    name="digits",
    summary="scikit-learn's 1,797 handwritten digits, 8 x 8 gray; embedded, the demo's data set.",
    packages=("scikit-learn",),
    needs_root=False,
    shape=_shape,
    check=_check,
    digest=_digest,
    prepare=_prepare,
    load=_load,
)
