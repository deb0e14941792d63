"""``resnet18``: torchvision's, with a stem for large or for small images."""

from __future__ import annotations

from workloads.contract import TrainConfig
from workloads.lazy import lazy_imports
from workloads.models.shared import layer_lists, weights
from workloads.models.shared.torch_models import torchvision_model
from workloads.registry import ModelDeclaration

with lazy_imports(__name__):
    from torch import nn


def build_resnet(factory: str, config: TrainConfig, channels: int, classes: int) -> nn.Module:
    """Build a torchvision ResNet of any depth with the configured stem."""
    small = {"kernel_size": 3, "stride": 1, "padding": 1} if config.stem == "cifar" else {}
    model = torchvision_model(factory, config, channels, classes, first="conv1", **small)
    if small:
        model.maxpool = nn.Identity()
    return model


DECLARATION = ModelDeclaration(
    name="resnet18",
    summary="torchvision's ResNet-18; stem imagenet (7x7 stride 2, max-pool) or cifar (3x3 stride 1, no pool).",
    frameworks=("torch",),
    packages=("torch", "torchvision"),
    build=lambda config, channels, classes, _size: build_resnet("resnet18", config, channels, classes),
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 15,
    has_batch_norm=True,
    has_dropout=False,
    weights=weights.torchvision("resnet18-f37072fd.pth", classifier="fc"),
    uses_stem=True,
)
