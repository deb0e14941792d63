"""Consecutive parts of about equal cost."""

from __future__ import annotations

import itertools
import random

import pytest

from workloads.strategies.shared.partition import equal_parts, sums_of_runs


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
def test_parts_have_about_equal_costs(costs: list[float], parts: int, sizes: tuple[int, ...]) -> None:
    assert equal_parts(costs, parts) == sizes


def test_no_cut_has_a_cheaper_dearest_part() -> None:
    """Against all cuts of random costs, none of them with an empty part."""
    chance = random.Random(0)
    for count, parts in itertools.product((4, 7), (2, 3, 4)):
        costs = [chance.random() for _ in range(count)]
        cuts = [
            tuple(b - a for a, b in itertools.pairwise((0, *inner, count)))
            for inner in itertools.combinations(range(1, count), parts - 1)
        ]
        sizes = equal_parts(costs, parts)
        assert min(sizes) > 0 and len(sizes) == parts
        assert max(sums_of_runs(costs, sizes)) == pytest.approx(min(max(sums_of_runs(costs, cut)) for cut in cuts))
