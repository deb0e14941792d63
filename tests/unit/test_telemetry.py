"""Queries to NVML and the values made of them; a fake NVML module stands on the path."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db.connect import open_store
from orchestrator.cli import run
from workloads.contract import RunResult
from workloads.engines.training import Training
from workloads.measurement import telemetry
from workloads.measurement.telemetry import GpuUsage, Sampler, combine_attempts, combine_nodes

NVML = """
class NVMLError(Exception):
    pass
class NVMLError_NotSupported(NVMLError):
    pass
class _Answer:
    def __init__(self, **values):
        self.__dict__.update(values)
GPUS = {
    "GPU-one": {"gpu": 40, "mw": 200_000, "used": 3 << 30},
    "GPU-two": {"gpu": 60, "mw": 100_500, "used": 5 << 30},
    "MIG-three": {"used": 1 << 30},
}
energy_mj = 1_000_000
def nvmlInit():
    if broken:
        raise NVMLError("Driver Not Loaded")
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid not in GPUS:
        raise NVMLError("Not Found")
    return uuid
def _of(uuid, key):
    if key not in GPUS[uuid]:
        raise NVMLError_NotSupported("Not Supported")
    return GPUS[uuid][key]
def nvmlDeviceGetUtilizationRates(handle):
    return _Answer(gpu=_of(handle, "gpu"), memory=1)
def nvmlDeviceGetPowerUsage(handle):
    return _of(handle, "mw")
def nvmlDeviceGetMemoryInfo(handle):
    return _Answer(total=80 << 30, free=0, used=_of(handle, "used"))
def nvmlDeviceGetTotalEnergyConsumption(handle):
    global energy_mj
    _of(handle, "mw")
    energy_mj += 500_000
    return energy_mj
broken = False
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(telemetry, "SAMPLE_EVERY_S", 0.01)
    import pynvml

    yield pynvml
    sys.modules.pop("pynvml")


class _Log:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: str, **values: Any) -> None:
        self.events.append({"event": event} | values)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_usage_covers_training_and_events_cover_all_samples(nvml: Any) -> None:
    """Evaluations are sampled, and do not count for utilisation and power; what is left over is written at the end."""
    log, phase = _Log(), ["train"]
    with Sampler(["GPU-one", "GPU-two"], lambda: phase[0], log.write) as sampler:
        _until(lambda: sampler.usage().samples >= 3)
        phase[0] = "evaluate"
        nvml.GPUS["GPU-one"] |= {"gpu": 0, "mw": 50_000, "used": 9 << 30}
        _until(lambda: sampler.usage().memory_used_bytes == 9 << 30)
        usage = sampler.usage()
    assert (usage.gpus, usage.utilization_pct, usage.power_w) == (2, 50.0, 300.5)
    # The counter of this NVML moves on by 500 J with each look.
    assert usage.energy_j is not None and usage.energy_j > 0 and usage.energy_j % 1000 == 0
    result = RunResult(run_id="r", attempt=1, state="succeeded")
    usage.fill(result)
    assert (result.telemetry, result.gpu_utilization_pct, result.gpu_power_w) == ("nvml", 50.0, 300.5)
    assert (result.energy_j, result.gpu_memory_used_bytes) == (usage.energy_j, 9 << 30)
    phases = [phase for event in log.events for phase in event["phase"]]
    assert set(phases) == {"train", "evaluate"} and len(phases) == sum(len(e["power_w"]) for e in log.events)
    assert log.events[0]["gpus"] == ["GPU-one", "GPU-two"]
    assert log.events[0]["power_w"][0] == [200.0, 100.5] and log.events[0]["utilization_pct"][0] == [40, 60]
    assert all(len(e["at"]) <= telemetry.SAMPLES_PER_EVENT for e in log.events)


def test_missing_values_of_a_mig_slice_are_none(nvml: Any) -> None:
    log = _Log()
    with Sampler(["GPU-one", "MIG-three"], lambda: "train", log.write) as sampler:
        _until(lambda: sampler.usage().samples >= 2)
        usage = sampler.usage()
    assert usage == dataclasses.replace(
        usage, problem="", utilization_pct=None, power_w=None, energy_j=None, memory_used_bytes=3 << 30
    )
    assert log.events[-1]["power_w"][0] == [200.0, None]


