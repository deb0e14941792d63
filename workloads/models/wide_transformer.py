"""``wide_transformer/96GB``: ``char_transformer`` at a size named by the memory that its training needs.

The name is the memory of weights, gradients and Adam's two moments in fp32, 16 bytes per parameter; activations come on
top. If one device has less, only strategies that divide this state between devices can train the model.
"""

from __future__ import annotations

import math
import re

from workloads.contract import TrainConfig
from workloads.lazy import lazy_imports
from workloads.models.char_transformer import MLP_RATIO, transformer
from workloads.registry import ModelDeclaration, Samples

with lazy_imports(__name__):
    from torch import nn

BYTES_PER_PARAMETER = 16
LARGEST_GB = 1_000_000
HEAD_WIDTH = 64
WIDTH_TO_DEPTH = 128
"""About the ratio of published language models."""
BLOCK_PARAMETERS = 4 + 2 * MLP_RATIO
"""In units of the squared width: the projections of the attention and the two layers of the MLP."""


def size(name: str) -> tuple[int, int]:
    """Return (width, depth) of the smallest model that needs the memory in its name. Raises ValueError without one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)GB", name.partition("/")[2])
    gigabytes = float(match[1]) if match else 0.0
    if gigabytes > LARGEST_GB:
        raise ValueError(f"{name} exceeds every machine: write wide_transformer/{LARGEST_GB}GB at most")
    parameters = gigabytes * 1e9 / BYTES_PER_PARAMETER
    if not parameters:
        raise ValueError(f"{name} contains no memory size: write wide_transformer/96GB, with any number above 0")
    depth = max(2, round((parameters / (BLOCK_PARAMETERS * WIDTH_TO_DEPTH**2)) ** (1 / 3)))
    width = math.sqrt(parameters / (BLOCK_PARAMETERS * depth))
    return math.ceil(width / HEAD_WIDTH) * HEAD_WIDTH, depth


def _positions(name: str, wished: int) -> int:
    size(name)
    return wished


def _build(config: TrainConfig, _channels: int, classes: int, positions: int) -> nn.Module:
    width, depth = size(config.model)
    return transformer(config, classes, positions, width, depth, width // HEAD_WIDTH)


DECLARATION = ModelDeclaration(
    name="wide_transformer/*",
    summary="char_transformer sized by the memory of its training: wide_transformer/96GB fits on no 80 GB device.",
    frameworks=("torch",),
    packages=("torch",),
    samples=Samples.SEQUENCES,
    image_size=_positions,
    build=_build,
    layers=list,
    num_layers=lambda name: size(name)[1] + 2,
    has_batch_norm=False,
    has_dropout=True,
    num_parameters=lambda name: BLOCK_PARAMETERS * size(name)[0] ** 2 * size(name)[1],
)
