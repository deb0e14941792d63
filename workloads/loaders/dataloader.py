"""``dataloader``: torch's DataLoader with Pillow and worker processes, as in most published training code.

Every request for a batch names its epoch and samples, so workers live for the whole run and need no state. They are
forked, as in the published code on Linux: images are shared instead of pickled, and no worker uses the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.errors import DatasetError
from workloads.loaders.augment import Augmentation, Normalizer
from workloads.loaders.protocol import Batch, Shard, worker_error
from workloads.loaders.sample_order import Part, SamplePlan, epoch_order

TEST = -1
"""Takes the place of an epoch for the test split."""

Pixels: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One batch, as a worker gets the request for it."""

    epoch: int
    indices: tuple[int, ...]


@dataclass(slots=True)
class _Requests:
    """The requests of the next pass; the DataLoader's sampler."""

    pending: list[BatchRequest] = field(default_factory=list)

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.pending)


class _Pictures(Dataset["Pixels | DatasetError"]):
    """Answers requests, in a worker or in the training process; the DataLoader's data set."""

    def __init__(self, data: ImageData, augmentation: Augmentation, image_size: int, dtype: torch.dtype) -> None:
        self._data = data
        self._augmentation = augmentation
        self._image_size = image_size
        self._normalize = Normalizer.of(data.mean, data.std, device=torch.device("cpu"), dtype=dtype)

    def __getitem__(self, request: BatchRequest) -> Pixels | DatasetError:
        split = self._data.test if request.epoch == TEST else self._data.train
        try:
            x = torch.stack([self._sample(split, request.epoch, index) for index in request.indices])
        except DatasetError as error:
            return error  # torch re-raises a worker's exception with the traceback as its message (ExceptionWrapper)
        return x, torch.from_numpy(split.labels[list(request.indices)])

    def _sample(self, split: Split, epoch: int, index: int) -> torch.Tensor:
        picture = split.pil(index)
        if epoch != TEST:
            picture = self._augmentation.apply(picture, epoch, index)
        if picture.width != self._image_size:
            picture = picture.resize((self._image_size, self._image_size), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(picture))
        return self._normalize(pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous())


class PillowLoader(SamplePlan):
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
        self._device = device
        self._memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self._indices = torch.from_numpy(self._chosen)
        augmentation = Augmentation.of(config.augment, image_size=data.size, seed=config.seed)
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = DataLoader(
            _Pictures(data, augmentation, image_size, dtype),
            batch_size=None,  # a request is a whole batch
            sampler=self._requests,
            collate_fn=lambda answer: answer,
            num_workers=config.workers,
            persistent_workers=config.workers > 0,
            pin_memory=device.type == "cuda",
            multiprocessing_context="fork" if config.workers else None,
            generator=torch.Generator(),  # its own: the workers' seeds must not advance the state of dropout
        )

    def train(self, epoch: int) -> Iterator[Batch]:
        order = self._indices[epoch_order(self._indices, self._seed, epoch)].tolist()
        return self._batches(epoch, order, self._training_parts)

    def test(self) -> Iterator[Batch]:
        return self._batches(TEST, list(range(self.num_test)), self._evaluation_parts)

    def close(self) -> None:
        self._loader = None  # ends its workers

    def _batches(self, epoch: int, order: list[int], parts: list[Part]) -> Iterator[Batch]:
        self._requests.pending = [BatchRequest(epoch, tuple(order[part.rows])) for part in parts]
        for part, (x, y) in zip(parts, self._answers(), strict=True):
            x = x.to(self._device, memory_format=self._memory_format, non_blocking=True)
            yield Batch(x, y.to(self._device, non_blocking=True), part.num_local, part.num_global)

    def _answers(self) -> Iterator[Pixels]:
        assert self._loader is not None, "used after close"
        with warnings.catch_warnings():
            # Python 3.12 warns of os.fork in a process with threads; our children use neither threads nor device.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
            answers = iter(self._loader)
        try:
            for answer in answers:
                if isinstance(answer, DatasetError):
                    raise answer
                yield answer
        except RuntimeError as error:
            raise (worker_error(error) or error) from error
        finally:
            del answers  # the traceback of an error would keep the iterator and its workers alive