@pytest.mark.parametrize(
    ("gpus", "broken", "why"),
    [
        ([], False, "no GPUs"),
        (["GPU-one"], True, "NVML: Driver Not Loaded"),
        (["GPU-none"], False, "NVML: Not Found"),
    ],
)
def test_without_nvml_the_result_has_the_reason(nvml: Any, gpus: list[str], broken: bool, why: str) -> None:
    nvml.broken = broken
    log = _Log()
    with Sampler(gpus, lambda: "train", log.write) as sampler:
        usage = sampler.usage()
    assert usage == GpuUsage(problem=why) and not log.events
    result = RunResult(run_id="r", attempt=1, state="succeeded")
    combine_nodes([usage]).fill(result)
    assert (result.telemetry, result.energy_j) == (why, None)


def test_without_the_package_the_result_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler(["GPU-one"], lambda: "train", _Log().write) as sampler:
        assert sampler.usage().problem == "the package nvidia-ml-py is not installed"


def test_usage_of_nodes_and_attempts_is_combined() -> None:
    one = GpuUsage(gpus=1, samples=10, utilization_pct=80.0, power_w=300.0, energy_j=1000.0, memory_used_bytes=5)
    other = GpuUsage(gpus=3, samples=10, utilization_pct=40.0, power_w=900.0, energy_j=2000.0, memory_used_bytes=7)
    together = GpuUsage(gpus=4, samples=10, utilization_pct=50.0, power_w=1200.0, energy_j=3000.0, memory_used_bytes=7)
    assert combine_nodes([one, other]) == together
    later = GpuUsage(gpus=4, samples=30, utilization_pct=90.0, power_w=1600.0, energy_j=500.0, memory_used_bytes=6)
    assert combine_attempts(together, later) == GpuUsage(
        gpus=4, samples=40, utilization_pct=80.0, power_w=1500.0, energy_j=3500.0, memory_used_bytes=7
    )
    without = GpuUsage(problem="no GPUs")
    assert (
        combine_nodes([one, without]) == without == combine_attempts(without, later) == combine_attempts(later, without)
    )
    assert combine_attempts(None, later) is later
    short = dataclasses.replace(later, samples=0, utilization_pct=None, power_w=None)
    assert combine_attempts(together, short).utilization_pct == 50.0, (
        "an attempt too short for a sample takes nothing away"
    )


def test_one_rank_per_node_samples_all_of_its_gpus() -> None:
    """Four ranks on two nodes, in an order that no launcher has."""
    ranks = [(1, 0, ("GPU-c",)), (0, 1, ("GPU-a",)), (1, 2, ("GPU-d",)), (0, 3, ("GPU-b",))]

    def asked(rank: int) -> list[str] | None:
        node = ranks[rank][0]
        backend: Any = SimpleNamespace(steps_per_epoch=1, gather=lambda answer: ranks)
        job: Any = SimpleNamespace(
            spec=SimpleNamespace(train=SimpleNamespace(steps=1), expect=SimpleNamespace(gpus_per_node=2)),
            world=SimpleNamespace(node=node, rank=rank),
            pulse=SimpleNamespace(phase="train"),
            events=_Log(),
        )
        sampler = Training(job, backend, gpus=ranks[rank][2])._make_sampler()
        return sampler._gpus if sampler else None

    assert [asked(rank) for rank in range(4)] == [["GPU-c", "GPU-d"], ["GPU-a", "GPU-b"], None, None]


def test_results_show_the_columns(campaign: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    usage = {"telemetry": "nvml", "gpu_utilization_pct": 97.5, "gpu_power_w": 640.25, "energy_j": 1.5e6}
    campaign.done(seed=0, result=usage | {"gpu_memory_used_bytes": 3 << 30, "compile_s": 4.5})
    monkeypatch.chdir(tmp_path)
    assert run(["collect"]) == 0
    capsys.readouterr()
    names = "telemetry,gpu_utilization_pct,gpu_power_w,energy_j,gpu_memory_used_bytes,compile_s,compile"
    assert run(["results", "--select", names, "--format", "csv"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.endswith(names) and row.endswith(f"nvml,97.5,640.25,1500000.0,{3 << 30},4.5,off")
    with open_store(str(tmp_path / "results.db")) as store, store.read() as connection:
        assert connection.exec_driver_sql("SELECT energy_j FROM summary").scalar_one() == 1.5e6
