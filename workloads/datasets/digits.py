"""``digits``: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, part of the package: no download."""

from __future__ import annotations

import hashlib
from pathlib import Path

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import UNSIGNED_8, ImageData, Split
from workloads.errors import DatasetError
from workloads.lazy import lazy_imports
from workloads.registry import DatasetDeclaration, DatasetShape

with lazy_imports(__name__):
    import numpy as np
    from sklearn import datasets

MAX_LEVEL = 16.0
"""scikit-learn stores the number of dark pixels in a block of 4 x 4: 0 to 16."""
SHA256 = "0b7e9c3202d7bcd255d6a19a238d3743bf5e320ba74812a6679958a017c55382"
"""Of all images as uint8, then all labels as int64, both in stored order."""


def _load(_root: Path | None, _name: str, _config: TrainConfig) -> ImageData:
    """Split off every fifth image, counted class by class: fixed, and stratified to within one image."""
    stored = datasets.load_digits()
    images = np.round(stored.images * (UNSIGNED_8 / MAX_LEVEL)).astype(np.uint8)[:, None]
    labels = stored.target.astype("<i8")
    found = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    if found != SHA256:
        raise DatasetError(
            "scikit-learn's digits are not the 1,797 images that earlier results were measured on",
            where="sklearn.datasets.load_digits",
            why=f"SHA-256 {found}, not {SHA256}",
            hint="install scikit-learn again",
        )
    by_class = np.argsort(labels, kind="stable")
    is_test = np.zeros(len(labels), bool)
    is_test[by_class[::5]] = True
    train, test = (Split(labels[chosen].astype(np.int64), images[chosen]) for chosen in (~is_test, is_test))
    return ImageData.of(train, test, class_names=tuple("0123456789"), digest=SHA256)


DECLARATION = DatasetDeclaration(
    name="digits",
    summary="scikit-learn's 1,797 handwritten digits, 8 x 8 gray; embedded, the demo's data set.",
    packages=("scikit-learn",),
    needs_root=False,
    shape=lambda _root, _name: DatasetShape(image_size=8, channels=1, classes=10, num_train=1437, num_test=360),
    digest=lambda _root, _name: SHA256,
    load=_load,
)
