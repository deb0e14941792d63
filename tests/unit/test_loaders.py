"""Both loaders: every sample once at any world size, equal samples and augmentation, errors of workers."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from workloads import loaders  # noqa: E402 (needs torch)
from workloads.contract import Hardware, TrainConfig  # noqa: E402
from workloads.datasets.shared.image_data import ImageData, Split  # noqa: E402
from workloads.errors import DatasetError, InputError  # noqa: E402
from workloads.loaders import gather, sample_order  # noqa: E402
from workloads.loaders.augment import Augmentation, Normalizer  # noqa: E402
from workloads.loaders.protocol import Batch, Loader, Shard  # noqa: E402

CPU = torch.device("cpu")
CONFIG = TrainConfig(
    model="cnn",
    dataset="test",
    strategy="eager",
    hardware=Hardware("cpu", 1),
    cpus=1,
    batch_size=8,
    augment="crop_flip",
)
KINDS = ["resident", "dataloader"]


def images(count: int, channels: int, size: int, seed: int) -> Split:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, channels, size, size), np.uint8)
    return Split(np.arange(count) % 5, pixels)


def data_of(count: int = 21, *, channels: int = 3, size: int = 16) -> ImageData:
    """Random images; labels are the index modulo 5."""
    train, test = images(count, channels, size, 0), images(count, channels, size, 1)
    return ImageData.of(train, test, class_names=tuple("abcde"), digest="of a test")


def numbered(count: int = 21) -> ImageData:
    """Each image is filled with its number; with mean 0 and deviation 1 a batch tells which samples it has."""
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 1, 4, 4)).copy()
    split = Split(np.arange(count), pixels)
    return ImageData(split, split, ("a",), (0.0,), (1 / 255,), digest="of a test")


def make(data: ImageData, kind: str = "resident", shard: Shard = Shard(0, 1), **fields: object) -> Loader:  # noqa: B008
    size = fields.pop("to", data.size)
    dtype = fields.pop("dtype", torch.float32)
    config = dataclasses.replace(CONFIG, loader=kind, **fields)  # type: ignore[arg-type]
    return loaders.make(data, config, image_size=size, device=CPU, dtype=dtype, shard=shard)  # type: ignore[arg-type]


def counted(batches: Iterator[Batch]) -> list[list[int]]:
    """The samples of each batch of :func:`numbered` that count, checked against the labels."""
    found = []
    for batch in batches:
        numbers = batch.x[:, 0, 0, 0].round().int().tolist()
        assert numbers == batch.y.tolist()
        assert len(numbers) == max(1, batch.num_local)
        found.append(numbers[: batch.num_local])
    return found


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 30])
def test_each_sample_occurs_once_at_any_world_size(kind: str, world: int) -> None:
    """21 samples, training and test; the global batches are those of one rank; 30 ranks leave 9 with stand-ins."""
    data = numbered()
    alone = counted(make(data, kind, augment="none").train(3))
    ranks = [make(data, kind, Shard(rank, world), augment="none") for rank in range(world)]
    assert {(rank.num_train, rank.num_test, rank.steps_per_epoch) for rank in ranks} == {(21, 21, 3)}
    steps = list(zip(*(counted(rank.train(3)) for rank in ranks), strict=True))
    assert [joined(parts) for parts in steps] == alone
    assert [len(step) for step in alone] == [8, 8, 5]
    assert sorted(joined(alone)) == list(range(21))
    tested = [counted(rank.test()) for rank in ranks]
    assert len({len(batches) for batches in tested}) == 1
    assert joined(map(joined, tested)) == list(range(21))


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_differ_and_are_reproducible(kind: str) -> None:
    """An epoch depends on seed and epoch alone: asked for again, or first, it is the same."""
    loader = make(numbered(), kind, augment="none")
    first, second = counted(loader.train(0)), counted(loader.train(1))
    assert first != second
    assert counted(make(numbered(), kind, augment="none").train(1)) == second
    assert counted(make(numbered(), kind, augment="none", seed=1).train(1)) != second
    assert counted(loader.train(0)) == first


@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_loaders_give_the_same_batches_to_the_bit(augment: str, channels: int, dtype: object) -> None:
    data = data_of(channels=channels)
    resident = make(data, augment=augment, dtype=dtype)
    pillow = make(data, "dataloader", augment=augment, dtype=dtype)
    for mine, other in zip([*resident.train(2), *resident.test()], [*pillow.train(2), *pillow.test()], strict=True):
        assert torch.equal(mine.x, other.x)
        assert torch.equal(mine.y, other.y)
        assert mine.x.dtype == dtype
        assert (mine.num_local, mine.num_global) == (other.num_local, other.num_global)


def test_workers_give_the_batches_of_the_training_process() -> None:
    """Two persistent worker processes over two epochs and a test pass between them; close ends them."""
    data = data_of()
    alone, helped = make(data, "dataloader"), make(data, "dataloader", workers=2)
    try:
        for mine, other in (
            (alone.train(0), helped.train(0)),
            (alone.test(), helped.test()),
            (alone.train(1), helped.train(1)),
        ):
            assert all(torch.equal(a.x, b.x) for a, b in zip(mine, other, strict=True))
        assert len(multiprocessing.active_children()) == 2
    finally:
        helped.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_was_left_early_does_not_disturb_the_next(kind: str) -> None:
    """``steps`` may end an epoch anywhere, with answers of workers still under way."""
    loader = make(numbered(), kind, augment="none", workers=1)
    try:
        for _ in loader.train(0):
            break
        again = counted(loader.train(1))
    finally:
        loader.close()
    assert again == counted(make(numbered(), kind, augment="none").train(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_augmentation_does_not_depend_on_the_world(kind: str, world: int) -> None:
    data = data_of()
    whole = torch.cat([batch.x for batch in make(data, kind).train(1)])
    ranks = [make(data, kind, Shard(rank, world)) for rank in range(world)]
    parts = [batch.x for step in zip(*(rank.train(1) for rank in ranks), strict=True) for batch in step]
    assert torch.equal(torch.cat(parts), whole)


def test_augmentation_is_pad_crop_and_mirror() -> None:
    """Against torch's own pad, a slice and a flip, sample by sample; both happen, and mirrored ones too."""
    data = data_of(64)
    augmentation = Augmentation.of("crop_flip", image_size=16, seed=CONFIG.seed)
    normalise = Normalizer.of(data.mean, data.std, device=CPU, dtype=torch.float32)
    padded = torch.nn.functional.pad(torch.from_numpy(data.train.images), (2, 2, 2, 2))
    sequence = [int(n) for n in sample_order.epoch_order(torch.arange(64), CONFIG.seed, 5)]
    mirrorings = set()
    for sample, x in zip(sequence, torch.cat([batch.x for batch in make(data).train(5)]), strict=True):
        top, left, mirrored = augmentation.draw(5, sample)
        crop = padded[sample, :, top : top + 16, left : left + 16]
        assert torch.equal(normalise(crop.flip(-1) if mirrored else crop), x)
        mirrorings.add(mirrored)
    assert mirrorings == {True, False}


