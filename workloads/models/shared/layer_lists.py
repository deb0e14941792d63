"""A model as a list of layers in order, which pipelines cut into stages.

The layers are the model's own modules: moving or training a layer moves or trains the model, and checkpoints keep the
model's names. In evaluation the list computes bit for bit the same as the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workloads.errors import InputError
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import timm
    import torchvision
    from timm.models import swin_transformer
    from torch import Tensor, nn
    from torchvision.models import mobilenetv2


def of_torchvision(model: nn.Module) -> list[nn.Module]:
    """Return the layers of torchvision's ResNet, VGG or MobileNetV2."""
    whole: Any = model  # torch types the members of a module as Tensor | Module
    if isinstance(model, torchvision.models.ResNet):
        stages = (*whole.layer1, *whole.layer2, *whole.layer3, *whole.layer4)
        return [whole.conv1, whole.bn1, whole.relu, whole.maxpool, *stages, whole.avgpool, nn.Flatten(1), whole.fc]
    if isinstance(model, torchvision.models.VGG):
        return [*whole.features, whole.avgpool, nn.Flatten(1), *whole.classifier]
    assert isinstance(model, mobilenetv2.MobileNetV2), type(model)
    return [*whole.features, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1), *whole.classifier]


def of_timm(model: nn.Module) -> list[nn.Module]:
    """Return the layers of timm's VisionTransformer, SwinTransformer or ResNet. Raises InputError for others."""
    whole: Any = model  # torch types the members of a module as Tensor | Module
    if type(model) is timm.models.VisionTransformer:  # its subclasses add tokens or heads
        return _of_vit(whole)
    if isinstance(model, timm.models.SwinTransformer):
        return _of_swin(whole)
    if isinstance(model, timm.models.ResNet):
        stages = (*whole.layer1, *whole.layer2, *whole.layer3, *whole.layer4)
        drop = [nn.Dropout(whole.drop_rate)] if whole.drop_rate else []
        return [whole.conv1, whole.bn1, whole.act1, whole.maxpool, *stages, whole.global_pool, *drop, whole.fc]
    raise InputError(
        f"{type(model).__name__} of timm cannot be cut into layers",
        where="experiment.toml: model",
        why="only VisionTransformer, SwinTransformer and ResNet of timm can",
        hint="choose another model, or a strategy that keeps the model whole",
    )


def _of_vit(model: Any) -> list[nn.Module]:
    class Part(nn.Module):
        """Calls methods of the whole model with only the attributes that they read."""

        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, getattr(model, name))

    class Embedding(Part):
        def forward(self, x: Tensor) -> Any:
            patches = self.patch_embed(x)  # type: ignore[operator]
            return type(model)._pos_embed(self, patches)

    class Pool(Part):
        def forward(self, x: Tensor) -> Any:
            return type(model).pool(self, x)

    embedding = Embedding(
        *("patch_embed", "cls_token", "reg_token", "pos_embed", "pos_drop"),
        *("no_embed_class", "num_prefix_tokens", "dynamic_img_size"),
    )
    pool = Pool("attn_pool", "pool_include_prefix", "num_prefix_tokens", "global_pool")
    return [
        *(embedding, model.patch_drop, model.norm_pre, *model.blocks),
        *(model.norm, pool, model.fc_norm, model.head_drop, model.head),
    ]


def _of_swin(model: Any) -> list[nn.Module]:
    """Return each half of a block as a layer: whole blocks are too few and unequal for balanced stages."""

    class Attention(swin_transformer.SwinTransformerBlock):
        """The first half of a block: its modules, its mask, and the values that its ``_attn`` reads."""

        def __init__(self, block: Any) -> None:
            nn.Module.__init__(self)
            vars(self).update({name: value for name, value in vars(block).items() if not name.startswith("_")})
            self.norm1, self.attn, self.drop_path1 = block.norm1, block.attn, block.drop_path1
            self.register_buffer("attn_mask", block.attn_mask, persistent=False)

        def forward(self, x: Tensor) -> Any:
            attend: Any = self._attn
            return x + self.drop_path1(attend(self.norm1(x)))

    class Mlp(nn.Module):
        def __init__(self, block: Any) -> None:
            super().__init__()
            self.norm2, self.mlp, self.drop_path2 = block.norm2, block.mlp, block.drop_path2

        def forward(self, x: Tensor) -> Any:
            tokens = x.flatten(1, 2)
            return (tokens + self.drop_path2(self.mlp(self.norm2(tokens)))).reshape(x.shape)

    halves = [
        half
        for stage in model.layers
        for half in (stage.downsample, *(h for block in stage.blocks for h in (Attention(block), Mlp(block))))
    ]
    return [model.patch_embed, *halves, model.norm, model.head]


def cut(layers: Sequence[nn.Module], sizes: Sequence[int]) -> list[nn.Sequential]:
    """Cut layers into consecutive parts of the given sizes.

    The first layer of a part must not work in place: its input may be a leaf of the autograd graph, or still in use by
    the previous stage.
    """
    assert sum(sizes) == len(layers) and min(sizes) > 0, (sizes, len(layers))
    parts, start = [], 0
    for size in sizes:
        part = nn.Sequential(*layers[start : start + size]).eval()
        if start and getattr(part[0], "inplace", False):
            part[0].inplace = False  # type: ignore[assignment]
        parts.append(part)
        start += size
    return parts
