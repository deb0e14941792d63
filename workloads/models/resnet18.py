"""``resnet18``: torchvision's, with a stem for large or for small images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.models.shared import layer_lists, weights
from workloads.registry import ModelDeclaration

if TYPE_CHECKING:
    from torch import nn


def image_size(_name: str, wished: int) -> int:
    """Any size will do: padding keeps every stage at one pixel or more, and the last pooling is global."""
    return wished


def build(factory: str, config: TrainConfig, channels: int, classes: int) -> nn.Module:
    """A torchvision ResNet with the configured stem; ``resnet50`` and later depths share it."""
    import torchvision
    from torch import nn

    from workloads.models.shared.torch_models import override

    model: nn.Module = getattr(torchvision.models, factory)(weights=None, num_classes=classes)
    if config.stem == "cifar" or channels != 3:
        small = config.stem == "cifar"
        stem = nn.Conv2d(
            channels, 64, kernel_size=3 if small else 7, stride=1 if small else 2, padding=1 if small else 3, bias=False
        )
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does for its own
        model.conv1 = stem
    if config.stem == "cifar":
        model.maxpool = nn.Identity()
    override(model, config.dropout)
    return model


DECLARATION = ModelDeclaration(
    name="resnet18",
    summary="torchvision's ResNet-18; stem imagenet (7x7 stride 2, max-pool) or cifar (3x3 stride 1, no pool).",
    frameworks=("torch",),
    packages=("torch", "torchvision"),
    image_size=image_size,
    build=lambda config, channels, classes, _size: build("resnet18", config, channels, classes),
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 15,
    has_batch_norm=True,
    has_dropout=False,
    weights=weights.torchvision("resnet18-f37072fd.pth", classifier="fc"),
    uses_stem=True,
)
