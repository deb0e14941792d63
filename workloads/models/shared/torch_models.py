"""``dropout = RATE`` of an experiment: one rate for every dropout and drop-path layer of any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def override(module: nn.Module, rate: float | None) -> None:
    """Set the rate of every layer that drops activations or paths; None leaves the model's own.

    Covers torch's Dropout family and attention, torchvision's StochasticDepth, timm's DropPath, and the models of both
    that call the functional form with an attribute ``drop_rate``. A path that the model built without a drop layer,
    because its own rate is zero, stays without one.
    """
    if rate is None:
        return
    from torch import nn

    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ == "StochasticDepth":
            layer.p = rate  # type: ignore[assignment]
        elif type(layer).__name__ == "DropPath":
            layer.drop_prob = rate  # type: ignore[assignment]
        elif isinstance(layer, nn.MultiheadAttention):
            layer.dropout = rate
        if isinstance(getattr(layer, "drop_rate", None), float):
            layer.drop_rate = rate  # type: ignore[assignment]
