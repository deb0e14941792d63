"""Work on many small files in parallel: on a network disk, waiting for the server dominates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import TypeVar

T = TypeVar("T")

AT_A_TIME = 8
FEW = 64
"""With fewer items, starting threads takes longer than they save."""


def for_each(work: Callable[[T], object], items: Sequence[T]) -> None:
    """Call ``work`` with each item, in any order.

    Raises:
        Exception: the first failure; some of the other items are done then.
    """

    def do_share(start: int, step: int) -> None:
        for item in items[start::step]:
            work(item)

    if len(items) < FEW:
        do_share(0, 1)
        return
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="files") as pool:
        list(pool.map(do_share, range(AT_A_TIME), repeat(AT_A_TIME)))
