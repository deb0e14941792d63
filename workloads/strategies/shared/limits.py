"""What several strategies cannot do, each as the sentence that a plan shows; empty when they can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workloads.contract import Hardware, Topology
from workloads.registry import TENSORFLOW, Options, StrategyDeclaration


def one_device(name: str, hardware: Hardware) -> str:
    """Check a strategy that trains on one device."""
    return f"{name} trains on one device and {hardware} has {hardware.devices}" if hardware.devices > 1 else ""


def one_node(name: str, hardware: Hardware, devices: str = "devices") -> str:
    """Check a strategy of one process."""
    if hardware.nodes == 1:
        return ""
    return f"{name} is one process, which cannot use the {devices} of {hardware.nodes} nodes"


def _tensorflow_training(train: Mapping[str, Any], _options: Options) -> str:
    """Check the keys of a TensorFlow run."""
    if train["channels_last"]:
        return "TensorFlow always stores channels last: remove channels_last"
    if train["loader"] != "resident":
        return f'loader = "{train["loader"]}" is for PyTorch: TensorFlow needs loader = "resident"'
    return ""


def no_channels_last(why: str) -> Callable[[Mapping[str, Any], Options], str]:
    """Return the check of a strategy that cannot use ``channels_last``."""
    return lambda train, _options: why if train["channels_last"] else ""


def not_captured(why: str) -> Callable[[str, Options], str]:
    """Return the check of a strategy that compiles models, and whose steps no CUDA graph can capture."""
    return lambda how, _options: "" if how == "default" else why


tensorflow_declaration = partial(
    StrategyDeclaration,
    framework=TENSORFLOW,
    topology=lambda _options: Topology.ONE_PROCESS,
    packages=("tensorflow|tensorflow-cpu",),
    unsupported_training=_tensorflow_training,
    unsupported_compile=lambda _how, _options: "TensorFlow always traces its steps into graphs: remove compile",
)
"""Declare a TensorFlow strategy."""
