"""What a ``TrainConfig`` means in torch: precision, rate, optimiser, loss, batch norm, and the models."""

from __future__ import annotations

import math
from typing import Any

import pytest

from workloads import registry
from workloads.contract import Hardware, TrainConfig
from workloads.errors import InputError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def _config(**changes: Any) -> TrainConfig:
    fields = {
        "model": "cnn",
        "dataset": "digits",
        "strategy": "eager",
        "hardware": Hardware("cpu", 1),
        "cpus": 1,
        "lr": 0.1,
    }
    return TrainConfig(**(fields | changes))


def _build(channels: int = 3, classes: int = 10, size: int = 32, **changes: Any) -> Any:
    config = _config(**changes)
    declaration = registry.find(registry.models(), config.model)
    assert declaration is not None
    return declaration.build(config, channels, classes, declaration.image_size(config.model, size))


def _parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, {0: 0.1, 9: 0.1}),
        ({"warmup_steps": 4}, {0: 0.025, 1: 0.05, 3: 0.1, 4: 0.1, 9: 0.1}),
        ({"schedule": "linear"}, {0: 0.1, 5: 0.05, 9: 0.01}),
        ({"schedule": "cosine"}, {0: 0.1, 5: 0.05, 9: 0.05 * (1 + math.cos(0.9 * math.pi))}),
        ({"schedule": "linear", "warmup_steps": 2}, {0: 0.05, 1: 0.1, 2: 0.1, 6: 0.05, 9: 0.1 / 8}),
        ({"schedule": "cosine", "warmup_steps": 10}, {0: 0.01, 9: 0.1}),
    ],
)
def test_the_rate_of_every_step(changes: dict[str, Any], rates: dict[int, float]) -> None:
    """Over ten steps: schedules fall to zero over the whole run, warm-up comes first, no step has a rate of zero."""
    from workloads.engines.settings import learning_rate

    assert {step: pytest.approx(learning_rate(_config(**changes), step, 10)) for step in rates} == rates
    assert all(learning_rate(_config(**changes), step, 10) > 0 for step in range(10))


@pytest.mark.parametrize(
    ("changes", "kind", "settings"),
    [
        (
            {"optimizer": "sgd", "momentum": 0.8, "nesterov": True, "weight_decay": 1e-4},
            "SGD",
            {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 1e-4},
        ),
        ({"optimizer": "adam", "weight_decay": 1e-2}, "Adam", {"lr": 0.1, "weight_decay": 1e-2}),
        ({"optimizer": "adamw", "weight_decay": 1e-2}, "AdamW", {"lr": 0.1, "weight_decay": 1e-2}),
    ],
)
def test_the_optimiser_is_the_configured_one(changes: dict[str, Any], kind: str, settings: dict[str, Any]) -> None:
    from workloads.engines.recipe import make_optimizer, set_learning_rate

    optimizer = make_optimizer(_config(**changes), [torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer).__name__ == kind
    assert settings.items() <= optimizer.param_groups[0].items()
    set_learning_rate(optimizer, 0.025)
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", False), ("fp64", False)])
def test_fp32_is_ieee_in_cudnn_too(precision: str, tf32: bool) -> None:
    """cuDNN's own default is TF32, which would make a run called fp32 another precision."""
    from workloads.engines.recipe import set_precision

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        set_precision(_config(precision=precision))
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (tf32, tf32)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_bf16_computes_narrow_and_counts_wide() -> None:
    """Under autocast the logits are bfloat16, the parameters and the loss are not."""
    from workloads.engines.recipe import forward, loss_sum

    config = _config(precision="bf16")
    layer = torch.nn.Linear(8, 4)
    logits = forward(config, torch.device("cpu"), layer, torch.randn(6, 8))
    assert (logits.dtype, layer.weight.dtype) == (torch.bfloat16, torch.float32)
    assert loss_sum(config, logits, torch.zeros(6, dtype=torch.int64)).dtype == torch.float32


def test_the_loss_is_a_sum_with_label_smoothing() -> None:
    from workloads.engines.recipe import loss_sum

    logits, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    plain = -torch.log_softmax(logits, 1)
    expected = 0.8 * plain[range(5), y].sum() + 0.2 * plain.mean(1).sum()
    assert float(loss_sum(_config(label_smoothing=0.2), logits, y)) == pytest.approx(float(expected))


def test_frozen_batch_norm_learns_and_does_not_count() -> None:
    """Running statistics stand still in training mode; scale and shift have gradients; dropout is active as ever."""
    from workloads.engines.recipe import set_training

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)).eval()
    set_training(_config(batch_norm="frozen"), model, True)
    model(torch.randn(8, 3) + 5).sum().backward()
    assert model[1].training and not model[0].training
    assert float(model[0].running_mean.abs().max()) == 0 and model[0].weight.grad is not None
    model.eval()
    set_training(_config(), model, True)
    assert model[0].training


