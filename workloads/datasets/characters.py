"""``characters``: the next character of English prose about Python, from text that every Python brings along.

The text is that of ``help()``'s topics, the module ``pydoc_data.topics`` of the standard library (PSF licence). It is
read where the run is, so nothing is downloaded; another Python has another edition of it, which the digest tells.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from workloads.contract import TrainConfig
from workloads.datasets.shared.sequence_data import SequenceData
from workloads.errors import DatasetError
from workloads.registry import DatasetDeclaration, DatasetShape, Problem, Samples

MODULE = "pydoc_data.topics"
POSITIONS = 128
"""Characters that a model sees at once."""
NUM_SEQUENCES = 3500
"""451,500 characters, somewhat less than the shortest edition has: every Python gives the same number of samples."""
TEST_EVERY = 10
"""Every so many sequences one is for testing."""
NUM_TEST = NUM_SEQUENCES // TEST_EVERY
OTHER = "other"
SYMBOLS: tuple[str, ...] = ("\n", *map(chr, range(ord(" "), ord("~") + 1)), OTHER)
"""A line end, printable ASCII, and one for everything else: the same in every edition."""


def _shape(_root: Path | None, _name: str) -> DatasetShape:
    return DatasetShape(
        image_size=None,
        channels=None,
        classes=len(SYMBOLS),
        num_train=NUM_SEQUENCES - NUM_TEST,
        num_test=NUM_TEST,
        positions=POSITIONS,
    )


def _check(_root: Path | None, _name: str) -> list[Problem]:
    if importlib.util.find_spec("pydoc_data") is not None:
        return []
    return [Problem(where=MODULE, what="this Python comes without it", fix="install the whole standard library")]


def _prepare(_root: Path | None, _name: str, progress: Callable[[str], None]) -> None:
    progress("characters: comes with Python, nothing to do")


def encoded(text: str) -> bytes:
    """A symbol's number for each character."""
    numbers = {symbol: number for number, symbol in enumerate(SYMBOLS[:-1])}
    return bytes(numbers.get(character, len(SYMBOLS) - 1) for character in text)


def _load(_root: Path | None, _name: str, _config: TrainConfig) -> SequenceData:
    import hashlib

    import numpy as np

    try:
        topics: dict[str, str] = importlib.import_module(MODULE).topics
    except ImportError as error:
        raise DatasetError(
            "the text of the data set characters is not there",
            where=MODULE,
            why=str(error),
            hint="install the whole standard library of Python",
        ) from error
    content = encoded("\n".join(topics[name] for name in sorted(topics)))
    length = POSITIONS + 1
    if len(content) < NUM_SEQUENCES * length:
        raise DatasetError(
            "the text of the data set characters is shorter than in any Python known",
            where=MODULE,
            why=f"{len(content)} characters, {NUM_SEQUENCES * length} needed",
            hint="use Python 3.11 or newer",
        )
    used = content[: NUM_SEQUENCES * length]
    symbols = np.frombuffer(used, np.uint8).reshape(NUM_SEQUENCES, length)
    is_test = np.arange(NUM_SEQUENCES) % TEST_EVERY == TEST_EVERY - 1
    return SequenceData(symbols[~is_test], symbols[is_test], SYMBOLS, hashlib.sha256(used).hexdigest())


DECLARATION = DatasetDeclaration(
    name="characters",
    summary="3,500 texts of 128 characters from Python's own help topics; the next character is to be told.",
    packages=("numpy",),
    needs_root=False,
    samples=Samples.SEQUENCES,
    shape=_shape,
    check=_check,
    digest=lambda _root, _name: "",  # the job's Python may have another edition than the one that plans
    prepare=_prepare,
    load=_load,
)
