"""``dataloader``: torch's DataLoader with Pillow pictures and worker processes, as most published training code has it.

Every request for a batch names its epoch and samples, so workers live for the whole run and need no state. They are
forked: that is what the published code did on Linux, the pictures are shared instead of pickled, and a worker never
touches the device, whatever the parent has on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.errors import DatasetError
from workloads.loaders.augment import Augmentation, Normaliser
from workloads.loaders.order import Part, epoch_order, evaluation_parts, subset, training_parts
from workloads.loaders.protocol import Batch, Shard, worker_error

if TYPE_CHECKING:
    from PIL import Image

TEST = -1
"""Stands for an epoch where the test split is meant."""

Pixels: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True, slots=True)
class Request:
    """What a worker is asked for."""

    epoch: int
    indices: tuple[int, ...]


@dataclass(slots=True)
class _Requests:
    """The requests of the pass that starts next; a sampler in torch's sense."""

    pending: list[Request] = field(default_factory=list)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)


class _Pictures(Dataset["Pixels | DatasetError"]):
    """Answers requests, in a worker or in the training process."""

    def __init__(self, data: ImageData, augmentation: Augmentation, image_size: int, dtype: torch.dtype) -> None:
        self._data = data
        self._augmentation = augmentation
        self._image_size = image_size
        self._normalise = Normaliser.of(data.mean, data.std, device=torch.device("cpu"), dtype=dtype)

    def __getitem__(self, request: Request) -> Pixels | DatasetError:
        split = self._data.test if request.epoch == TEST else self._data.train
        try:
            x = torch.stack([self._sample(split, request.epoch, index) for index in request.indices])
        except DatasetError as error:
            return error  # torch would wrap a raised one in a traceback
        return x, torch.from_numpy(split.labels[list(request.indices)])

    def _sample(self, split: Split, epoch: int, index: int) -> torch.Tensor:
        picture = split.pil(index)
        if epoch != TEST:
            picture = self._augmentation.apply(picture, epoch, index)
        if picture.width != self._image_size:
            picture = _resized(picture, self._image_size)
        return self._normalise(_pixels(picture))


def _resized(picture: Image.Image, size: int) -> Image.Image:
    from PIL import Image

    return picture.resize((size, size), Image.Resampling.BILINEAR)


def _pixels(picture: Image.Image) -> torch.Tensor:
    import numpy as np

    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def _as_is(answer: Any) -> Any:
    return answer


class PillowLoader:
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
        self._seed = config.seed
        self._device = device
        self._memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self._indices = torch.from_numpy(subset(data.train.labels, config.train_fraction, config.seed))
        self.num_train, self.num_test = len(self._indices), len(data.test)
        self._training_parts = training_parts(
            self.num_train, config.batch_size, drop_last=config.drop_last, shard=shard
        )
        self._evaluation_parts = evaluation_parts(self.num_test, config.batch_size, shard)
        self.steps_per_epoch = len(self._training_parts)
        augmentation = Augmentation.of(config.augment, image_size=data.size, seed=config.seed)
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = DataLoader(
            _Pictures(data, augmentation, image_size, dtype),
            batch_size=None,  # a request is a whole batch
            sampler=self._requests,
            collate_fn=_as_is,
            num_workers=config.workers,
            persistent_workers=config.workers > 0,
            pin_memory=device.type == "cuda",
            multiprocessing_context="fork" if config.workers else None,
            generator=torch.Generator(),  # its seeds for workers would else come from the state that dropout draws from
        )

    def train(self, epoch: int) -> Iterator[Batch]:
        order = self._indices[epoch_order(self._indices, self._seed, epoch)].tolist()
        return self._batches(epoch, order, self._training_parts)

    def test(self) -> Iterator[Batch]:
        return self._batches(TEST, list(range(self.num_test)), self._evaluation_parts)

    def close(self) -> None:
        self._loader = None  # its workers end with it

    def _batches(self, epoch: int, order: list[int], parts: list[Part]) -> Iterator[Batch]:
        self._requests.pending = [Request(epoch, tuple(order[part.rows])) for part in parts]
        for part, (x, y) in zip(parts, self._answers(), strict=True):
            x = x.to(self._device, memory_format=self._memory_format, non_blocking=True)
            yield Batch(x, y.to(self._device, non_blocking=True), part.num_local, part.num_global)

    def _answers(self) -> Iterator[Pixels]:
        assert self._loader is not None, "used after close"
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside threads; the children neither use torch's threads nor the device.
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
            del answers  # an error's traceback would keep it, and with it the workers, alive
