"""Work on many small files in parallel: on a network disk, waiting for the server dominates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    if len(items) < FEW:
        _one_by_one(work, items)
        return
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="files") as pool:
        shares = [pool.submit(_one_by_one, work, items[start::AT_A_TIME]) for start in range(AT_A_TIME)]
        for share in shares:
            share.result()


def _one_by_one(work: Callable[[T], object], items: Sequence[T]) -> None:
    for item in items:
        work(item)
