"""What one attempt measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Self

from workloads.contract.flat import flat
from workloads.contract.run_spec import SPEC_VERSION
from workloads.contract.state import State
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from workloads import metrics as metric_files


@dataclass(slots=True, kw_only=True)
class RunResult:
    """The content of ``result.json``, which is a row of the table ``results``.

    ``None`` means not measured, never zero. Times are seconds, memory is bytes, rates are per second over all ranks.
    """

    run_id: str
    attempt: int
    state: str
    """``succeeded`` or the failure's state."""
    reason: str = ""
    """Class of failure (``program_error``, ``hang``, ...); empty on success."""
    message: str = ""
    """Text of the error."""
    diverged: bool = False
    """A loss was NaN or infinite at some point."""
    nonfinite: dict[str, str] = field(default_factory=dict)
    """Field name to ``nan``, ``inf`` or ``-inf`` for values that are null because JSON has no such number."""

    test_accuracy: float | None = None
    """0 to 1."""
    test_loss: float | None = None
    train_loss: float | None = None
    """Mean over the last epoch's samples."""
    num_test_samples: int | None = None
    num_train_samples: int | None = None
    per_class: list[dict[str, Any]] = field(default_factory=list)
    """One dict per class: ``class_name``, ``precision``, ``recall``, ``f1``, ``support``."""

    train_time_s: float | None = None
    """All epochs, without start-up, compilation and evaluation; maximum over ranks."""
    epoch_time_s: float | None = None
    """Median over the epochs after the first, or the only epoch."""
    total_time_s: float | None = None
    """From the start of rank 0's process to the last evaluation, including the attempts that this one resumed."""
    startup_s: float | None = None
    """From the start of the process to the first step, without ``compile_s``: imports, rendezvous, data, model."""
    compile_s: float | None = None
    """Compiling and recording CUDA graphs before the first step; None with ``compile = "off"``."""
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
    """``nvml``, or why the four fields below are None."""
    gpu_utilization_pct: float | None = None
    """Share of time in which a kernel ran: mean over samples during training and over GPUs."""
    gpu_power_w: float | None = None
    """Sum over GPUs, mean over samples during training."""
    energy_j: float | None = None
    """Sum over GPUs, during training including the evaluations and checkpoints in between."""
    gpu_memory_used_bytes: int | None = None
    """Largest sample of any GPU, as ``nvidia-smi`` counts: with the CUDA context, libraries and other processes."""

    lr_applied: float | None = None
    """Read back from the optimizer at step 0."""
    balance_applied: list[int] | None = None
    """Layers of each part, in order; None where the strategy does not cut the model."""
    num_parameters: int | None = None
    """Trainable parameters of the whole model."""
    world_size: int | None = None
    device_name: str | None = None
    devices_seen: int | None = None
    """Visible devices, summed over nodes."""
    cpus_seen: int | None = None
    """Cores that the run may use: the union over the ranks of a node, summed over nodes."""
    dataset_digest: str | None = None
    batch_norm_treatment: str | None = None
    """How the strategy treated batch norm (``per_rank``, ``whole_batch``, ``frozen``, ...)."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Commit, packages, driver, node, script: see ``workloads.provenance.job_facts``."""
    started_at: str | None = None
    """UTC, ISO 8601."""
    ended_at: str | None = None

    metrics: dict[str, metric_files.Value | None] = field(default_factory=dict)
    """Values of ``workloads/metrics``, by name. In JSON and tables they stand between the fields."""

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON: NaN and infinity become null and are named in ``nonfinite``; in a loss, ``diverged``."""
        data: dict[str, Any] = {"spec_version": SPEC_VERSION}
        nonfinite = dict(self.nonfinite)
        values = {**self.metrics, **flat(self)}
        for name in result_fields():
            value = values.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                nonfinite[name] = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
                value = None
            data[name] = value
        data["nonfinite"] = nonfinite
        data["diverged"] = self.diverged or bool({"train_loss", "test_loss"} & set(nonfinite))
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the inverse of :meth:`to_json`; raises ValueError if this version cannot read it."""
        if data.get("spec_version") != SPEC_VERSION:
            raise ValueError(f"spec_version {data.get('spec_version')!r} is not {SPEC_VERSION}")
        values = {name: data[name] for name in result_fields() if name in data}
        measured = {name: values.pop(name, None) for name in metric_files.all_metrics()}
        try:
            result = cls(**values, metrics={name: value for name, value in measured.items() if value is not None})
            State(result.state)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a run result: {error}") from error
        return result


@cache
def result_fields() -> dict[str, str]:
    """Return the keys of ``result.json`` in order, with the type of each as :class:`RunResult` writes it."""
    metrics = metric_files.all_metrics()
    own = {f.name: str(f.type) for f in fields(RunResult) if f.name != "metrics"}
    types = own | {name: f"{metric.type.__name__} | None" for name, metric in metrics.items()}

    def with_followers(name: str) -> Iterator[str]:
        yield name
        for metric in metrics.values():
            if metric.after == name:
                yield from with_followers(metric.name)

    ordered = {name: types[name] for first in own for name in with_followers(first)}
    for name in metrics.keys() - ordered.keys():
        raise ValueError(f"workloads/metrics/{name}.py: it follows {metrics[name].after!r}, which is not a key")
    return ordered
