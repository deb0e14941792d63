"""What a ``TrainConfig`` means in torch, for every strategy: precision, seed, model, optimizer, loss, mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData
from workloads.datasets.shared.sequence_data import SequenceData
from workloads.engines import settings
from workloads.errors import InputError
from workloads.loaders.protocol import Loader


def dtype_of(config: TrainConfig) -> torch.dtype:
    """Return the dtype of parameters and input; under bf16 only autocast computes in a narrower one."""
    return torch.float64 if config.precision == "fp64" else torch.float32


def set_precision(config: TrainConfig) -> None:
    """Set what ``fp32`` and ``tf32`` mean: torch's default lets cuDNN's convolutions compute fp32 in TF32."""
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    tf32 = config.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def build_model(config: TrainConfig, data: ImageData | SequenceData, size: int, root: Path | None = None) -> nn.Module:
    """Make the model with which every strategy starts: initialized from the seed, on the CPU.

    Args:
        root: the data folder, where pretrained weights lie.

    Raises:
        DatasetError: pretrained weights are missing or damaged.
        InputError: the model has no pretrained weights.
    """
    torch.manual_seed(config.seed)
    declaration = settings.model(config)
    module: nn.Module = declaration.build(config, data.channels, len(data.class_names), size)
    if config.pretrained:
        if declaration.weights is None:
            raise InputError(f"there are no pretrained weights for {config.model}")
        declaration.weights.load(module, root, config.model)
    module.to(dtype_of(config)).eval()  # the first change of mode freezes batch norm
    if config.channels_last:
        module.to(memory_format=torch.channels_last)
    return module


def has_batch_norm(module: nn.Module) -> bool:
    """Whether the model has batch norm, torch's or a subclass."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def layers(config: TrainConfig, module: nn.Module) -> list[nn.Module]:
    """Return the model as a list of layers.

    Raises:
        InputError: the model cannot be cut.
    """
    cut = settings.model(config).layers
    if cut is None:
        raise InputError(f"{config.model} cannot be cut into layers", hint="choose a strategy that keeps models whole")
    return cut(module)


def example(loader: Loader) -> Callable[[int], Tensor]:
    """Return (samples) -> an input of that many samples, all of them the first test sample."""

    def make(samples: int) -> Tensor:
        x = next(loader.test()).x
        return x[:1].repeat(samples, *[1] * (x.ndim - 1))

    return make


def make_optimizer(config: TrainConfig) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return (parameters) -> the configured optimizer with torch's fused update, the fastest on GPU and CPU."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if config.optimizer == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
                fused=True,
            )
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)

    return make


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next step, without waiting for the device."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def loss_sum(config: TrainConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (logits, y) -> training loss summed over samples, in float32 for bfloat16 logits.

    The loss of a sequence is the mean over its positions.
    """

    def compute(logits: Tensor, y: Tensor) -> Tensor:
        wide = logits.float() if logits.dtype == torch.bfloat16 else logits
        summed = functional.cross_entropy(wide, y, reduction="sum", label_smoothing=config.label_smoothing)
        return summed if y.ndim == 1 else summed / y.shape[1]

    return compute


def backward() -> Callable[[Tensor, float], None]:
    """Return (loss, weight) -> computes the gradients of weight x loss.

    The weight is the initial gradient, a tensor made once for each value. A product would launch two more kernels a
    step, and launches bound small models.
    """
    initial: dict[float, Tensor] = {}

    def compute(loss: Tensor, weight: float) -> None:
        if weight not in initial:
            initial[weight] = torch.full_like(loss, weight, requires_grad=False)
        loss.backward(initial[weight])  # type: ignore[no-untyped-call]

    return compute


def forward(config: TrainConfig, device: torch.device) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    """Return (module, x) -> logits, under autocast for bf16."""
    if config.precision != "bf16":
        return lambda module, x: module(x)

    def compute(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return module(x)

    return compute


def set_training(config: TrainConfig) -> Callable[[nn.Module, bool], None]:
    """Return (module, training) -> sets the mode; frozen batch norm stays in evaluation mode."""
    freeze = config.batch_norm == "frozen"

    def switch(module: nn.Module, training: bool) -> None:
        if module.training is training:
            return
        module.train(training)
        if training and freeze:
            for layer in module.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.eval()  # batch norm freezing

    return switch
