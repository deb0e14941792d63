"""Selection and augmentation of a batch of resident uint8 images: three implementations with equal results.

``positions`` index the stored images; ``indices`` are the numbers of the samples in the whole data set, which decide
their augmentation. Both are in the order of the epoch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from workloads.loaders.augment import Augmentation

CHUNK = 2048
"""Images copied to the device at once, which bounds the additional host memory."""


class Gatherer(Protocol):
    """Holds the training images of one rank."""

    def begin(self, epoch: int, positions: torch.Tensor, indices: torch.Tensor) -> None:
        """Set the order of an epoch and draw its augmentation."""

    def take(self, rows: slice) -> torch.Tensor:
        """Return the augmented images (batch, channels, height, width) at these rows of the order."""


def make_gatherer(
    images: NDArray[np.uint8], augmentation: Augmentation, device: torch.device, *, channels_last: bool
) -> Gatherer:
    """Return the fastest implementation on this device. May raise torch.OutOfMemoryError."""
    if augmentation.is_identity:
        return Plain(images, device)
    if device.type == "cpu":
        return CropByCopy(images, augmentation)
    return CropByTable(images, augmentation, device, channels_last=channels_last)


def on_device(images: NDArray[np.uint8], device: torch.device, *, margin: int = 0) -> torch.Tensor:
    """Copy images to the device, with ``margin`` black rows and columns below and to the right of each."""
    count, channels, height, width = images.shape
    stored = torch.zeros(count, channels, height + margin, width + margin, dtype=torch.uint8, device=device)
    for start in range(0, count, CHUNK):
        part = torch.tensor(images[start : start + CHUNK])
        stored[start : start + CHUNK, :, :height, :width].copy_(part)
    return stored


class Plain:
    """No augmentation."""

    def __init__(self, images: NDArray[np.uint8], device: torch.device) -> None:
        self._images = on_device(images, device)

    def begin(self, epoch: int, positions: torch.Tensor, indices: torch.Tensor) -> None:  # noqa: ARG002 (nothing random)
        self._positions = positions

    def take(self, rows: slice) -> torch.Tensor:
        return self._images[self._positions[rows]]


class CropByTable:
    """Three kernels per batch: the columns of its crops, the address of each pixel, the pixels.

    A pixel's address is that of its row in its image plus that of its column in its channel, both from tables for each
    offset of a crop. The black border is one extra row and column that out-of-range pixels refer to, so images grow by
    1/side, not by a quarter. One index by image, channel, row and column is shorter code, but torch (seen in 2.11)
    copies each of the four index tensors first.
    """

    def __init__(
        self, images: NDArray[np.uint8], augmentation: Augmentation, device: torch.device, *, channels_last: bool
    ) -> None:
        side = images.shape[-1]
        stored = on_device(images, device, margin=1)
        self._pixels = stored.view(-1)
        self._image, channel, row, _ = stored.stride()
        self._augmentation = augmentation
        self._channels_last = channels_last
        offsets = torch.arange(augmentation.offsets, device=device)[:, None]
        sources = torch.arange(side, device=device) + offsets - augmentation.padding
        sources = torch.where((sources < 0) | (sources >= side), side, sources)
        self._rows = sources * row
        columns = torch.cat([sources, sources.flip(1)])
        channels = torch.arange(images.shape[1], device=device) * channel
        # Addresses in memory order, so that no kernel only changes the layout.
        self._columns = (
            columns[:, :, None] + channels if channels_last else columns[:, None, :] + channels[None, :, None]
        )

    def begin(self, epoch: int, positions: torch.Tensor, indices: torch.Tensor) -> None:
        tops, lefts, mirrored = self._augmentation.draw_many(epoch, indices)
        self._row_addresses = self._rows[tops] + positions[:, None] * self._image
        self._lefts = lefts + mirrored * self._augmentation.offsets

    def take(self, rows: slice) -> torch.Tensor:
        row, column = self._row_addresses[rows], self._columns[self._lefts[rows]]
        if self._channels_last:
            return self._pixels[row[:, :, None, None] + column[:, None]].permute(0, 3, 1, 2)
        return self._pixels[row[:, None, :, None] + column[:, :, None, :]]


class CropByCopy:
    """numpy copies whole rows out of a view of all crops; on a CPU core ten times as fast as indexing every pixel."""

    def __init__(self, images: NDArray[np.uint8], augmentation: Augmentation) -> None:
        padding, side = augmentation.padding, images.shape[-1]
        padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        crops = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(2, 3))
        self._crops = crops.transpose(0, 2, 3, 1, 4, 5)  # image, top, left, channel, height, width
        self._augmentation = augmentation

    def begin(self, epoch: int, positions: torch.Tensor, indices: torch.Tensor) -> None:
        draws = self._augmentation.draw_many(epoch, indices)
        self._positions = positions.numpy()
        self._tops, self._lefts, self._mirrored = (drawn.numpy() for drawn in draws)

    def take(self, rows: slice) -> torch.Tensor:
        pixels = self._crops[self._positions[rows], self._tops[rows], self._lefts[rows]]
        mirrored = self._mirrored[rows].nonzero()[0]
        pixels[mirrored] = pixels[mirrored, :, :, ::-1]
        return torch.from_numpy(pixels)
