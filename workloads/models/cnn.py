"""``cnn``: the network of the published MNIST study, three convolutions and three linear layers."""

from __future__ import annotations

from workloads.contract import TrainConfig
from workloads.lazy import lazy_imports
from workloads.models.shared.torch_models import set_dropout
from workloads.registry import TENSORFLOW, ModelDeclaration

with lazy_imports(__name__):
    from torch import nn

    from workloads.models.keras_forms import architectures

IMAGE_SIZE = 28
"""The first linear layer requires it: 6272 = 128 x 7 x 7."""
ASSUMED_DROPOUT = 0.5
"""The study does not publish its rate."""


def _build(config: TrainConfig, channels: int, classes: int, _image_size: int) -> nn.Module:
    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    def linear(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Dropout(ASSUMED_DROPOUT), nn.Linear(inputs, outputs), nn.ReLU(), nn.BatchNorm1d(outputs)]

    model = nn.Sequential(
        *convolution(channels, 32),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        *convolution(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *linear(128 * 7 * 7, 128),
        *linear(128, 64),
        nn.Dropout(ASSUMED_DROPOUT),
        nn.Linear(64, classes),
    )
    set_dropout(model, config.dropout)
    return model


DECLARATION = ModelDeclaration(
    name="cnn",
    summary="The MNIST study's network: 3 convolutions, 3 linear layers, input 28 px; dropout 0.5 is assumed.",
    frameworks=("torch", TENSORFLOW),
    packages=("torch",),
    image_size=lambda _name, _wished: IMAGE_SIZE,
    build=_build,
    keras_layers=lambda make, _config, classes: architectures.cnn(make, classes, ASSUMED_DROPOUT),
    layers=list,
    num_layers=lambda _name: 22,
    has_batch_norm=True,
    has_dropout=True,
)
