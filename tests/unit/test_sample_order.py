"""The integer hash, the order of an epoch, the subset of train_fraction, and each rank's part of a batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from workloads.errors import DatasetError  # noqa: E402
from workloads.loaders.augment import Augmentation  # noqa: E402 (needs torch)
from workloads.loaders.protocol import Shard  # noqa: E402
from workloads.loaders.sample_order import (  # noqa: E402
    Part,
    Stream,
    epoch_order,
    evaluation_parts,
    hash_of,
    hashes_of,
    stream_key,
    subset,
    training_parts,
)


def test_both_hash_functions_agree_on_all_64_bits() -> None:
    """Keys and indices over the whole range, the sign bit included."""
    draw = random.Random(0)
    for key in [0, 1, 2**63, 2**64 - 1, *(draw.getrandbits(64) for _ in range(50))]:
        indices = [0, 1, 2**31, 2**40 + 7, *(draw.getrandbits(40) for _ in range(20))]
        tensors = [bits % 2**64 for bits in hashes_of(key, torch.tensor(indices)).tolist()]
        assert tensors == [hash_of(key, index) for index in indices]


def test_the_hash_is_splitmix64() -> None:
    """Its published first outputs for seed 1234567, so that other machines and years draw the same numbers."""
    outputs = [hash_of(1234567, index) for index in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_order_of_a_seed_never_changes() -> None:
    """A change here changes every result that anybody has stored: it needs a new IDENTITY_VERSION."""
    assert epoch_order(torch.arange(10), seed=0, epoch=0).tolist() == [0, 8, 3, 4, 6, 2, 1, 9, 5, 7]
    assert Augmentation.of("crop_flip", image_size=32, seed=0).draw(epoch=0, index=0) == (8, 3, False)
    assert subset(np.arange(20) % 2, 0.3, seed=0).tolist() == [5, 6, 9, 12, 14, 15]


def test_an_order_is_a_permutation_of_its_own_for_each_seed_and_epoch() -> None:
    orders = {tuple(epoch_order(torch.arange(1000), seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(1000)) for order in orders)
    for order in orders:  # as random as it looks: the correlation of place and index stays within five deviations
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 5 / np.sqrt(1000)


def test_the_streams_share_no_numbers() -> None:
    keys = {stream_key(stream, seed, epoch) for stream in Stream for seed in range(20) for epoch in range(20)}
    assert len(keys) == len(Stream) * 400


def test_a_subset_keeps_the_share_of_every_class() -> None:
    labels = np.repeat([0, 1, 2], [500, 300, 200])
    chosen = subset(labels, 0.1, seed=3)
    assert np.bincount(labels[chosen]).tolist() == [50, 30, 20]
    assert (np.diff(chosen) > 0).all()
    assert (chosen == subset(labels, 0.1, seed=3)).all()
    assert (chosen != subset(labels, 0.1, seed=4)).any()


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 1000), (0.5, 500), (0.0337, 34), (0.001, 1), (1e-9, 1)])
def test_a_subset_has_the_requested_size(fraction: float, count: int) -> None:
    """Also where classes are of odd sizes and shares are not whole."""
    labels = np.random.default_rng(0).integers(0, 7, 1000)
    assert len(set(subset(labels, fraction, seed=0).tolist())) == count


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 30])
@pytest.mark.parametrize("batch_size", [1, 7, 8, 21, 64])
def test_every_sample_is_in_one_part_of_one_step(world: int, batch_size: int) -> None:
    """21 samples: parts of a step are consecutive, sizes differ by at most one, all ranks have as many steps."""
    ranks = [training_parts(21, batch_size, drop_last=False, shard=Shard(rank, world)) for rank in range(world)]
    assert {len(parts) for parts in ranks} == {-(-21 // batch_size)}
    seen: list[int] = []
    for step in zip(*ranks, strict=True):
        sizes = [part.num_local for part in step]
        assert sum(sizes) == step[0].num_global == min(batch_size, 21 - len(seen))
        assert max(sizes) - min(sizes) <= 1
        seen += [row for part in step for row in range(part.start, part.start + part.num_local)]
    assert seen == list(range(21))


def test_drop_last_leaves_out_the_smaller_last_batch() -> None:
    parts = training_parts(21, 8, drop_last=True, shard=Shard(0, 1))
    assert [(part.start, part.num_local) for part in parts] == [(0, 8), (8, 8)]
    with pytest.raises(DatasetError, match="no step is left: 21 training images are fewer than one batch of 22"):
        training_parts(21, 22, drop_last=True, shard=Shard(0, 1))


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 30])
@pytest.mark.parametrize("batch_size", [1, 7, 8, 64])
def test_every_test_sample_is_evaluated_by_one_rank(world: int, batch_size: int) -> None:
    """21 samples: no padding, no sample twice, as many batches on every rank, stand-ins where a rank has none."""
    ranks = [evaluation_parts(21, batch_size, Shard(rank, world)) for rank in range(world)]
    assert len({len(parts) for parts in ranks}) == 1
    seen = [row for parts in ranks for p in parts for row in range(p.start, p.start + p.num_local)]
    assert seen == list(range(21))
    for batch in zip(*ranks, strict=True):
        assert sum(part.num_local for part in batch) == batch[0].num_global > 0


def test_a_rank_without_samples_loads_one_uncounted_sample() -> None:
    assert Part(5, 0, 3).rows == slice(0, 1)
    assert Part(5, 2, 3).rows == slice(5, 7)


@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip"])
def test_draw_and_draw_many_agree(augment: str) -> None:
    """Python integers (loader workers) and tensors (the resident loader) draw the same, for any seed and epoch."""
    for size, seed, epoch in ((8, 0, 0), (28, 7, 3), (224, 2**40, 10**6)):
        augmentation = Augmentation.of(augment, image_size=size, seed=seed)
        indices = torch.tensor([0, 1, 17, 59_999, 1_281_166])
        tops, lefts, mirrored = (drawn.tolist() for drawn in augmentation.draw_many(epoch, indices))
        drawn = [augmentation.draw(epoch, index) for index in indices.tolist()]
        assert drawn == [(t, s, bool(m)) for t, s, m in zip(tops, lefts, mirrored, strict=True)]


def test_every_crop_and_mirroring_is_drawn_equally_often() -> None:
    """32 px: 81 corners x 2; counts of 162,000 draws lie within five deviations of 1,000 each."""
    augmentation = Augmentation.of("crop_flip", image_size=32, seed=1)
    tops, lefts, mirrored = augmentation.draw_many(0, torch.arange(162_000))
    counts = np.bincount((tops * 18 + lefts * 2 + mirrored).numpy(), minlength=162)
    assert len(counts) == 162
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_flip_does_not_crop_and_none_does_nothing() -> None:
    flip = Augmentation.of("flip", image_size=32, seed=0)
    assert {flip.draw(0, index)[:2] for index in range(100)} == {(0, 0)}
    assert {flip.draw(0, index)[2] for index in range(100)} == {False, True}
    none = Augmentation.of("none", image_size=32, seed=0)
    assert none.is_identity
    assert {none.draw(0, index) for index in range(100)} == {(0, 0, False)}
