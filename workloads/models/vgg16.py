"""``vgg16``: torchvision's, without batch norm as in the paper.

Five poolings halve the image, so 32 px leave one pixel, which the model's own adaptive pooling repeats to the 7 x 7
that its classifier expects: small images train the same 138 million parameters as large ones.
"""

from __future__ import annotations

from workloads.lazy import lazy_imports
from workloads.models.shared import layer_lists, weights
from workloads.models.shared.torch_models import torchvision_model
from workloads.registry import TENSORFLOW, ModelDeclaration

with lazy_imports(__name__):
    from workloads.models.keras_forms import architectures

SMALLEST_PX = 32


def _image_size(_name: str, wished: int) -> int:
    if wished < SMALLEST_PX:
        raise ValueError(f"vgg16 halves an image five times, which leaves nothing of {wished} px: use {SMALLEST_PX} px")
    return wished


DECLARATION = ModelDeclaration(
    name="vgg16",
    summary="torchvision's VGG16, without batch norm; from 32 px up, where its last features are one pixel.",
    frameworks=("torch", TENSORFLOW),
    packages=("torch", "torchvision"),
    image_size=_image_size,
    build=lambda config, channels, classes, _size: torchvision_model(
        "vgg16", config, channels, classes, first="features.0"
    ),
    keras_layers=lambda make, _config, classes: architectures.vgg16(make, classes),
    layers=layer_lists.of_torchvision,
    num_layers=lambda _name: 40,
    has_batch_norm=False,
    has_dropout=True,
    weights=weights.torchvision("vgg16-397923af.pth", classifier="classifier.6"),
)
