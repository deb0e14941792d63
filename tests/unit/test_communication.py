"""What a rank says when GPUs are not as its strategy likes them: shown one at a time, or silent towards each other."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from workloads.contract import Expectation
from workloads.job.world import Gpu, World

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("on_gpu", "advice"), [(True, True), (False, False)])
def test_ranks_that_hear_nothing_of_each_other_get_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_gpu: bool, advice: bool
) -> None:
    """The watchdog ends them; this names the host, and on GPUs what helps where they are joined by PCIe only."""
    from workloads.engines import communication

    monkeypatch.setattr(communication, "ADVICE_AFTER_S", 0.05)
    with communication._advice_when_slow(on_gpu):
        time.sleep(0.5)
    said = capsys.readouterr().err
    assert f"{socket.gethostname()}: the ranks exchanged nothing for 0.05 s" in said
    assert ("try NCCL_P2P_DISABLE=1 in the job's environment" in said) == advice
    with communication._advice_when_slow(on_gpu):
        pass
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "nothing is said of those that meet in time"


def test_a_rank_with_one_visible_gpu_takes_number_0_and_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Local rank 1, CUDA_VISIBLE_DEVICES of one device: it is number 0 there, not number 1, which would not exist."""
    from workloads.engines import torch_devices

    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch_devices, "_torch_gpus", lambda: [Gpu("NVIDIA A100-SXM4-80GB", 80 * 10**9, "GPU-b")])
    environment = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
    }
    expect = Expectation(ranks=2, nodes=1, gpus_per_node=2, cpus_per_rank=1, gpu_name="A100", gpu_memory_gb=80)
    job: Any = SimpleNamespace(spec=SimpleNamespace(expect=expect), world=World.from_environment(environment))
    assert torch_devices.choose_device(job) == torch.device("cuda", 0) == taken[0]
    said = capsys.readouterr().err
    assert (
        "rank 1 sees 1 of 2 GPUs: Slurm bound them to tasks" in said and "request GPUs per node, not per task" in said
    )
