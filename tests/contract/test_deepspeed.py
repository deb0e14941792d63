"""What ``deepspeed`` changes in DeepSpeed itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.contract.variants import missing_packages
from workloads import registry

pytestmark = pytest.mark.torch

UUIDS = """
import sys, types

from workloads.strategies import deepspeed as strategy

sys.modules["pynvml"] = types.SimpleNamespace(
    NVMLError=OSError, nvmlInit=list, nvmlDeviceGetHandleByIndex=int, nvmlDeviceGetMemoryInfo=lambda _handle: None
)
task = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda", index=1))
accelerator = strategy._import_deepspeed(task).accelerator.get_accelerator()
accelerator.total_memory, accelerator.memory_allocated = (lambda _device: 80), (lambda _device: 30)
print(type(accelerator).__name__, accelerator.available_memory(1))
"""
"""Makes DeepSpeed's accelerator of GPUs on a machine without any."""


def test_gpus_may_be_named_by_uuid() -> None:
    """As local mode names them; DeepSpeed reads every name as a number."""
    if missing := missing_packages(registry.strategies()["deepspeed"]):
        pytest.skip(f"not installed: {', '.join(missing)}")
    uuids = {"CUDA_VISIBLE_DEVICES": "GPU-11111111-aaaa,GPU-22222222-bbbb", "DS_ACCELERATOR": "cuda"}
    done = subprocess.run([sys.executable, "-c", UUIDS], env=os.environ | uuids, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["CUDA_Accelerator 50"], done.stderr
