"""What one attempt measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Self

from workloads.contract.run_spec import SPEC_VERSION
from workloads.contract.state import State
from workloads.metrics import Value, metrics


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What one attempt measured: the content of ``result.json``, a row of the table ``results``.

    ``None`` means not measured, never zero. Times are seconds, memory is bytes, rates are per second over all ranks.
    """

    run_id: str
    attempt: int
    state: str
    """``succeeded`` or the failure's state."""
    reason: str = ""
    """Failure class (``program_error``, ``hang``, ...); empty on success."""
    message: str = ""
    """For people: the error's text."""
    diverged: bool = False
    """A loss was NaN or infinite at some point."""
    nonfinite: dict[str, str] = field(default_factory=dict)
    """Field name to ``nan``, ``inf`` or ``-inf`` for values that are None here because JSON has no such number."""

    test_accuracy: float | None = None
    """0 to 1."""
    test_loss: float | None = None
    train_loss: float | None = None
    """Mean over the last epoch's samples."""
    num_test_samples: int | None = None
    num_train_samples: int | None = None
    per_class: list[dict[str, Any]] = field(default_factory=list)
    """One dict a class: ``class_name``, ``precision``, ``recall``, ``f1``, ``support``."""

    train_time_s: float | None = None
    """All epochs, without start-up, compile and evaluation; maximum over ranks."""
    epoch_time_s: float | None = None
    """Median over epochs after the first (over all when there is one)."""
    total_time_s: float | None = None
    """From the start of the first rank's Python to the last evaluation, this attempt and the resumed ones before it."""
    startup_s: float | None = None
    """From process start to the first step, ``compile_s`` left out: imports, rendezvous, data, model."""
    compile_s: float | None = None
    """Compiling and recording before the first step; None with ``compile = "off"``."""
    evaluate_s: float | None = None
    epochs_done: int | None = None
    steps_done: int | None = None
    resumed_from_epoch: int | None = None

    allocated_memory_bytes: int | None = None
    """Maximum over ranks: device memory held between steps (GPU), resident set size (CPU)."""
    peak_memory_bytes: int | None = None
    """Maximum over ranks."""
    memory_by_rank: list[dict[str, int]] = field(default_factory=list)
    """``rank``, ``allocated_memory_bytes``, ``peak_memory_bytes``."""

    telemetry: str | None = None
    """``nvml``, or why there is none of the four below."""
    gpu_utilization_pct: float | None = None
    """Share of the time in which a kernel ran: mean over samples of the training, and over GPUs."""
    gpu_power_w: float | None = None
    """All GPUs together: mean over samples of the training."""
    energy_j: float | None = None
    """All GPUs together, over the training with the evaluations and checkpoints between."""
    gpu_memory_used_bytes: int | None = None
    """Largest sample of any GPU, as ``nvidia-smi`` counts: the CUDA context, libraries and other processes with it."""

    lr_applied: float | None = None
    """Read back from the optimiser at step 0."""
    balance_applied: list[int] | None = None
    """Layers of each part, in order, where the strategy cuts the model; None where it keeps it whole."""
    num_parameters: int | None = None
    """Trainable, of the whole model."""
    world_size: int | None = None
    device_name: str | None = None
    devices_seen: int | None = None
    """Devices visible, added over nodes."""
    cpus_seen: int | None = None
    """Cores this run may use, added over nodes (the union over ranks of a node)."""
    dataset_digest: str | None = None
    batch_norm_treatment: str | None = None
    """How the strategy treated batch norm (``per_rank``, ``whole_batch``, ``frozen``, ...)."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Commit, packages, driver, node, script: see ``workloads.provenance.job_facts``."""
    started_at: str | None = None
    """UTC, ISO 8601."""
    ended_at: str | None = None

    metrics: dict[str, Value | None] = field(default_factory=dict)
    """What the files of ``workloads.metrics`` measure, by name; in JSON and tables each stands among the fields."""

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON: a NaN or infinity is null, named in ``nonfinite``; in a loss it sets ``diverged``."""
        data: dict[str, Any] = {"spec_version": SPEC_VERSION}
        nonfinite = dict(self.nonfinite)
        for name in result_fields():
            value = self.metrics.get(name) if name in metrics() else getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                nonfinite[name] = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
                value = None
            data[name] = value
        data["nonfinite"] = nonfinite
        data["diverged"] = self.diverged or bool({"train_loss", "test_loss"} & set(nonfinite))
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Raises ValueError when the data is not a result this version can read."""
        if data.get("spec_version") != SPEC_VERSION:
            raise ValueError(f"spec_version {data.get('spec_version')!r} is not {SPEC_VERSION}")
        known = {name: data[name] for name in result_fields() if name in data}
        measured = {name: known.pop(name) for name in metrics() if name in known}
        try:
            result = cls(**known, metrics={name: value for name, value in measured.items() if value is not None})
            State(result.state)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a run result: {error}") from error
        return result


@cache
def result_fields() -> dict[str, str]:
    """Return the keys of ``result.json`` in order, with the type of each as ``RunResult`` writes it.

    Raises:
        ValueError: a metric stands after a key that does not exist.
    """
    own = {f.name: str(f.type) for f in fields(RunResult) if f.name != "metrics"}
    types = own | {metric.name: f"{metric.type.__name__} | None" for metric in metrics().values()}

    def with_followers(name: str) -> Iterator[str]:
        yield name
        for metric in metrics().values():
            if metric.after == name:
                yield from with_followers(metric.name)

    ordered = {name: types[name] for first in own for name in with_followers(first)}
    if lost := sorted(types.keys() - ordered.keys()):
        raise ValueError(f"workloads/metrics/{lost[0]}.py: no key {metrics()[lost[0]].after!r} that it could follow")
    return ordered
