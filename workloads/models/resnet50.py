"""``resnet50``: torchvision's, with a stem for large or for small images."""

from __future__ import annotations

from typing import Any

from workloads.contract import TrainConfig
from workloads.models.resnet18 import build, image_size
from workloads.models.shared import layer_lists, weights
from workloads.registry import TENSORFLOW, ModelDeclaration


def _keras_layers(make: Any, config: TrainConfig, classes: int) -> list[Any]:
    from workloads.models.keras_forms import architectures

    return architectures.resnet50(make, config, classes)


DECLARATION = ModelDeclaration(
    name="resnet50",
    summary="torchvision's ResNet-50; stem imagenet (7x7 stride 2, max-pool) or cifar (3x3 stride 1, no pool).",
    frameworks=("torch", TENSORFLOW),
    packages=("torch", "torchvision"),
    image_size=image_size,
    build=lambda config, channels, classes, _size: build("resnet50", config, channels, classes),
    keras_layers=_keras_layers,
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 23,
    has_batch_norm=True,
    has_dropout=False,
    weights=weights.torchvision("resnet50-0676ba61.pth", classifier="fc"),
    uses_stem=True,
)
