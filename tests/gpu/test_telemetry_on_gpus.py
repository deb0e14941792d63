"""Telemetry of a run on real GPUs, through NVML and the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

from tests.contract.conftest import launcher  # noqa: E402, F401 (fixture)


@pytest.mark.parametrize("gpus", [1, 2])
def test_training_of_some_seconds_is_sampled(launcher: Any, tmp_path: Path, gpus: int) -> None:  # noqa: F811
    """Samples cover exactly the GPUs of the run; a busy GPU draws power, and energy is about power times time."""
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two GPUs")
    strategy = "eager" if gpus == 1 else "ddp"
    run = launcher.write(
        tmp_path,
        expect={"gpus_per_node": gpus},
        execution={"checkpoint_every": 0},  # writing checkpoints takes energy but is not training
        **{"hardware": f"gpu:{gpus}", "strategy": strategy, "model": "resnet18", "dataset": "synthetic"},
        **{"image_size": 64, "batch_size": 256, "steps": 600, "eval_every": 0},
    )
    launcher.succeed(run, ranks=gpus, within_s=400)
    result = run.attempt(1).read_result()
    assert result.telemetry == "nvml"
    events = launcher.events(run.attempt(1), "telemetry")
    used = {str(torch.cuda.get_device_properties(i).uuid) for i in range(gpus)}
    assert {uuid.removeprefix("GPU-") for uuid in events[0]["gpus"]} == used
    assert not launcher.events(run.attempt(1), "telemetry", rank=1)
    samples = sum(phase == "train" for event in events for phase in event["phase"])
    assert samples >= result.train_time_s - 2
    assert 5 < result.gpu_utilization_pct <= 100
    assert 30 * gpus < result.gpu_power_w < 1500 * gpus
    assert result.energy_j == pytest.approx(result.gpu_power_w * result.train_time_s, rel=0.5)
    assert result.gpu_memory_used_bytes > result.peak_memory_bytes
