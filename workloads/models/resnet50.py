"""``resnet50``: torchvision's, with a stem for large or for small images."""

from __future__ import annotations

from workloads.lazy import lazy_imports
from workloads.models.resnet18 import build_resnet
from workloads.models.shared import layer_lists, weights
from workloads.registry import TENSORFLOW, ModelDeclaration

with lazy_imports(__name__):
    from workloads.models.keras_forms import architectures

DECLARATION = ModelDeclaration(
    name="resnet50",
    summary="torchvision's ResNet-50; stem imagenet (7x7 stride 2, max-pool) or cifar (3x3 stride 1, no pool).",
    frameworks=("torch", TENSORFLOW),
    packages=("torch", "torchvision"),
    build=lambda config, channels, classes, _size: build_resnet("resnet50", config, channels, classes),
    keras_layers=lambda make, config, classes: architectures.resnet50(make, config, classes),
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 23,
    has_batch_norm=True,
    has_dropout=False,
    weights=weights.torchvision("resnet50-0676ba61.pth", classifier="fc"),
    uses_stem=True,
)
