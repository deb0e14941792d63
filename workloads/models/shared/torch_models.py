"""Models of torchvision and timm with the configured input channels and dropout."""

from __future__ import annotations

from typing import Any

from workloads.contract import TrainConfig
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import timm
    import torchvision
    from torch import nn


def torchvision_model(
    factory: str, config: TrainConfig, channels: int, classes: int, *, first: str, **changes: int
) -> nn.Module:
    """Build a model of torchvision, with a new first convolution where input channels or stem differ.

    Args:
        factory: a function of ``torchvision.models``.
        first: name of the model's first convolution.
        changes: arguments of that convolution that differ from torchvision's.
    """
    model: nn.Module = getattr(torchvision.models, factory)(weights=None, num_classes=classes)
    old = model.get_submodule(first)
    assert isinstance(old, nn.Conv2d)
    if channels != old.in_channels or changes:
        shape: dict[str, Any] = {"kernel_size": old.kernel_size, "stride": old.stride, "padding": old.padding}
        new = nn.Conv2d(channels, old.out_channels, bias=old.bias is not None, **shape | changes)
        # torchvision initializes the convolutions of its ResNet, VGG and MobileNetV2 like this.
        nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
        if new.bias is not None:
            nn.init.zeros_(new.bias)
        parent, _, name = first.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
    set_dropout(model, config.dropout)
    return model


def timm_model(name: str, config: TrainConfig, channels: int, classes: int, **arguments: Any) -> nn.Module:
    """Build a model of timm with random weights."""
    model: nn.Module = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes, **arguments)
    set_dropout(model, config.dropout)
    return model


def set_dropout(module: nn.Module, rate: float | None) -> None:
    """Set the rate of every layer that drops activations or paths; None keeps the model's own rates.

    Covers torch's Dropout family and attention, torchvision's StochasticDepth, timm's DropPath, and the models of both
    that call the functional form with an attribute ``drop_rate``. A model whose own rate is zero may have no such layer
    on a path; that path stays without one.
    """
    if rate is None:
        return
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ == "StochasticDepth":
            layer.p = rate  # type: ignore[assignment]
        elif type(layer).__name__ == "DropPath":
            layer.drop_prob = rate  # type: ignore[assignment]
        elif isinstance(layer, nn.MultiheadAttention):
            layer.dropout = rate
        if isinstance(getattr(layer, "drop_rate", None), float):
            layer.drop_rate = rate  # type: ignore[assignment]
