"""Confidence intervals of benchmark figures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

DRAWS = 10_000


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """Return the percentile bootstrap 95 % interval of a statistic (Efron, 1979).

    The random seed is fixed: the same values give the same interval.
    """
    generator = random.Random(0)
    drawn = sorted(statistic(generator.choices(values, k=len(values))) for _ in range(DRAWS))
    return drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]
