"""``timm/NAME``: any model of timm. Whether timm has it is known in the job; the login node need not have timm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import TrainConfig
from workloads.errors import InputError
from workloads.models.shared import layer_lists
from workloads.registry import ModelDeclaration

if TYPE_CHECKING:
    from torch import nn


def _create(name: str, channels: int, classes: int, image_size: int) -> nn.Module:
    import timm

    def create(**more: Any) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes, **more)
        return model

    try:
        return create(img_size=image_size)
    except TypeError as error:
        # Convolutional models take any size and know no such argument; transformers must be told.
        if "img_size" not in str(error):
            raise
        return create()


def _build(config: TrainConfig, channels: int, classes: int, image_size: int) -> nn.Module:
    import difflib

    import timm
    import torch

    from workloads.models.shared.torch_models import override

    name = config.model.partition("/")[2]
    if not timm.is_model(name):
        near = ", ".join(f"timm/{n}" for n in difflib.get_close_matches(name, timm.list_models(), n=3))
        raise InputError(
            f"timm {timm.__version__} has no model {name!r}",
            where="experiment.toml: model",
            hint=f"nearest: {near}" if near else "timm.list_models() lists them all",
        )
    try:
        model = _create(name, channels, classes, image_size)
        # Many accept any size when they are built and fail on the first image: better now than when training starts.
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, image_size, image_size))
    except (ArithmeticError, AssertionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"timm/{name} cannot take {image_size} px images",
            where="experiment.toml: image_size",
            why=str(error),
            hint="set image_size to what the model is made for",
        ) from error
    override(model, config.dropout)
    return model


DECLARATION = ModelDeclaration(
    name="timm/*",
    summary="Any model of timm by its name there, such as timm/mobilenetv3_small_100.",
    frameworks=("torch",),
    packages=("torch", "torchvision", "timm"),
    image_size=lambda _name, wished: wished,
    build=_build,
    layers=layer_lists.of_timm,
)
