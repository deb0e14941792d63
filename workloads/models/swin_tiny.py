"""``swin_tiny``: timm's Swin-T, with patches and windows that suit the image.

From 128 px up as published: patches of 4 px, windows of 7 x 7 patches. Below, patches of 2 px and windows of 4 x 4: a
32 px image in patches of 4 px would reach the last stage as a single token.
"""

from __future__ import annotations

from workloads.models.shared import layer_lists, weights
from workloads.models.shared.torch_models import timm_model
from workloads.registry import ModelDeclaration

LARGE_PX = 128
STAGES = 4
"""Each but the first halves the number of tokens per side."""


_MODULES = {"0": "mlp.fc1", "3": "mlp.fc2"}


def patch_size(image_size: int) -> int:
    """Return the pixels per side of a patch."""
    return 4 if image_size >= LARGE_PX else 2


def timm_name(published: str) -> str:
    """Return timm's name for a parameter of torchvision's Swin-T; empty for an index table, which timm computes.

    torchvision numbers patches, stages and the mergings between them as one list, ``features``.
    """
    kind, *rest = published.split(".")
    if published.endswith("relative_position_index"):
        return ""
    if kind == "head":
        return ".".join(["head.fc", *rest])
    if kind != "features":
        return published
    index, *rest = rest
    if index == "0":
        return ".".join(["patch_embed", "proj" if rest[0] == "0" else "norm", *rest[1:]])
    stage, blocks = divmod(int(index), 2)
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


DECLARATION = ModelDeclaration(
    name="swin_tiny",
    summary="timm's Swin-T; patches of 4 px and windows of 7 from 128 px up, else 2 px and 4.",
    frameworks=("torch",),
    packages=("torch", "torchvision", "timm"),
    image_size=_image_size,
    build=lambda config, channels, classes, size: timm_model(
        "swin_tiny_patch4_window7_224",
        config,
        channels,
        classes,
        patch_size=patch_size(size),
        window_size=7 if size >= LARGE_PX else 4,
        img_size=size,
    ),
    layers=layer_lists.of_timm,
    num_layers=lambda _name: 31,
    has_batch_norm=False,
    has_dropout=True,
    weights=weights.torchvision("swin_t-704ceda3.pth", "head.fc", rename=timm_name, smallest_px=LARGE_PX),
)
