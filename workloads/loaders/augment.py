"""Random augmentation, a function of (seed, epoch, sample) only: equal for any world size, loader and resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from workloads.lazy import lazy_imports
from workloads.loaders.sample_order import Integers, Stream, hash_of, hashes_of, stream_key

with lazy_imports(__name__):
    import torch
    from PIL import Image, ImageOps

_Bits = TypeVar("_Bits", int, "torch.Tensor", "NDArray[np.int64]")

PADDING_DIVISOR = 8
"""``crop_flip`` pads each side by an eighth of the image: 4 pixels at 32, as He et al. (2015) do for CIFAR-10."""
_OFFSET_BITS = 20
"""Bits of the hash for each crop offset; the bias against the last offset is below 1e-4 up to 100 offsets."""


@dataclass(frozen=True, slots=True)
class Augmentation:
    """``none``, ``flip`` or ``crop_flip`` on stored images of one size."""

    padding: int
    """Black pixels added on each side before a crop of the stored size."""
    flips: bool
    seed: int

    @classmethod
    def of(cls, augment: str, *, image_size: int, seed: int) -> Self:
        """Interpret ``TrainConfig.augment`` for stored images of ``image_size`` pixels per side."""
        padding = image_size // PADDING_DIVISOR if augment == "crop_flip" else 0
        return cls(padding, flips=augment in {"flip", "crop_flip"}, seed=seed)

    @property
    def offsets(self) -> int:
        """Number of crop positions along one axis."""
        return 2 * self.padding + 1

    @property
    def is_identity(self) -> bool:
        return not self.flips and not self.padding

    def draw(self, epoch: int, index: int) -> tuple[int, int, bool]:
        """Return top and left of the crop in the padded image, and whether it is mirrored, for one sample."""
        bits = hash_of(stream_key(Stream.AUGMENT, self.seed, epoch), index)
        top, left = self._corner(bits)
        return top, left, self.flips and bool(bits & 1)

    def draw_many(self, epoch: int, indices: Integers) -> tuple[Integers, Integers, Integers]:
        """:meth:`draw` for many samples, as int64 on the device of ``indices``."""
        bits = hashes_of(stream_key(Stream.AUGMENT, self.seed, epoch), indices)
        top, left = self._corner(bits)
        return top, left, bits & int(self.flips)

    def _corner(self, bits: _Bits) -> tuple[_Bits, _Bits]:
        return self._offset(bits >> 1), self._offset(bits >> (1 + _OFFSET_BITS))

    def _offset(self, bits: _Bits) -> _Bits:
        return ((bits & ((1 << _OFFSET_BITS) - 1)) * self.offsets) >> _OFFSET_BITS

    def apply(self, picture: Image.Image, epoch: int, index: int) -> Image.Image:
        """Augment one picture with Pillow."""
        top, left, mirrored = self.draw(epoch, index)
        if self.padding:
            width, height = picture.size
            padded = ImageOps.expand(picture, border=self.padding, fill=0)
            picture = padded.crop((left, top, left + width, top + height))
        return ImageOps.mirror(picture) if mirrored else picture


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Convert uint8 pixels to the model's input: mean 0 and deviation 1 over the training images."""

    scale: torch.Tensor
    """(channels, 1, 1)"""
    shift: torch.Tensor

    @classmethod
    def of(cls, mean: tuple[float, ...], std: tuple[float, ...], *, device: torch.device, dtype: torch.dtype) -> Self:
        """From statistics on the scale black 0, white 1."""
        means, deviations = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (mean, std))
        return cls(*(v.to(device, dtype) for v in (1 / (255 * deviations), -means / deviations)))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        if pixels.is_cuda:
            return torch.addcmul(self.shift, pixels, self.scale)  # one kernel, which converts too
        # On a CPU addcmul of mixed types takes eight times as long as converting first.
        return pixels.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
