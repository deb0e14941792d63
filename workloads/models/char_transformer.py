"""``char_transformer``: a small transformer that predicts the next symbol of a sequence."""

from __future__ import annotations

import math

from workloads.contract import TrainConfig
from workloads.lazy import lazy_imports
from workloads.registry import ModelDeclaration, Samples

with lazy_imports(__name__):
    import torch
    from torch import Tensor, nn

WIDTH, DEPTH, HEADS = 128, 4, 4
MLP_RATIO = 4
ASSUMED_DROPOUT = 0.1
INITIAL_DEVIATION = 0.02
"""Of weights, as in GPT-2; the last layer of a residual branch divides it by the root of the number of branches."""


def transformer(config: TrainConfig, classes: int, positions: int, width: int, depth: int, heads: int) -> nn.Sequential:
    """Build pre-norm blocks with causal attention; the children of the module are its layers, in order.

    Input: (samples, positions) numbers of symbols. Output: (samples, classes, positions), as torch's losses take it.
    """
    functional = nn.functional  # the module itself: torch.compile traces what the layers call
    dropout = ASSUMED_DROPOUT if config.dropout is None else config.dropout
    end_deviation = INITIAL_DEVIATION / math.sqrt(2 * depth)

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.symbol = nn.Embedding(classes, width)
            self.position = nn.Parameter(torch.empty(positions, width))
            self.dropout = nn.Dropout(dropout)
            for weight in (self.symbol.weight, self.position):
                nn.init.normal_(weight, std=INITIAL_DEVIATION)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.dropout(self.symbol(x) + self.position)
            return out

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = _linear(width, 3 * width), _linear(width, width, end_deviation)
            self.fc1 = _linear(width, MLP_RATIO * width)
            self.fc2 = _linear(MLP_RATIO * width, width, end_deviation)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.dropout(self._attended(self.norm1(x)))
            out: Tensor = x + self.dropout(self.fc2(functional.gelu(self.fc1(self.norm2(x)))))
            return out

        def _attended(self, x: Tensor) -> Tensor:
            samples, length, _ = x.shape
            q, k, v = self.qkv(x).view(samples, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out: Tensor = self.proj(found.transpose(1, 2).reshape(samples, length, width))
            return out

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(width), _linear(width, classes)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.norm(x)).transpose(1, 2)
            return out

    return nn.Sequential(Embedding(), *(Block() for _ in range(depth)), Head())


def _linear(inputs: int, outputs: int, deviation: float = INITIAL_DEVIATION) -> nn.Linear:
    # skip_init leaves out torch's default initialization, which takes minutes for billions of weights.
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
    nn.init.normal_(layer.weight, std=deviation)
    nn.init.zeros_(layer.bias)
    return layer


DECLARATION = ModelDeclaration(
    name="char_transformer",
    summary="A causal transformer, 4 blocks 128 wide, for data sets of sequences; dropout 0.1.",
    frameworks=("torch",),
    packages=("torch",),
    samples=Samples.SEQUENCES,
    build=lambda config, _channels, classes, size: transformer(config, classes, size, WIDTH, DEPTH, HEADS),
    layers=list,
    num_layers=lambda _name: DEPTH + 2,
    has_batch_norm=False,
    has_dropout=True,
)
