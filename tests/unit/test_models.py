"""Models at small and large image sizes, and the lists of layers that pipelines cut."""

from __future__ import annotations

from typing import Any

import pytest

from workloads import registry
from workloads.contract import Hardware, TrainConfig
from workloads.errors import InputError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def _build(model: str, channels: int = 3, classes: int = 10, size: int = 32, **changes: Any) -> Any:
    config = TrainConfig(
        model=model, dataset="digits", strategy="eager", hardware=Hardware("cpu", 1), cpus=1, **changes
    )
    declaration = registry.find(registry.models(), model)
    assert declaration is not None
    torch.manual_seed(0)
    return declaration.build(config, channels, classes, declaration.image_size(model, size)).eval()


@pytest.mark.parametrize(
    ("model", "size", "parameters"),
    [("vgg16", 32, 138_357_544), ("mobilenet_v2", 32, 3_504_872), ("swin_tiny", 224, 28_288_354)],
)
def test_models_are_the_published_ones(model: str, size: int, parameters: int) -> None:
    """Parameters of the published network with 1,000 classes."""
    with torch.device("meta"):
        built = _build(model, classes=1000, size=size)
    assert sum(p.numel() for p in built.parameters()) == parameters


@pytest.mark.parametrize(
    ("model", "size", "channels"),
    [
        ("vgg16", 32, 1),
        *[("mobilenet_v2", 8, 1), ("mobilenet_v2", 33, 3)],
        *[("swin_tiny", 16, 1), ("swin_tiny", 32, 3)],
    ],
)
def test_small_images_can_be_trained(model: str, size: int, channels: int) -> None:
    """Gray ones too, also in training, where a broken size would show."""
    built = _build(model, channels=channels, classes=7, size=size).train()
    logits = built(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in built.parameters())


@pytest.mark.parametrize(
    ("model", "size", "why"),
    [
        ("vgg16", 28, "leaves nothing of 28 px: use 32 px"),
        ("swin_tiny", 28, "2 px patches and halves those three times, and 28 is no multiple of 16"),
        ("swin_tiny", 240, "4 px patches and halves those three times, and 240 is no multiple of 32"),
    ],
)
def test_unsuitable_sizes_raise_an_error(model: str, size: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        registry.models()[model].image_size(model, size)


@pytest.mark.parametrize("model", [name for name in registry.models() if not name.endswith("/*")])
def test_has_dropout_is_declared_correctly(model: str) -> None:
    with torch.device("meta"):
        built = _build(model)
    dropping = {"Dropout", "DropPath", "StochasticDepth"} & {type(module).__name__ for module in built.modules()}
    assert bool(dropping) is registry.models()[model].has_dropout


@pytest.mark.parametrize(
    "model", ["wide_transformer/1GB", *(name for name in registry.models() if not name.endswith("/*"))]
)
def test_the_declared_number_of_layers_is_right(model: str) -> None:
    declaration = registry.find(registry.models(), model)
    assert declaration is not None and declaration.layers is not None and declaration.num_layers is not None
    with torch.device("meta"):
        assert len(declaration.layers(_build(model))) == declaration.num_layers(model)


CUT = [
    (name, model.image_size(name, 32))
    for name, model in registry.models().items()
    if model.layers is not None and model.samples is registry.Samples.IMAGES and not name.endswith("/*")
]
CUT += [("timm/resnet10t", 32), ("timm/vit_tiny_r_s16_p8_224", 224), ("timm/deit3_small_patch16_224", 32)]


@pytest.mark.parametrize(("model", "size"), CUT)
def test_layers_compute_what_the_model_computes(model: str, size: int) -> None:
    """Difference 0.0 in evaluation, and the list has the model's own parameters and buffers, each once."""
    built = _build(model, size=size, dropout=0.1)
    declaration = registry.find(registry.models(), model)
    assert declaration is not None and declaration.layers is not None
    layers = torch.nn.Sequential(*declaration.layers(built)).eval()
    x = torch.randn(3, 3, size, size)
    with torch.no_grad():
        assert torch.equal(layers(x), built(x))
    assert {id(t) for t in layers.parameters()} == {id(t) for t in built.parameters()}
    assert {id(t) for t in layers.buffers()} == {id(t) for t in built.buffers()}
    assert len(list(layers.modules())) >= len(layers) > 8


@pytest.mark.parametrize("model", ["timm/resnet10t", "mobilenet_v2", "vit_tiny", "swin_tiny"])
def test_layers_drop_what_the_model_drops(model: str) -> None:
    """In training, with dropout, the same random numbers give the same logits."""
    built = _build(model, dropout=0.3)
    declaration = registry.find(registry.models(), model)
    assert declaration is not None and declaration.layers is not None
    layers = torch.nn.Sequential(*declaration.layers(built))
    for part in layers.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.momentum = 0.0
    x, answers = torch.randn(4, 3, 32, 32), []
    for whole in (built, layers):
        whole.train()
        torch.manual_seed(1)
        answers.append(whole(x))
    assert torch.equal(*answers)


def test_every_model_of_ours_can_be_cut() -> None:
    assert {name for name, declaration in registry.models().items() if declaration.layers is None} == set()


@pytest.mark.parametrize(
    ("model", "kind"),
    [("timm/convnext_atto", "ConvNeXt"), ("timm/deit_tiny_distilled_patch16_224", "VisionTransformerDistilled")],
)
def test_a_timm_model_of_another_family_is_an_error(model: str, kind: str) -> None:
    """Also one that derives from a known one, and has another token and another head."""
    with pytest.raises(InputError, match=f"{kind} of timm cannot be cut into layers"):
        registry.models()["timm/*"].layers(_build(model))  # type: ignore[misc]


def test_a_part_does_not_work_in_place_on_its_input() -> None:
    """The head of a part is no longer in place, others still are."""
    from workloads.models.shared import layer_lists

    layers = [torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU(inplace=True), torch.nn.ReLU6(inplace=True)]
    first, second = layer_lists.cut(layers, [1, 2])
    assert len(first) == 1 and not second[0].inplace and second[1].inplace
    x = torch.randn(1, 4, 3, 3)
    before = x.clone()
    second(x)
    assert torch.equal(x, before)
