"""``timm/NAME``: any model of timm. The job checks whether timm has it; the login node need not have timm."""

from __future__ import annotations

import difflib

from workloads.contract import TrainConfig
from workloads.errors import InputError
from workloads.lazy import lazy_imports
from workloads.models.shared import layer_lists
from workloads.models.shared.torch_models import timm_model
from workloads.registry import ModelDeclaration

with lazy_imports(__name__):
    import timm
    import torch
    from torch import nn


def _build(config: TrainConfig, channels: int, classes: int, image_size: int) -> nn.Module:
    name = config.model.partition("/")[2]
    if not timm.is_model(name):
        near = ", ".join(f"timm/{n}" for n in difflib.get_close_matches(name, timm.list_models(), n=3))
        raise InputError(
            f"timm {timm.__version__} has no model {name!r}",
            where="experiment.toml: model",
            hint=f"nearest: {near}" if near else "timm.list_models() lists them all",
        )
    try:
        try:
            model = timm_model(name, config, channels, classes, img_size=image_size)
        except TypeError as error:
            # timm's transformers need img_size; its convolutional models take any size and do not know the argument.
            if "img_size" not in str(error):
                raise
            model = timm_model(name, config, channels, classes)
        # Many models accept any size when built and fail on the first image: fail here, before training starts.
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, image_size, image_size))
    except (ArithmeticError, AssertionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"timm/{name} cannot take {image_size} px images",
            where="experiment.toml: image_size",
            why=str(error),
            hint="set image_size to the size the model was designed for",
        ) from error
    return model


DECLARATION = ModelDeclaration(
    name="timm/*",
    summary="Any model of timm by its name there, such as timm/mobilenetv3_small_100.",
    frameworks=("torch",),
    packages=("torch", "torchvision", "timm"),
    build=_build,
    layers=layer_lists.of_timm,
)
