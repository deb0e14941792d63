"""``mobilenet_v2``: torchvision's, at any image size.

Five of its layers halve the image. Padding keeps every one at a pixel or more: of 32 px the last features are a single
pixel, and below that the late layers work on one pixel too. Nothing is changed for small images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.models.shared import layer_lists, weights
from workloads.registry import ModelDeclaration

if TYPE_CHECKING:
    from torch import nn


def _build(config: TrainConfig, channels: int, classes: int, _image_size: int) -> nn.Module:
    from torch import nn
    from torchvision.models import mobilenetv2

    from workloads.models.shared.torch_models import override

    model: nn.Module = mobilenetv2.mobilenet_v2(weights=None, num_classes=classes)
    if channels != 3:
        first = nn.Conv2d(channels, 32, kernel_size=3, stride=2, padding=1, bias=False)
        nn.init.kaiming_normal_(first.weight, mode="fan_out")  # as torchvision does for its own
        model.features[0][0] = first  # type: ignore[index,assignment]
    override(model, config.dropout)
    return model


DECLARATION = ModelDeclaration(
    name="mobilenet_v2",
    summary="torchvision's MobileNetV2, at any image size.",
    frameworks=("torch",),
    packages=("torch", "torchvision"),
    image_size=lambda _name, wished: wished,
    build=_build,
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 23,
    has_batch_norm=True,
    has_dropout=True,
    weights=weights.torchvision("mobilenet_v2-b0353104.pth", classifier="classifier.1"),
)
