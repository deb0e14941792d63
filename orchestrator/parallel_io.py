"""Work on many small files: several at a time, as a network disk takes long for each and little longer for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

AT_A_TIME = 8
FEW = 64
"""For fewer no thread is worth its start."""


def for_each(work: Callable[[T], object], items: Sequence[T]) -> None:
    """Do ``work`` for each item, in any order.

    Raises:
        Exception: what the first failing one raised; of the others some were done and some not.
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
