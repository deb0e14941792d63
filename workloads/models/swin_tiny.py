"""``swin_tiny``: timm's Swin-T, with patches and windows that suit the image.

From 128 px up as published: patches of 4 px, windows of 7 x 7 patches. Below, patches of 2 px and windows of 4 x 4: a
32 px image in patches of 4 px would reach the last stage as a single token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.models.shared import layer_lists, weights
from workloads.registry import ModelDeclaration

if TYPE_CHECKING:
    from torch import nn

LARGE_PX = 128
STAGES = 4
"""Each but the first halves the tokens a side."""


def patch_size(image_size: int) -> int:
    """Pixels a side of a patch."""
    return 4 if image_size >= LARGE_PX else 2


_MODULES = {"0": "mlp.fc1", "3": "mlp.fc2"}


def own_name(published: str) -> str:
    """timm's name for a parameter of torchvision's Swin-T, whose published weights fit; empty for a table of indices.

    torchvision counts patches, stages and the mergings between them as one list of ``features``.
    """
    kind, *rest = published.split(".")
    if published.endswith("relative_position_index"):
        return ""
    if kind == "head":
        return ".".join(["head.fc", *rest])
    if kind != "features":
        return published
    place, *rest = rest
    if place == "0":
        return ".".join(["patch_embed", "proj" if rest[0] == "0" else "norm", *rest[1:]])
    stage, blocks = divmod(int(place), 2)
    if not blocks:
        return ".".join(["layers", str(stage), "downsample", *rest])
    block, module, *rest = rest
    if module == "mlp":
        module, rest = _MODULES[rest[0]], rest[1:]
    return ".".join(["layers", str(stage), "blocks", block, module, *rest])


def _image_size(_name: str, wished: int) -> int:
    step = patch_size(wished) * 2 ** (STAGES - 1)
    if wished < step or wished % step:
        raise ValueError(
            f"swin_tiny cuts {wished} px images into {patch_size(wished)} px patches and halves those three times, and "
            f"{wished} is no multiple of {step}"
        )
    return wished


def _build(config: TrainConfig, channels: int, classes: int, image_size: int) -> nn.Module:
    import timm

    from workloads.models.shared.torch_models import override

    model: nn.Module = timm.create_model(
        "swin_tiny_patch4_window7_224",
        pretrained=False,
        patch_size=patch_size(image_size),
        window_size=7 if image_size >= LARGE_PX else 4,
        img_size=image_size,
        in_chans=channels,
        num_classes=classes,
    )
    override(model, config.dropout)
    return model


DECLARATION = ModelDeclaration(
    name="swin_tiny",
    summary="timm's Swin-T; patches of 4 px and windows of 7 from 128 px up, else 2 px and 4.",
    frameworks=("torch",),
    packages=("torch", "torchvision", "timm"),
    image_size=_image_size,
    build=_build,
    layers=layer_lists.of_timm,
    num_layers=lambda _name: 31,
    has_batch_norm=False,
    has_dropout=True,
    weights=weights.torchvision("swin_t-704ceda3.pth", "head.fc", rename=own_name, smallest_px=LARGE_PX),
)
