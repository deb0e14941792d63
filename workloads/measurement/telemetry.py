"""Utilization, power, energy and memory of a run's GPUs, read from NVML once a second during training.

One process per node queries all GPUs of the run there, in a thread. UUIDs name the GPUs, since NVML ignores
``CUDA_VISIBLE_DEVICES``. Imports no framework; without NVML the result says why there are no values.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workloads.contract import RunResult

SAMPLE_EVERY_S = 1.0
SAMPLES_PER_EVENT = 10


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Usage of GPUs during training."""

    problem: str = ""
    """Why there are no values; empty when there are."""
    gpus: int = 0
    samples: int = 0
    """Taken during training steps, not during evaluations."""
    utilization_pct: float | None = None
    """Mean over samples and GPUs."""
    power_w: float | None = None
    """Mean over samples, of the sum over GPUs."""
    energy_j: float | None = None
    """Sum over GPUs, evaluations and checkpoints included."""
    memory_used_bytes: int | None = None
    """Maximum over samples and GPUs."""

    def fill(self, result: RunResult) -> None:
        """Fill in the fields of a result."""
        result.telemetry = self.problem or "nvml"
        result.gpu_utilization_pct, result.gpu_power_w = self.utilization_pct, self.power_w
        result.energy_j, result.gpu_memory_used_bytes = self.energy_j, self.memory_used_bytes


def combine_nodes(nodes: Sequence[GpuUsage]) -> GpuUsage:
    """Combine the usage of all nodes over the same time."""
    if failed := next((node for node in nodes if node.problem), None):
        return failed
    return GpuUsage(
        gpus=sum(n.gpus for n in nodes),
        samples=max((n.samples for n in nodes), default=0),
        utilization_pct=_mean([(n.gpus, n.utilization_pct) for n in nodes]),
        power_w=_sum([n.power_w for n in nodes]),
        energy_j=_sum([n.energy_j for n in nodes]),
        memory_used_bytes=_max(n.memory_used_bytes for n in nodes),
    )


def combine_attempts(earlier: GpuUsage | None, now: GpuUsage) -> GpuUsage:
    """Combine the usage of the same GPUs in two attempts; a value that one attempt lacks is missing in both."""
    if earlier is None or now.problem:
        return now
    if earlier.problem:
        return earlier
    return GpuUsage(
        gpus=now.gpus,
        samples=earlier.samples + now.samples,
        utilization_pct=_mean([(a.samples, a.utilization_pct) for a in (earlier, now) if a.samples]),
        power_w=_mean([(a.samples, a.power_w) for a in (earlier, now) if a.samples]),
        energy_j=_sum([earlier.energy_j, now.energy_j]),
        memory_used_bytes=_max((earlier.memory_used_bytes, now.memory_used_bytes)),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _max(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mean(weighted: Sequence[tuple[int, float | None]]) -> float | None:
    total = _sum([None if value is None else weight * value for weight, value in weighted])
    weights = sum(weight for weight, _ in weighted)
    return total / weights if total is not None and weights else None


class _Sample(NamedTuple):
    """One moment; one value per GPU, None where NVML has none, such as for MIG slices."""

    time: float
    """Seconds since the epoch."""
    phase: str
    utilization_pct: list[int | None]
    power_w: list[float | None]
    memory_used_bytes: list[int | None]


class Sampler:
    """Samples the GPUs while it is open, as a context manager; its errors do not end the run.

    Args:
        gpus: UUIDs, as ``nvidia-smi`` prints them.
        phase: returns the phase of the run; usage counts samples of ``train``.
        write: writes an event, given its name and values.
    """

    def __init__(self, gpus: Sequence[str], phase: Callable[[], str], write: Callable[..., None]) -> None:
        self._gpus = list(gpus)
        self._phase, self._write = phase, write
        self._problem = "" if gpus else "no GPUs"
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._energy_before_j: list[float | None] = []
        self._utilization_pct: list[float] = []
        self._power_w: list[float] = []
        self._memory_used_bytes: int | None = None
        self._samples = 0
        self._unwritten: list[_Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="telemetry", daemon=True)

    def __enter__(self) -> Sampler:
        if not self._problem:
            self._problem = self._connect()
        if not self._problem:
            self._energy_before_j = self._energies_j()
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
            self._write_samples()

    def usage(self) -> GpuUsage:
        """Return the usage so far."""
        if self._problem:
            return GpuUsage(problem=self._problem)
        energies = zip(self._energy_before_j, self._energies_j(), strict=True)
        spent = [None if before is None or now is None else now - before for before, now in energies]
        return GpuUsage(
            gpus=len(self._gpus),
            samples=self._samples,
            utilization_pct=_mean([(1, value) for value in list(self._utilization_pct)]),
            power_w=_mean([(1, value) for value in list(self._power_w)]),
            energy_j=_sum(spent),
            memory_used_bytes=self._memory_used_bytes,
        )

    def _connect(self) -> str:
        """Connect to NVML; return why that failed, empty on success."""
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            return "the package nvidia-ml-py is not installed"
        try:
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in self._gpus]
        except self._nvml.NVMLError as error:
            return f"NVML: {error}"
        return ""

    def _sample(self) -> None:
        self._take_sample()
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._take_sample()

    def _take_sample(self) -> None:
        phase = self._phase()
        sample = _Sample(
            time.time(),
            phase,
            self._query(lambda gpu: self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            self._query(lambda gpu: self._nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            self._query(lambda gpu: self._nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        )
        self._memory_used_bytes = _max([self._memory_used_bytes, *sample.memory_used_bytes])
        if phase == "train":
            self._samples += 1
            utilization, power = _sum(sample.utilization_pct), _sum(sample.power_w)
            if utilization is not None:
                self._utilization_pct.append(utilization / len(self._handles))
            if power is not None:
                self._power_w.append(power)
        self._unwritten.append(sample)
        if len(self._unwritten) == SAMPLES_PER_EVENT:
            self._write_samples()

    def _write_samples(self) -> None:
        samples, self._unwritten = self._unwritten, []
        if samples:
            columns = dict(zip(_Sample._fields, map(list, zip(*samples, strict=True)), strict=True))
            columns["at"] = columns.pop("time")
            self._write("telemetry", gpus=self._gpus, **columns)

    def _energies_j(self) -> list[float | None]:
        return self._query(lambda gpu: self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3)

    def _query(self, read: Callable[[Any], Any]) -> list[Any]:
        """Return one value per GPU; None where the GPU or its driver does not support the query."""

        def value(gpu: Any) -> Any:
            try:
                return read(gpu)
            except self._nvml.NVMLError:
                return None

        return [value(gpu) for gpu in self._handles]
