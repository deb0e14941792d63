"""Labelled images as the loaders take them. Imports numpy and Pillow only when needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from workloads.errors import DatasetError
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

UNSIGNED_8 = 255.0
"""Stored value of a pixel of 1.0."""
GRAY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "F"})
"""Pillow modes of one channel (an alpha channel is dropped)."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The training or the test half of a data set, in a fixed order."""

    labels: NDArray[np.int64]
    """(images,)"""
    images: NDArray[np.uint8]
    """(images, channels, height, width); memory-mapped where it comes from a cache."""
    files: tuple[Path, ...] | None = None
    """File of each image; the ``dataloader`` loader decodes it again, as the published experiments do."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: NDArray[np.int64]) -> Split:
        """Return some of the images, in the order of ``indices``."""
        files = None if self.files is None else tuple(self.files[index] for index in indices)
        return Split(self.labels[indices], self.images[indices], files)

    def pil(self, index: int) -> Image.Image:
        """Return one image for Pillow. Raises DatasetError where its file is missing or damaged."""
        channels, size = self.images.shape[1:3]
        if self.files is not None:
            return decode(self.files[index], channels=channels, size=size)
        pixels = self.images[index]
        return Image.fromarray(pixels[0] if channels == 1 else pixels.transpose(1, 2, 0))


@dataclass(frozen=True, slots=True, eq=False)
class ImageData:
    """A whole data set, verified."""

    train: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """Per channel over the training images, black 0 and white 1."""
    std: tuple[float, ...]
    digest: str
    """Of the content; equals the declaration's ``digest`` while nothing has changed."""

    @classmethod
    def of(cls, train: Split, test: Split, *, class_names: tuple[str, ...], digest: str) -> Self:
        """Compute mean and deviation from the training images."""
        return cls(train, test, class_names, *statistics(train.images), digest)

    @property
    def channels(self) -> int:
        return int(self.train.images.shape[1])

    @property
    def size(self) -> int:
        """Pixels per side of a stored image; loaders resize it to the model's input size."""
        return int(self.train.images.shape[-1])


def statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, black 0 and white 1; exact, so equal on every machine.

    A constant channel gets a deviation of 1, so that normalizing stays finite.
    """
    counts = np.zeros((images.shape[1], 256), np.int64)
    for start in range(0, len(images), 1024):  # the images may be a mapped file larger than memory
        for channel, count in enumerate(counts):
            count += np.bincount(images[start : start + 1024, channel].ravel(), minlength=256)
    levels = np.arange(256) / UNSIGNED_8
    shares = counts / counts.sum(axis=1, keepdims=True)
    means = shares @ levels
    deviations = np.sqrt((shares * (levels - means[:, None]) ** 2).sum(axis=1))
    return tuple(means.tolist()), tuple(float(d) if d > 0 else 1.0 for d in deviations)


def decode(path: Path, *, channels: int, size: int) -> Image.Image:
    """Read an image file as gray or RGB at ``size`` x ``size`` pixels: resize the shorter side, crop the centre.

    Raises:
        DatasetError: the file is missing, damaged or no image.
    """
    try:
        with Image.open(path) as stored:
            picture = stored.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise unreadable(path, error) from error
    if picture.size == (size, size):
        return picture
    scale = size / min(picture.size)
    width, height = (max(size, round(side * scale)) for side in picture.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


def unreadable(path: Path, error: Exception) -> DatasetError:
    """Return the error for an image file that Pillow cannot read, or does not read because of its size."""
    what = "cannot read this image"
    hint = "put a whole copy of the file in its place, or delete it and the data set's .orchestrate-cache"
    # Pillow raises this above twice Image.MAX_IMAGE_PIXELS ("Decompression bomb" in its reference of Image.open).
    if isinstance(error, Image.DecompressionBombError):
        what, hint = "this image is larger than Pillow's limit", "make the image smaller; models see far fewer pixels"
    return DatasetError(what, where=str(path), why=str(error) or type(error).__name__, hint=hint)
