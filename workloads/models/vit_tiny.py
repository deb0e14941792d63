"""``vit_tiny``: timm's smallest vision transformer, with patches that suit the image."""

from __future__ import annotations

from workloads.models.shared import layer_lists
from workloads.models.shared.torch_models import timm_model
from workloads.registry import ModelDeclaration

LARGE_PX = 128
"""From this size up a patch is 16 px, below it 4: a 32 px image in 16 px patches would be four tokens."""


def patch_size(image_size: int) -> int:
    """Return the pixels per side of a patch."""
    return 16 if image_size >= LARGE_PX else 4


def _image_size(_name: str, wished: int) -> int:
    patch = patch_size(wished)
    if wished < patch or wished % patch:
        raise ValueError(
            f"vit_tiny cuts {wished} px images into {patch} px patches, and {wished} is no multiple of {patch}"
        )
    return wished


DECLARATION = ModelDeclaration(
    name="vit_tiny",
    summary="timm's ViT-Tiny; patch 16 from 128 px up, else 4.",
    frameworks=("torch",),
    packages=("torch", "torchvision", "timm"),
    image_size=_image_size,
    build=lambda config, channels, classes, size: timm_model(
        "vit_tiny_patch16_224", config, channels, classes, patch_size=patch_size(size), img_size=size
    ),
    layers=layer_lists.of_timm,
    num_layers=lambda _name: 20,
    has_batch_norm=False,
    has_dropout=True,
)
