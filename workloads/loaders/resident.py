"""``resident``: uint8 images stay on the device, which augments, normalizes and resizes one batch at a time.

The device computes the order, labels and augmentation of an epoch when the epoch starts. A step then adds two to four
kernels, and one or two more for a resize, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData
from workloads.errors import DatasetError
from workloads.loaders.augment import Augmentation, Normalizer
from workloads.loaders.gather import Gatherer, make_gatherer, on_device
from workloads.loaders.protocol import Batch, Shard
from workloads.loaders.sample_order import SamplePlan, epoch_order


class ResidentLoader(SamplePlan):
    """See :class:`workloads.loaders.protocol.Loader`."""

    def __init__(
        self,
        data: ImageData,
        config: TrainConfig,
        *,
        image_size: int,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard,
    ) -> None:
        super().__init__(data.train.labels, len(data.test), config, shard)
        self._image_size = image_size
        self._memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self._normalize = Normalizer.of(data.mean, data.std, device=device, dtype=dtype)
        augmentation = Augmentation.of(config.augment, image_size=data.size, seed=config.seed)
        train_images = data.train.images if self.num_train == len(data.train) else data.train.images[self._chosen]
        self._own_test = shard.part(self.num_test)
        test = self._own_test if self._own_test.start < self._own_test.stop else slice(1)
        try:
            self._train: Gatherer = make_gatherer(
                train_images, augmentation, device, channels_last=config.channels_last
            )
            self._test_images = on_device(data.test.images[test], device)
        except torch.OutOfMemoryError as error:
            size_gb = (train_images.nbytes + data.test.images.nbytes) / 1e9
            raise DatasetError(
                f"the data set's {size_gb:.1f} GB do not fit on the device",
                why=str(error).partition("\n")[0],
                hint='set loader = "dataloader", a smaller train_fraction or a smaller image_size',
            ) from error
        self._indices = torch.tensor(self._chosen, device=device)
        self._labels = torch.tensor(data.train.labels[self._chosen], device=device)
        self._test_labels = torch.tensor(data.test.labels[test], device=device)

    def train(self, epoch: int) -> Iterator[Batch]:
        order = epoch_order(self._indices, self._seed, epoch)
        self._train.begin(epoch, order, self._indices[order])
        labels = self._labels[order]
        for part in self._training_parts:
            yield Batch(self._finished(self._train.take(part.rows)), labels[part.rows], part.num_local, part.num_global)

    def test(self) -> Iterator[Batch]:
        for part in self._evaluation_parts:
            start = part.start - self._own_test.start
            rows = slice(start, start + part.num_local) if part.num_local else slice(1)
            pixels = self._test_images[rows]
            yield Batch(self._finished(pixels), self._test_labels[rows], part.num_local, part.num_global)

    def close(self) -> None:
        for name in ("_train", "_test_images"):
            vars(self).pop(name, None)  # closing twice is allowed

    def _finished(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self._normalize(pixels.contiguous(memory_format=self._memory_format))
        if self._image_size == x.shape[-1]:
            return x
        size = [self._image_size, self._image_size]
        return torch.nn.functional.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True)
