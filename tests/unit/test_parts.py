"""How a model's layers are shared out to devices."""

from __future__ import annotations

import itertools
import random

import pytest

from workloads.strategies.shared.partition import runs, share_out


@pytest.mark.parametrize(
    ("costs", "parts", "sizes"),
    [
        ([1, 1, 1, 1], 2, (2, 2)),
        ([9, 1, 1, 1], 2, (1, 3)),
        ([1, 1, 1, 9], 2, (3, 1)),
        ([1, 2, 3], 3, (1, 1, 1)),
        ([5], 1, (1,)),
    ],
)
def test_shares_are_fair(costs: list[float], parts: int, sizes: tuple[int, ...]) -> None:
    assert share_out(costs, parts) == sizes


def test_no_other_cut_is_fairer() -> None:
    """Against all cuts of random costs, none of them with an empty part."""
    chance = random.Random(0)
    for count, parts in itertools.product((4, 7), (2, 3, 4)):
        costs = [chance.random() for _ in range(count)]
        cuts = [
            tuple(b - a for a, b in itertools.pairwise((0, *inner, count)))
            for inner in itertools.combinations(range(1, count), parts - 1)
        ]
        sizes = share_out(costs, parts)
        assert min(sizes) > 0 and len(sizes) == parts
        assert max(runs(costs, sizes)) == pytest.approx(min(max(runs(costs, cut)) for cut in cuts))
