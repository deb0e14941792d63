"""``mobilenet_v2``: torchvision's, at any image size.

Five of its layers halve the image, and padding keeps at least one pixel: the last features of a 32 px image are one
pixel, and smaller images reach the late layers as one pixel too. The model is the same at every size.
"""

from __future__ import annotations

from workloads.models.shared import layer_lists, weights
from workloads.models.shared.torch_models import torchvision_model
from workloads.registry import ModelDeclaration

DECLARATION = ModelDeclaration(
    name="mobilenet_v2",
    summary="torchvision's MobileNetV2, at any image size.",
    frameworks=("torch",),
    packages=("torch", "torchvision"),
    build=lambda config, channels, classes, _size: torchvision_model(
        "mobilenet_v2", config, channels, classes, first="features.0.0"
    ),
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 23,
    has_batch_norm=True,
    has_dropout=True,
    weights=weights.torchvision("mobilenet_v2-b0353104.pth", classifier="classifier.1"),
)
