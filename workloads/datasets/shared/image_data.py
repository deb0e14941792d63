"""Labelled images as the loaders take them. Not a data set itself; numpy and Pillow load when needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workloads.errors import DatasetError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

UNSIGNED_8 = 255.0
"""What a pixel of 1.0 is stored as."""

GRAY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "F"})
"""Pillow's modes that hold one channel (an alpha channel is dropped)."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The training or the test half of a data set, in a fixed order."""

    labels: NDArray[np.int64]
    """(images,)"""
    images: NDArray[np.uint8]
    """(images, channels, height, width); memory-mapped where it comes from a cache."""
    files: tuple[Path, ...] | None = None
    """Where each image was decoded from; the ``dataloader`` loader decodes it again, as the published settings do."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: NDArray[np.int64]) -> Split:
        """Some of the images, in the order of ``indices``."""
        files = None if self.files is None else tuple(self.files[index] for index in indices)
        return Split(self.labels[indices], self.images[indices], files)

    def pil(self, index: int) -> Image.Image:
        """One image as Pillow has it.

        Raises:
            DatasetError: its file is gone or damaged.
        """
        channels, size = self.images.shape[1:3]
        if self.files is not None:
            return decode(self.files[index], channels=channels, size=size)
        from PIL import Image

        pixels = self.images[index]
        return Image.fromarray(pixels[0] if channels == 1 else pixels.transpose(1, 2, 0))


@dataclass(frozen=True, slots=True, eq=False)
class ImageData:
    """A whole data set, verified."""

    train: Split
    test: Split
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    """Pixels a side of a stored image; loaders resize from it to what the model is fed."""
    mean: tuple[float, ...]
    """Per channel over the training images, black 0 and white 1."""
    std: tuple[float, ...]
    digest: str
    """Of the content; equal to what the declaration's ``digest`` says while nothing has changed."""

    @property
    def size(self) -> int:
        """Pixels a side of a stored image."""
        return self.image_size


def statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, black 0 and white 1; exact, so equal on every machine.

    A channel that never varies gets a deviation of 1, so that normalising stays finite.
    """
    import numpy as np

    counts = np.zeros((images.shape[1], 256), np.int64)
    for start in range(0, len(images), 1024):  # bounded memory: the images may be a mapped file larger than it
        for channel, count in enumerate(counts):
            count += np.bincount(images[start : start + 1024, channel].ravel(), minlength=256)
    levels = np.arange(256) / UNSIGNED_8
    shares = counts / counts.sum(axis=1, keepdims=True)
    means = shares @ levels
    deviations = np.sqrt((shares * (levels - means[:, None]) ** 2).sum(axis=1))
    return tuple(means.tolist()), tuple(float(d) if d > 0 else 1.0 for d in deviations)


def decode(path: Path, *, channels: int, size: int) -> Image.Image:
    """Read an image file as gray or RGB, ``size`` pixels a side: shorter side resized, centre cropped where it differs.

    Raises:
        DatasetError: the file is gone, damaged or no image; it is named.
    """
    from PIL import Image

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
    """The error for an image file that cannot be read, or is so large that PIL will not."""
    from PIL import Image

    if isinstance(error, Image.DecompressionBombError):
        return DatasetError(
            "this image is too large to be read",
            where=str(path),
            why=str(error),
            hint="make the image smaller; models see far fewer pixels",
        )
    return DatasetError(
        "cannot read this image",
        where=str(path),
        why=str(error) or type(error).__name__,
        hint="put a whole copy of the file in its place, or delete it together with the data set's .orchestrate-cache",
    )
