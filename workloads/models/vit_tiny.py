"""``vit_tiny``: timm's smallest vision transformer, with patches that suit the image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.models.shared import layer_lists
from workloads.registry import ModelDeclaration

if TYPE_CHECKING:
    from torch import nn

LARGE_PX = 128
"""From this size up a patch is 16 px, below it 4: a 32 px image in 16 px patches would be four tokens."""


def patch_size(image_size: int) -> int:
    """Pixels a side of a patch."""
    return 16 if image_size >= LARGE_PX else 4


def _image_size(_name: str, wished: int) -> int:
    patch = patch_size(wished)
    if wished < patch or wished % patch:
        raise ValueError(
            f"vit_tiny cuts {wished} px images into {patch} px patches, and {wished} is no multiple of {patch}"
        )
    return wished


def _build(config: TrainConfig, channels: int, classes: int, image_size: int) -> nn.Module:
    import timm

    from workloads.models.shared.torch_models import override

    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        patch_size=patch_size(image_size),
        img_size=image_size,
        in_chans=channels,
        num_classes=classes,
    )
    override(model, config.dropout)
    return model


DECLARATION = ModelDeclaration(
    name="vit_tiny",
    summary="timm's ViT-Tiny; patch 16 from 128 px up, else 4.",
    frameworks=("torch",),
    packages=("torch", "torchvision", "timm"),
    image_size=_image_size,
    build=_build,
    layers=layer_lists.of_timm,
    num_layers=lambda _name: 20,
    has_batch_norm=False,
    has_dropout=True,
)
