"""``characters``: English prose about Python, from text that every Python installation has; predict the next character.

The text is that of the topics of ``help()``, in the module ``pydoc_data.topics`` of the standard library (PSF licence).
The job reads its own Python's edition, so nothing is downloaded; the digest tells editions apart.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path

from workloads.contract import TrainConfig
from workloads.datasets.shared.sequence_data import SequenceData
from workloads.errors import DatasetError
from workloads.lazy import lazy_imports
from workloads.registry import DatasetDeclaration, DatasetShape, Problem, Samples

with lazy_imports(__name__):
    import numpy as np

MODULE = "pydoc_data.topics"
POSITIONS = 128
"""Characters of a sample."""
NUM_SEQUENCES = 3500
"""451,500 characters, slightly fewer than the shortest edition has: every Python gives the same number of samples."""
TEST_EVERY = 10
"""One of so many sequences is for testing."""
NUM_TEST = NUM_SEQUENCES // TEST_EVERY
OTHER = "other"
SYMBOLS: tuple[str, ...] = ("\n", *map(chr, range(ord(" "), ord("~") + 1)), OTHER)
"""A line end, printable ASCII, and one for all other characters: the same in every edition."""
_FIX = "install the whole standard library of Python"


def _check(_root: Path | None, _name: str) -> list[Problem]:
    missing = importlib.util.find_spec("pydoc_data") is None
    return [Problem(where=MODULE, what="this Python lacks the module", fix=_FIX)] if missing else []


def encode(text: str) -> bytes:
    """Return the number of each character's symbol."""
    numbers = {symbol: number for number, symbol in enumerate(SYMBOLS[:-1])}
    return bytes(numbers.get(character, len(SYMBOLS) - 1) for character in text)


def _load(_root: Path | None, _name: str, _config: TrainConfig) -> SequenceData:
    try:
        topics: dict[str, str] = importlib.import_module(MODULE).topics
    except ImportError as error:
        what = "this Python lacks the text of characters"
        raise DatasetError(what, where=MODULE, why=str(error), hint=_FIX) from error
    content = encode("\n".join(topics[name] for name in sorted(topics)))
    length = POSITIONS + 1
    if len(content) < NUM_SEQUENCES * length:
        raise DatasetError(
            "the text of characters is shorter than in every Python release from 3.11 on",
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
    summary="3,500 texts of 128 characters from Python's own help topics; predict the next character.",
    packages=("numpy",),
    needs_root=False,
    samples=Samples.SEQUENCES,
    shape=lambda _root, _name: DatasetShape(
        image_size=None,
        channels=None,
        classes=len(SYMBOLS),
        num_train=NUM_SEQUENCES - NUM_TEST,
        num_test=NUM_TEST,
        positions=POSITIONS,
    ),
    check=_check,
    digest=lambda _root, _name: "",  # the job's Python may have another edition than the login node's
    load=_load,
)
