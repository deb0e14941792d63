"""Sequences of symbols as the loaders take them; a model predicts each next symbol."""

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
    """(sequences, positions + 1): all but the last symbol are the input, all but the first the targets."""
    test: NDArray[np.uint8]
    class_names: tuple[str, ...]
    """The symbols, by number."""
    digest: str
    """Of the content; equals the declaration's ``digest`` while nothing has changed."""
    channels: int = 1
    """Models take it as a number of input channels; a position holds one symbol."""

    @property
    def size(self) -> int:
        """Positions of a sequence."""
        return int(self.train.shape[1]) - 1
