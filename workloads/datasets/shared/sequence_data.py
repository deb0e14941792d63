"""Sequences of symbols as the loaders take them: of each position, the symbol that follows is to be told. Not a data
set itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SequenceData:
    """A whole data set of sequences of one length, verified."""

    train: NDArray[np.uint8]
    """(sequences, positions + 1): the model is fed all but the last symbol, and is to answer all but the first."""
    test: NDArray[np.uint8]
    class_names: tuple[str, ...]
    """The symbols, by number."""
    digest: str
    """Of the content; equal to what the declaration's ``digest`` says while nothing has changed."""
    channels: int = 1
    """As models are told; a position has one symbol."""

    @property
    def size(self) -> int:
        """Positions of a sequence."""
        return int(self.train.shape[1]) - 1
