"""What several strategies cannot do, each as the sentence that a plan shows; empty when they can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.contract import Hardware
from workloads.registry import Options


def one_device(name: str, hardware: Hardware) -> str:
    """Check a strategy that trains on one device."""
    return f"{name} trains on one device and {hardware} has {hardware.devices}" if hardware.devices > 1 else ""


def one_node(name: str, hardware: Hardware, devices: str = "devices") -> str:
    """Check a strategy of one process."""
    if hardware.nodes == 1:
        return ""
    return f"{name} is one process, which cannot use the {devices} of {hardware.nodes} nodes"


def tensorflow_training(train: Mapping[str, Any], _options: Options) -> str:
    """Check the keys of a TensorFlow run."""
    if train["channels_last"]:
        return "TensorFlow always stores channels last: remove channels_last"
    if train["loader"] != "resident":
        return f'loader = "{train["loader"]}" is for PyTorch: TensorFlow needs loader = "resident"'
    return ""


def tensorflow_compile(_how: str, _options: Options) -> str:
    """Reject every value of ``compile`` for TensorFlow."""
    return "TensorFlow always traces its steps into graphs: remove compile"