@pytest.mark.parametrize("augment", ["flip", "crop_flip"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gatherer_for_gpus_gives_the_same_pixels(augment: str, channels: int, channels_last: bool) -> None:
    """The table way runs on any device; here on the CPU against the copying way."""
    data = data_of(50, channels=channels)
    augmentation = Augmentation.of(augment, image_size=16, seed=9)
    copying = gather.CropByCopy(data.train.images, augmentation)
    table = gather.CropByTable(data.train.images, augmentation, CPU, channels_last=channels_last)
    positions = torch.randperm(50)
    for way in (copying, table):
        way.begin(4, positions, positions)
    assert torch.equal(copying.take(slice(3, 40)), table.take(slice(3, 40)))


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last_is_a_layout_not_another_batch(kind: str) -> None:
    data = data_of()
    for plain, turned in zip(make(data, kind).train(0), make(data, kind, channels_last=True).train(0), strict=True):
        assert torch.equal(plain.x, turned.x)
        assert plain.x.is_contiguous()
        assert turned.x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", [8, 24, 32])
def test_both_loaders_resize_almost_equally(size: int) -> None:
    """Device and Pillow both filter when they shrink; they differ by Pillow's rounding to whole levels only."""
    data = data_of()
    resident, pillow = make(data, to=size), make(data, "dataloader", to=size)
    level = 1 / (255 * min(data.std))
    for mine, other in zip(resident.train(0), pillow.train(0), strict=True):
        assert mine.x.shape[1:] == (3, size, size)
        assert (mine.x - other.x).abs().max() < 1.6 * level


def test_batches_are_normalized() -> None:
    """Over the training images: mean 0, deviation 1 in each channel."""
    x = torch.cat([batch.x for batch in make(data_of(100), augment="none", dtype=torch.float64).train(0)])
    assert x.mean((0, 2, 3)).abs().max() < 1e-9
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_train_fraction_takes_the_same_samples_everywhere(kind: str) -> None:
    loader = make(numbered(200), kind, augment="none", train_fraction=0.1)
    assert (loader.num_train, loader.num_test, loader.steps_per_epoch) == (20, 200, 3)
    other = make(numbered(200), "resident", augment="none", train_fraction=0.1)
    chosen = {tuple(sorted(joined(counted(one.train(epoch))))) for one in (loader, other) for epoch in range(3)}
    assert len(chosen) == 1


def test_a_subset_is_augmented_like_the_whole_set() -> None:
    """Augmentation goes by a sample's number in the data set, not by its place in the subset."""
    data = data_of(60)
    resident, pillow = make(data, train_fraction=0.3), make(data, "dataloader", train_fraction=0.3)
    for mine, other in zip(resident.train(1), pillow.train(1), strict=True):
        assert torch.equal(mine.x, other.x)


@pytest.mark.parametrize("kind", KINDS)
def test_drop_last_without_a_step_is_an_error(kind: str) -> None:
    assert make(numbered(), kind, drop_last=True).steps_per_epoch == 2
    with pytest.raises(DatasetError, match="no step is left"):
        make(numbered(), kind, drop_last=True, batch_size=22)


def test_the_error_for_an_unknown_loader_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match='loader is "resident" or "dataloader"'):
        make(numbered(), "tfdata")


def test_the_error_for_data_larger_than_the_device_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_device(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(gather, "on_device", on_device)
    with pytest.raises(DatasetError) as raised:
        make(numbered(), augment="none")
    assert "do not fit on the device" in str(raised.value)
    assert "CUDA out of memory. Tried to allocate 2 GiB." in str(raised.value)
    assert 'set loader = "dataloader"' in str(raised.value)


def test_a_killed_worker_is_a_worker_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does when memory is out: kill -9 of the worker itself. No hang, no bare RuntimeError."""
    monkeypatch.setattr(Split, "pil", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    loader = make(numbered(), "dataloader", workers=1)
    try:
        with pytest.raises(loaders.protocol.WorkerError) as raised:
            list(loader.train(0))
    finally:
        loader.close()
    assert raised.value.failure_class == "loader_worker"
    assert "a worker process of the dataloader died" in str(raised.value)
    assert "DataLoader worker" in raised.value.why
    assert "raise mem" in raised.value.hint


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_of_a_worker_names_the_damaged_image(tmp_path: Path, workers: int) -> None:
    """The worker's own error arrives, without a traceback in its message."""
    data = numbered()
    gone = tmp_path / "gone.png"
    train = dataclasses.replace(data.train, files=tuple(gone for _ in range(21)))
    loader = make(dataclasses.replace(data, train=train), "dataloader", workers=workers)
    try:
        with pytest.raises(DatasetError, match="cannot read this image") as raised:
            list(loader.train(0))
    finally:
        loader.close()
    assert raised.value.where == str(gone)
    assert "Traceback" not in str(raised.value)


def test_global_random_state_is_unchanged() -> None:
    """Loading must not move the state that dropout draws from: strategies are compared to the bit."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for kind in KINDS:
        loader = make(data_of(), kind)
        list(loader.train(0))
        list(loader.test())
    assert torch.equal(torch.rand(3), expected)