def test_models_start_equal_from_a_seed() -> None:
    """Whatever was drawn before: the seed decides, and only the seed."""
    from workloads.engines.recipe import build_model

    data = registry.datasets()["digits"].load(None, "digits", _config())
    torch.rand(3)
    one, two, other = (build_model(_config(seed=seed), data, 28).state_dict() for seed in (4, 4, 5))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["0.weight"], other["0.weight"])


def test_the_cnn_is_the_studys_network() -> None:
    """905,354 trainable parameters with one channel, fed at 28 px whatever the data set's size."""
    model = _build(channels=1, size=8)
    assert _parameters(model) == 905_354
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert [m.p for m in model if isinstance(m, torch.nn.Dropout)] == [0.5] * 3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_resnets_take_any_channels_and_size(stem: str, size: int, channels: int) -> None:
    model = _build(model="resnet18", stem=stem, channels=channels, size=size, classes=7).eval()
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)
    assert model.conv1.weight.shape == (64, channels, *((3, 3) if stem == "cifar" else (7, 7)))
    if channels == 3 and stem == "imagenet":
        assert _parameters(model) == 11_176_512 + 512 * 7 + 7


def test_resnet50_is_torchvisions() -> None:
    assert _parameters(_build(model="resnet50", classes=1000)) == 25_557_032


@pytest.mark.parametrize(("size", "patch"), [(8, 4), (32, 4), (128, 16), (224, 16)])
def test_vit_tiny_chooses_its_patches(size: int, patch: int) -> None:
    model = _build(model="vit_tiny", size=size, channels=1).eval()
    assert model.patch_embed.proj.kernel_size == (patch, patch)
    assert model(torch.randn(1, 1, size, size)).shape == (1, 10)
    if size == 224:
        assert _parameters(_build(model="vit_tiny", size=size, classes=1000)) == 5_717_416


@pytest.mark.parametrize(("size", "patch"), [(30, 4), (2, 4), (200, 16)])
def test_vit_tiny_refuses_sizes_that_do_not_divide(size: int, patch: int) -> None:
    with pytest.raises(ValueError, match=f"cuts {size} px images into {patch} px patches"):
        registry.models()["vit_tiny"].image_size("vit_tiny", size)


def test_a_refused_size_reaches_people_as_a_sentence() -> None:
    from workloads.engines.settings import image_size

    data = registry.datasets()["digits"].load(None, "digits", _config())
    with pytest.raises(InputError, match=r"image_size: vit_tiny cuts 30 px images"):
        image_size(_config(model="vit_tiny", image_size=30), data)


def test_a_size_that_the_model_would_not_be_fed_is_refused_in_the_job() -> None:
    from workloads.engines.settings import image_size

    data = registry.datasets()["digits"].load(None, "digits", _config())
    assert image_size(_config(model="cnn"), data) == image_size(_config(model="cnn", image_size=28), data) == 28
    with pytest.raises(InputError, match="image_size: cnn takes images of 28 px, not 32: write 28"):
        image_size(_config(model="cnn", image_size=32), data)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model": "cnn", "stem": "cifar"}, 'experiment.toml: stem: cnn ignores stem = "cifar"'),
        (
            {"model": "resnet50", "dropout": 0.1},
            "experiment.toml: dropout: resnet50 has no dropout layer and ignores dropout = 0.1",
        ),
    ],
)
def test_a_key_that_the_model_would_ignore_is_refused_in_the_job(keys: dict[str, Any], said: str) -> None:
    from workloads.engines import settings

    with pytest.raises(InputError) as raised:
        settings.model(_config(**keys))
    assert said in str(raised.value)


@pytest.mark.parametrize("name", ["timm/resnet10t", "timm/vit_tiny_patch16_224"])
def test_any_timm_model_is_built_for_the_data(name: str) -> None:
    """With and without an ``img_size`` of its own."""
    model = _build(model=name, size=32, channels=1, classes=3).eval()
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("name", ["timm/vit_tiny_patch16_224", "timm/gcvit_xxtiny"])
def test_an_impossible_size_of_a_timm_model_is_said(name: str) -> None:
    """Whether timm fails when it builds the model or, as most do, on the first image."""
    with pytest.raises(InputError, match=f"{name} cannot take 7 px images"):
        _build(model=name, size=7)


def test_one_dropout_rate_reaches_every_layer() -> None:
    """Dropout, attention, drop-path and the functional form with an attribute; None leaves the model's own."""
    own = _build(model="timm/swin_tiny_patch4_window7_224", size=224)
    assert {type(m).__name__ for m in own.modules()} >= {"DropPath", "Dropout"}
    assert len({m.drop_prob for m in own.modules() if type(m).__name__ == "DropPath"}) > 1
    for rate in (0.0, 0.25):
        model = _build(model="timm/swin_tiny_patch4_window7_224", size=224, dropout=rate)
        drops = [m for m in model.modules() if type(m).__name__ in {"DropPath", "Dropout"}]
        assert {getattr(m, "drop_prob", getattr(m, "p", None)) for m in drops} == {rate}
    assert _build(model="timm/resnet10t", dropout=0.25).drop_rate == 0.25
    assert {m.p for m in _build(dropout=0.0).modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
