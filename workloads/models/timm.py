"""``timm/NAME``: any model of timm. Whether timm has it is known in the job; the login node need not have timm."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.errors import InputError
from workloads.registry import ModelDeclaration

if TYPE_CHECKING:
    from torch import nn


def _image_size(_name: str, wished: int) -> int:
    return wished


def _build(config: TrainConfig, channels: int, classes: int, image_size: int) -> nn.Module:
    import timm

    from workloads.models.dropout import override

    name = config.model.partition("/")[2]
    if not timm.is_model(name):
        near = ", ".join(f"timm/{n}" for n in difflib.get_close_matches(name, timm.list_models(), n=3))
        raise InputError(
            f"timm {timm.__version__} has no model {name!r}",
            where="experiment.toml: model",
            hint=f"nearest: {near}" if near else "timm.list_models() lists them all",
        )
    arguments = {"pretrained": False, "in_chans": channels, "num_classes": classes}
    try:
        # Convolutional models take any size and know no such argument; transformers must be told.
        model: nn.Module = timm.create_model(name, img_size=image_size, **arguments)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        model = timm.create_model(name, **arguments)
    except (AssertionError, ValueError) as error:
        reason = str(error) or inspect.trace()[-1].function
        raise InputError(
            f"timm/{name} cannot be built for {image_size} px images", why=reason, hint="set image_size"
        ) from error
    override(model, config.dropout)
    return model


DECLARATION = ModelDeclaration(
    name="timm/*",
    summary="Any model of timm by its name there, such as timm/mobilenetv3_small_100.",
    frameworks=("torch",),
    packages=("torch", "torchvision", "timm"),
    image_size=_image_size,
    build=_build,
)
