"""What strategies refuse, as the plan tells it: through ``matrix.expand`` with the strategies that are installed."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config import experiment
from orchestrator.errors import ExperimentError
from orchestrator.planning import matrix
from workloads import registry
from workloads.contract import Hardware

CAST = '{ name = "fsdp", mixed_precision = "cast" }'


def _why(strategy: str, hardware: str = "cpu:2", **keys: Any) -> str:
    """Why a cell is excluded; empty when it is planned."""
    written = {key: f'"{v}"' if isinstance(v, str) else str(v).lower() for key, v in keys.items()}
    model = written.pop("model", '"cnn"')
    defaults = "".join(f"{key} = {value}\n" for key, value in written.items())
    text = f'name = "n"\n[defaults]\n{defaults}[matrix]\nmodel = [{model}]\ndataset = ["digits"]\n'
    text += f'strategy = [{strategy}]\nhardware = ["{hardware}"]\n'
    expanded = matrix.expand(experiment.parse(text, "experiment.toml"), default_cpus=lambda _hardware, ranks: ranks)
    return "".join(excluded.why for excluded in expanded.excluded)


def _has_balance(strategy: str) -> bool:
    return any(option.name == "balance" for option in registry.strategies()[strategy].options)


@pytest.mark.parametrize(
    ("strategy", "keys", "why"),
    [
        ('"fsdp"', {}, ""),
        ('"fsdp"', {"channels_last": True}, "FSDP2 does not shard channels_last parameters"),
        (CAST, {"precision": "bf16", "model": "vit_tiny"}, ""),
        (CAST, {}, 'mixed_precision = "cast" is for precision = "bf16", not fp32'),
        *(
            (
                CAST,
                {"precision": "bf16", "batch_norm": how},
                'mixed_precision = "cast" casts weights to bf16, which batch norm cannot use with its fp32 statistics: '
                'set mixed_precision = "autocast"',
            )
            for how in ("batch", "frozen")
        ),
        (CAST, {"precision": "bf16", "model": "timm/resnet10t"}, ""),
        ('"local_sgd"', {"optimizer": "adam"}, ""),
        ('"horovod"', {"channels_last": True}, "Horovod averages only contiguous gradients, without channels_last"),
        ('"eager"', {"compile": "default", "hardware": "cpu:1"}, ""),
        ('"tf_eager"', {"cudnn_benchmark": True, "hardware": "gpu:1"}, "cudnn_benchmark is a setting of torch"),
        ('"ddp"', {"compile": "default"}, ""),
        ('"ddp"', {"compile": "graphs", "hardware": "gpu:2"}, ""),
        ('"local_sgd"', {"compile": "default_graphs", "hardware": "gpu:2"}, ""),
        ('"pipeline"', {"compile": "graphs", "hardware": "gpu:2"}, ""),
        (
            '"eager"',
            {"compile": "graphs", "hardware": "cpu:1"},
            'compile = "graphs" records the work of an NVIDIA GPU: on CPU use "off" or "default"',
        ),
        (
            '{ name = "ddp", gradient_compression = "bf16" }',
            {"compile": "graphs", "hardware": "gpu:2"},
            'compile = "graphs" captures DDP\'s own all-reduce, not one with gradient_compression',
        ),
        (
            '"data_parallel"',
            {"compile": "graphs", "hardware": "gpu:2"},
            "nn.DataParallel copies the model in every step, and compiled code and CUDA graphs belong to one copy",
        ),
        (
            '"fsdp"',
            {"compile": "graphs", "hardware": "gpu:2"},
            "FSDP2 allocates and frees parameters in every step, which a CUDA graph cannot capture",
        ),
        (
            '"horovod"',
            {"compile": "default_graphs", "hardware": "gpu:2"},
            "Horovod's own thread starts the all-reduce, which a CUDA graph cannot capture",
        ),
        (
            '"model_parallel"',
            {"compile": "graphs", "hardware": "gpu:2"},
            "one CUDA graph cannot capture a step over two GPUs",
        ),
        (
            '"gpipe"',
            {"compile": "default"},
            "torchgpipe runs the model's parts in its own threads, which torch.compile and CUDA graphs do not cover",
        ),
        (
            '{ name = "pipeline", schedule = "zero_bubble" }',
            {"compile": "default"},
            "schedule zero_bubble splits a stage's backward pass, which compiled code and CUDA graphs run as one",
        ),
        ('"ddp"', {"cudnn_benchmark": True}, "cudnn_benchmark is for NVIDIA GPUs: on CPU there is no cuDNN"),
        ('"ddp"', {"cudnn_benchmark": True, "hardware": "gpu:2"}, ""),
        ('{ name = "probe", fault = "crash", fault_rank = 1, fault_epoch = 3 }', {"epochs": 3}, ""),
        ('{ name = "probe", fault_rank = 2, fault_epoch = 4 }', {"epochs": 3}, ""),
        (
            '{ name = "probe", fault = "crash", fault_rank = 2 }',
            {},
            "fault_rank 2 would never fail: cpu:2 has 2 ranks, counted from 0",
        ),
        (
            '{ name = "probe", fault = "hang", fault_epoch = 4 }',
            {"epochs": 3},
            "fault_epoch 4 would never come: the run has 3 epochs",
        ),
        ('"deepspeed"', {}, ""),
        ('"deepspeed"', {"channels_last": True}, "ZeRO keeps parameters in flat buffers, without channels_last"),
        (
            '"deepspeed"',
            {"precision": "fp64"},
            "ZeRO updates parameters in single precision, so it cannot train in fp64",
        ),
        ('{ name = "deepspeed", stage = 4 }', {}, "ZeRO has stages 1, 2 and 3, and stage is 4"),
        (
            '"deepspeed"',
            {"compile": "default"},
            "ZeRO's hooks gather and reduce between layers, outside of compiled code and CUDA graphs",
        ),
        ('"tf_mirrored"', {"precision": "fp64"}, ""),
        (
            '"tf_mirrored"',
            {"channels_last": True},
            "TensorFlow always stores channels last: remove channels_last",
        ),
        (
            '"tf_mirrored"',
            {"loader": "dataloader"},
            'loader = "dataloader" is for PyTorch: TensorFlow needs loader = "resident"',
        ),
        (
            '"tf_mirrored"',
            {"compile": "default"},
            "TensorFlow always traces its steps into graphs: remove compile",
        ),
        ('{ name = "tf_mirrored", all_reduce = "nccl" }', {}, 'all_reduce = "nccl" is for GPUs'),
        ('"tf_mirrored"', {"model": "vit_tiny"}, "vit_tiny is not written for tensorflow, which tf_mirrored needs"),
        (
            '{ name = "tf_model_parallel", balance = [22] }',
            {},
            "tf_model_parallel has two parts, and balance [22] names 1",
        ),
        ('"gpipe"', {}, ""),
        ('"gpipe"', {"channels_last": True}, ""),
        ('{ name = "gpipe", segments = 2, balance = [1, 1] }', {}, ""),
        ('{ name = "gpipe", balance = [21] }', {}, "balance [21] is for 1 devices and cpu:2 has 2"),
        (
            '{ name = "gpipe", segments = 4, balance = [1, 1] }',
            {},
            "balance [1, 1] adds up to 2 and there are 4 segments",
        ),
        *(
            (f'{{ name = "{name}", balance = {balance} }}', {}, f"{name} cannot cut cnn: balance {balance} {why}")
            for name in ("gpipe", "pipeline", "model_parallel", "tf_model_parallel")
            for balance, why in {
                "[1, 1]": "adds up to 2, and there are 22 layers",
                "[20, 3]": "adds up to 23, and there are 22 layers",
            }.items()
        ),
        ('{ name = "gpipe", balance = [20, 2] }', {}, ""),
        *(
            (
                f'{{ name = "{name}", balance = [20, 2], balance_by = "{by}" }}',
                {},
                f'balance_by = "{by}" is ignored with balance [20, 2]: remove one of them',
            )
            for name, by in {"gpipe": "size", "pipeline": "size", "model_parallel": "time"}.items()
        ),
        ('{ name = "gpipe", segments = 2, balance = [1, 1], balance_by = "size" }', {}, ""),
        (
            '{ name = "fsdp", wrap = "model", min_unit_parameters = 5 }',
            {},
            'min_unit_parameters has no effect with wrap = "model": remove one of them',
        ),
        ('{ name = "tf_model_parallel", balance = [1, 21] }', {}, ""),
        (
            '{ name = "gpipe", segments = 23 }',
            {},
            "gpipe cannot cut cnn: 22 layers cannot be split into 23 parts",
        ),
        ('{ name = "gpipe", balance = [1, 1] }', {"model": "timm/resnet10t"}, ""),
        ('{ name = "gpipe", segments = 1 }', {}, "1 segments are too few for the 2 devices of cpu:2"),
        ('{ name = "gpipe", chunks = 60 }', {}, ""),
        ('"pipeline"', {}, ""),
        (
            '{ name = "pipeline", schedule = "interleaved", chunks = 3 }',
            {},
            "schedule interleaved needs chunks to be a multiple of the 2 devices, and it is 3",
        ),
        (
            '{ name = "pipeline", chunks = 1 }',
            {},
            "schedule 1f1b needs a micro-batch for each of 2 devices, and chunks is 1",
        ),
        (
            '{ name = "pipeline", schedule = "interleaved", balance = [1, 2] }',
            {},
            "schedule interleaved has 4 stages on cpu:2, and balance [1, 2] names 2",
        ),
        (
            '"pipeline"',
            {"channels_last": True},
            "messages between stages are contiguous, so channels_last has no effect",
        ),
        (
            '{ name = "pipeline", chunks = 7 }',
            {},
            "batch_size 120 cannot be cut into 7 equal micro-batches, and batch norm would see the padding: "
            "set another batch_size",
        ),
        ('{ name = "pipeline", chunks = 7 }', {"batch_norm": "frozen"}, ""),
        ('"model_parallel"', {}, ""),
        ('{ name = "model_parallel", balance = [21] }', {}, "model_parallel has two parts, and balance [21] names 1"),
    ],
)
def test_what_cannot_be_is_excluded_with_its_reason(strategy: str, keys: dict[str, Any], why: str) -> None:
    assert _why(strategy, batch_size=120, drop_last=True, **keys) == why


@pytest.mark.parametrize(
    ("strategy", "hardware", "why"),
    [
        ('"data_parallel"', "cpu:2", "data_parallel needs GPUs: on a CPU, nn.DataParallel calls the module directly"),
        ('"data_parallel"', "gpu:2x2", "data_parallel is one process, which cannot use the GPUs of 2 nodes"),
        ('"tf_eager"', "cpu:2", "tf_eager trains on one device and cpu:2 has 2"),
        ('"tf_mirrored"', "gpu:2x2", "tf_mirrored is one process, which cannot use the devices of 2 nodes"),
        ('"tf_model_parallel"', "gpu:1", "tf_model_parallel has two parts for two devices of one node, not for gpu:1"),
        ('"model_parallel"', "gpu:4", "model_parallel has two parts for two devices of one node, not for gpu:4"),
        ('"gpipe"', "gpu:2x2", "gpipe is one process, which cannot use the devices of 2 nodes"),
        (
            '{ name = "pipeline", chunks = 24 }',
            "cpu:24",
            "pipeline cannot cut cnn: 22 layers cannot be split into 24",
        ),
        ('"pipeline"', "gpu:1", "a pipeline needs at least two devices, and gpu:1 has one"),
    ],
)
def test_hardware_that_cannot_do_is_refused(strategy: str, hardware: str, why: str) -> None:
    assert _why(strategy, hardware, batch_size=120, drop_last=True).startswith(why)


@pytest.mark.parametrize(
    ("strategy", "keys", "why"),
    [
        ('"gpipe"', {"batch_size": 4}, "batch_size 4 leaves one of 4 micro-batches with a single sample"),
        ('"pipeline"', {"batch_size": 128}, "the last batch of an epoch has"),
        ('"pipeline"', {"batch_size": 128, "drop_last": True}, ""),
    ],
)
def test_what_batch_norm_would_see_is_refused(strategy: str, keys: dict[str, Any], why: str) -> None:
    """A micro-batch of one sample, and samples that a pipeline makes up for an odd batch."""
    told = _why(strategy, **keys)
    assert told.startswith(why) and bool(told) is bool(why)


@pytest.mark.parametrize("name", [name for name in registry.strategies() if _has_balance(name)])
@pytest.mark.parametrize("balance", ["[-1, 0]", "[22, 0]"])
def test_a_part_has_a_layer_at_least(name: str, balance: str) -> None:
    with pytest.raises(ExperimentError, match=r"strategy\[0\]\.balance\[\d\]: -?\d is out of range"):
        _why(f'{{ name = "{name}", balance = {balance} }}')


@pytest.mark.parametrize("name", registry.strategies())
def test_declarations_are_sound(name: str) -> None:
    """Option names are unique, defaults have a known type and are among the choices; what contract tests use is
    declared."""
    declaration = registry.strategies()[name]
    assert declaration.name == name
    options = {option.name: option for option in declaration.options}
    assert len(options) == len(declaration.options)
    for option in options.values():
        assert option.type in (bool, int, float, str, tuple)
        assert not option.choices or option.default in option.choices
    assert all(options.keys() >= wanted.keys() for wanted in declaration.contract_options)
    assert isinstance(declaration.unsupported_hardware(Hardware("cpu", 2), declaration.options_with_defaults({})), str)
