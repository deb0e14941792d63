"""``wide_transformer/96GB``: ``char_transformer`` at a size that is named by the memory its training needs.

The name says how much memory weights, gradients and Adam's two moments take in fp32, 16 bytes a parameter, before any
activation: choose more than one device has, and only what divides them between devices can train it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.models.char_transformer import ASSUMED_DROPOUT, MLP_RATIO, transformer
from workloads.registry import ModelDeclaration, Samples

if TYPE_CHECKING:
    from torch import nn

BYTES_A_PARAMETER = 16
LARGEST_GB = 1_000_000
HEAD_WIDTH = 64
WIDTH_TO_DEPTH = 128
"""About that of published language models."""
PARAMETERS_OF_A_BLOCK = 4 + 2 * MLP_RATIO
"""Times the square of the width: projections of the attention, and the two layers after it."""


def size(name: str) -> tuple[int, int]:
    """(width, depth) of the smallest such model that needs at least the memory in its name.

    Raises:
        ValueError: the name says no memory.
    """
    member = name.partition("/")[2]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)GB", member)
    gigabytes = float(match[1]) if match else 0.0
    if gigabytes > LARGEST_GB:
        raise ValueError(f"{name} is larger than any machine: write wide_transformer/{LARGEST_GB}GB at most")
    parameters = gigabytes * 1e9 / BYTES_A_PARAMETER
    if not parameters:
        raise ValueError(
            f"{name} names no memory that training is to need: write wide_transformer/96GB, with any number above 0"
        )
    depth = max(2, round((parameters / (PARAMETERS_OF_A_BLOCK * WIDTH_TO_DEPTH**2)) ** (1 / 3)))
    width = math.sqrt(parameters / (PARAMETERS_OF_A_BLOCK * depth))
    return math.ceil(width / HEAD_WIDTH) * HEAD_WIDTH, depth


def _num_parameters(name: str) -> int:
    width, depth = size(name)
    return PARAMETERS_OF_A_BLOCK * width**2 * depth


def _positions(name: str, wished: int) -> int:
    size(name)
    return wished


def _build(config: TrainConfig, _channels: int, classes: int, positions: int) -> nn.Module:
    width, depth = size(config.model)
    dropout = ASSUMED_DROPOUT if config.dropout is None else config.dropout
    return transformer(classes, positions, width=width, depth=depth, heads=width // HEAD_WIDTH, dropout=dropout)


DECLARATION = ModelDeclaration(
    name="wide_transformer/*",
    summary="char_transformer sized by the memory it takes to train it: wide_transformer/96GB is for no 80 GB device.",
    frameworks=("torch",),
    packages=("torch",),
    samples=Samples.SEQUENCES,
    image_size=_positions,
    build=_build,
    layers=list,
    num_layers=lambda name: size(name)[1] + 2,
    has_batch_norm=False,
    has_dropout=True,
    num_parameters=_num_parameters,
)
