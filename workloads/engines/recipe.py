"""What a ``TrainConfig`` means in torch, for every strategy: precision, seed, model, optimizer, loss, mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
    # torch's note "CUDA semantics": cudnn.allow_tf32 is True by default, matmul.allow_tf32 is False.
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


def example(loader: Loader, samples: int) -> Tensor:
    """Return an input of that many samples, all of them the first test sample."""
    x = next(loader.test()).x
    return x[:1].repeat(samples, *[1] * (x.ndim - 1))


def make_optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the configured optimizer with torch's fused update, the fastest on GPU and CPU."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, nesterov=config.nesterov, **common)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, **common)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next step, without waiting for the device."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def loss_sum(config: TrainConfig, logits: Tensor, y: Tensor) -> Tensor:
    """Return the training loss summed over samples, in float32 for bfloat16 logits.

    The loss of a sequence is the mean over its positions.
    """
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    summed = functional.cross_entropy(wide, y, reduction="sum", label_smoothing=config.label_smoothing)
    return summed if y.ndim == 1 else summed / y.shape[1]


def backward(initial_gradients: dict[float, Tensor], loss: Tensor, weight: float) -> None:
    """Compute the gradients of weight x loss.

    The weight is the initial gradient, because a product would launch two more kernels a step, and launches bound small
    models.

    Args:
        initial_gradients: a tensor for each weight, made when first needed.
    """
    if weight not in initial_gradients:
        initial_gradients[weight] = torch.full_like(loss, weight, requires_grad=False)
    loss.backward(initial_gradients[weight])  # type: ignore[no-untyped-call]


def forward(config: TrainConfig, device: torch.device, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the logits, computed under autocast for bf16."""
    if config.precision != "bf16":
        return module(x)
    with torch.autocast(device.type, torch.bfloat16):
        return module(x)


def set_training(config: TrainConfig, module: nn.Module, training: bool) -> None:
    """Set training or evaluation mode; frozen batch norm stays in evaluation mode."""
    if module.training is training:
        return
    module.train(training)
    if training and config.batch_norm == "frozen":
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()  # batch norm freezing
