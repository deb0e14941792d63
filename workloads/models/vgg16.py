"""``vgg16``: torchvision's, without batch norm as in the paper.

Five poolings halve the image, so 32 px leave one pixel, which the model's own adaptive pooling repeats to the 7 x 7
that its classifier is made for: small images train the same 138 million parameters as large ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import TrainConfig
from workloads.models.shared import layer_lists, weights
from workloads.registry import TENSORFLOW, ModelDeclaration

if TYPE_CHECKING:
    from torch import nn

SMALLEST_PX = 32


def _image_size(_name: str, wished: int) -> int:
    if wished < SMALLEST_PX:
        raise ValueError(f"vgg16 halves an image five times, which leaves nothing of {wished} px: use {SMALLEST_PX} px")
    return wished


def _build(config: TrainConfig, channels: int, classes: int, _image_size: int) -> nn.Module:
    from torch import nn
    from torchvision.models import vgg

    from workloads.models.shared.torch_models import override

    model: nn.Module = vgg.vgg16(weights=None, num_classes=classes)
    if channels != 3:
        first = nn.Conv2d(channels, 64, kernel_size=3, padding=1)
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does for its own
        assert first.bias is not None
        nn.init.zeros_(first.bias)
        model.features[0] = first  # type: ignore[operator,assignment]
    override(model, config.dropout)
    return model


def _keras_layers(make: Any, config: TrainConfig, classes: int) -> list[Any]:
    from workloads.models.keras_forms import architectures

    return architectures.vgg16(make, config, classes)


DECLARATION = ModelDeclaration(
    name="vgg16",
    summary="torchvision's VGG16, without batch norm; from 32 px up, where its last features are one pixel.",
    frameworks=("torch", TENSORFLOW),
    packages=("torch", "torchvision"),
    image_size=_image_size,
    build=_build,
    keras_layers=_keras_layers,
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 40,
    has_batch_norm=False,
    has_dropout=True,
    weights=weights.torchvision("vgg16-397923af.pth", classifier="classifier.6"),
)
