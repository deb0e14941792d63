"""``cnn``, ``vgg16`` and ``resnet50`` as lists of Keras layers: the same number and order as the torch form's.

So the option ``balance`` of a strategy that cuts models means the same in both frameworks.
"""

from __future__ import annotations

from typing import Any

from keras.layers import Flatten, GlobalAveragePooling2D, Identity, Layer, ReLU

from workloads.contract import TrainConfig
from workloads.models.keras_forms.layers import AdaptiveAveragePool, Maker

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Filters of the convolutions; 0 is a pooling."""
RESNET50 = ((64, 3), (128, 4), (256, 6), (512, 3))
"""(width, blocks) of the stages."""


def cnn(make: Maker, classes: int, dropout: float) -> list[Any]:
    """Return the layers of ``workloads.models.cnn``."""

    def convolution(index: int, filters: int) -> list[Any]:
        return [make.convolution(f"{index}", filters, 3, padding=1), make.batch_norm(f"{index + 1}"), ReLU()]

    def linear(index: int, units: int, flattened: tuple[int, int, int] | None = None) -> list[Any]:
        return [
            make.dropout(dropout),
            make.linear(f"{index + 1}", units, flattened=flattened),
            ReLU(),
            make.batch_norm(f"{index + 3}"),
        ]

    return [
        *convolution(0, 32),
        *convolution(3, 64),
        make.max_pool(2, stride=2),
        *convolution(7, 128),
        make.max_pool(2, stride=2),
        Flatten(),
        *linear(12, 128, (128, 7, 7)),
        *linear(16, 64),
        make.dropout(dropout),
        make.linear("21", classes),
    ]


def vgg16(make: Maker, classes: int) -> list[Any]:
    """Return the layers of torchvision's VGG16."""
    features: list[Any] = []
    for filters in VGG16:
        if filters:
            features += [make.convolution(f"features.{len(features)}", filters, 3, padding=1), ReLU()]
        else:
            features.append(make.max_pool(2, stride=2))
    return [
        *features,
        AdaptiveAveragePool(7),
        Flatten(),
        *(make.linear("classifier.0", 4096, flattened=(512, 7, 7)), ReLU(), make.dropout(0.5)),
        *(make.linear("classifier.3", 4096), ReLU(), make.dropout(0.5)),
        make.linear("classifier.6", classes),
    ]


def resnet50(make: Maker, config: TrainConfig, classes: int) -> list[Any]:
    """Return the layers of torchvision's ResNet-50, with the configured stem."""
    small = config.stem == "cifar"
    kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    return [
        make.convolution("conv1", 64, kernel, stride=stride, padding=padding, bias=False),
        *(make.batch_norm("bn1"), ReLU()),
        Identity() if small else make.max_pool(3, stride=2, padding=1),
        *(
            Bottleneck(make, f"layer{stage}.{block}", width, 2 if stage > 1 and not block else 1, project=not block)
            for stage, (width, blocks) in enumerate(RESNET50, start=1)
            for block in range(blocks)
        ),
        GlobalAveragePooling2D(keepdims=True),
        Flatten(),
        make.linear("fc", classes),
    ]


class Bottleneck(Layer):  # type: ignore[misc]
    """A residual block; the second convolution has the stride, as torchvision's (ResNet v1.5)."""

    def __init__(self, make: Maker, name: str, width: int, stride: int, *, project: bool) -> None:
        super().__init__(name=name)
        self._main = [
            make.convolution(f"{name}.conv1", width, 1, bias=False),
            *(make.batch_norm(f"{name}.bn1"), ReLU()),
            make.convolution(f"{name}.conv2", width, 3, stride=stride, padding=1, bias=False),
            *(make.batch_norm(f"{name}.bn2"), ReLU()),
            make.convolution(f"{name}.conv3", 4 * width, 1, bias=False),
            make.batch_norm(f"{name}.bn3"),
        ]
        self._side = []
        if project:
            self._side = [
                make.convolution(f"{name}.downsample.0", 4 * width, 1, stride=stride, bias=False),
                make.batch_norm(f"{name}.downsample.1"),
            ]
        self._last = ReLU()

    def call(self, x: Any) -> Any:
        main = side = x
        for layer in self._main:
            main = layer(main)
        for layer in self._side:
            side = layer(side)
        return self._last(main + side)
