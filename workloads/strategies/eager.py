"""``eager``: plain PyTorch on one device. It defines what *correct* means for every other strategy."""

from __future__ import annotations

from workloads.contract import Topology
from workloads.registry import StrategyDeclaration
from workloads.strategies.shared import limits
from workloads.strategies.shared.torch_strategy import TorchStrategy

DECLARATION = StrategyDeclaration(
    name="eager",
    summary="Plain PyTorch on one device: the baseline, and the definition of correct.",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=lambda hardware, _options: limits.one_device("eager", hardware),
    unsupported_compile=lambda _how, _options: "",
    splits_batch=False,
    batch_norm_treatment="whole_batch",
    create=lambda: TorchStrategy,
)
