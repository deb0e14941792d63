"""All that crosses between the login node and a job: Hardware, TrainConfig, RunSpec, RunResult, State.

Standard library only. A run's identity (``run_id``) is computed here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, lru_cache
from itertools import compress
from operator import attrgetter, ne
from typing import Any, Self

IDENTITY_VERSION = 1
"""Raised only when the meaning of an existing field changes; a new field with a default needs no raise."""

SPEC_VERSION = 1
"""Version of ``spec.json`` and ``result.json``."""

INT64 = range(-(2**63), 2**63)
"""What TOML and every database take as whole numbers."""

RUN_ID_DIGITS = 16
"""Hex digits of a run id: 64 bits, so a collision among a million runs has a chance of 3e-8."""


RANK_LOST = "rank_lost"
"""Failure class of a rank that only saw its peer go: whoever saw the whole job end knows more."""


class State(StrEnum):
    """The state of a run or of one attempt; the words that files, tables and JSON use."""

    PLANNED = "planned"
    """Nothing was sent yet."""
    SUBMITTING = "submitting"
    """The intent is recorded, the scheduler's answer is not."""
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    WRONG_HARDWARE = "wrong_hardware"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def live(self) -> bool:
        """Whether work may still be going on, so that nothing new may be sent for this run."""
        return self in {State.SUBMITTING, State.PENDING, State.RUNNING}

    @property
    def ended_badly(self) -> bool:
        """Whether the attempt ended without a result."""
        return not self.live and self not in {State.PLANNED, State.SUCCEEDED}


class Topology(StrEnum):
    """How a strategy maps processes to devices."""

    ONE_PROCESS = "one_process"
    """One process drives all devices (eager, DataParallel, torchgpipe, MirroredStrategy)."""
    PROCESS_PER_DEVICE = "process_per_device"
    """One rank a device (DDP, FSDP, Horovod, pipelining, DeepSpeed)."""


_HARDWARE = re.compile(r"(?P<kind>[A-Za-z][A-Za-z0-9_.-]*):(?P<devices>[1-9]\d{0,4})(?:x(?P<nodes>[1-9]\d{0,4}))?")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run trains on: ``"a100:2"`` two GPUs of one node, ``"a100:4x2"`` four on each of two nodes."""

    kind: str
    """``"cpu"``, ``"gpu"`` (any GPU) or a logical GPU type of the cluster file."""
    devices_per_node: int
    """GPUs, or CPU ranks, on each node."""
    nodes: int = 1

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Hardware:
        """Read ``KIND:DEVICES`` or ``KIND:DEVICESxNODES``.

        Raises:
            ValueError: the text is not of that form.
        """
        match = _HARDWARE.fullmatch(text)
        if match is None:
            raise ValueError(
                'hardware is "KIND:DEVICES" or "KIND:DEVICESxNODES", such as "a100:2", "a100:4x2", "gpu:1" or "cpu:2", '
                f"not {text!r}"
            )
        return cls(match["kind"], int(match["devices"]), int(match["nodes"] or 1))

    @property
    def devices(self) -> int:
        """Devices over all nodes."""
        return self.devices_per_node * self.nodes

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def gpus(self) -> int:
        """GPUs over all nodes; 0 on CPU."""
        return 0 if self.is_cpu else self.devices

    def __str__(self) -> str:
        nodes = f"x{self.nodes}" if self.nodes > 1 else ""
        return f"{self.kind}:{self.devices_per_node}{nodes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The science of one run: everything that may change what is learned or how fast. All of it is identity.

    Field names are the keys of ``experiment.toml`` and the columns of the table ``runs``.
    """

    model: str
    dataset: str
    strategy: str
    strategy_options: dict[str, bool | int | float | str | tuple[int, ...]] = field(default_factory=dict)
    """Only the options that differ from the strategy's own defaults."""
    hardware: str
    cpus: int
    """CPU cores for the whole run (all nodes, all ranks)."""
    seed: int = 0
    repeat: int = 0
    """Index of a repetition that differs in nothing else."""

    epochs: int = 10
    steps: int | None = None
    """Train for this many optimiser steps instead of ``epochs``."""
    batch_size: int = 128
    """Global: samples per optimiser step over all ranks."""
    optimizer: str = "sgd"
    """``sgd``, ``adam`` or ``adamw``."""
    lr: float = 0.05
    momentum: float = 0.9
    """SGD only."""
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "constant"
    """``constant``, ``cosine`` or ``linear`` (both to zero over the whole run)."""
    warmup_steps: int = 0
    """Linear warm-up from 0 over this many steps, before ``schedule``."""
    label_smoothing: float = 0.0

    precision: str = "fp32"
    """``fp64``, ``fp32`` (TF32 off everywhere), ``tf32`` or ``bf16`` (autocast)."""
    channels_last: bool = False
    compile: str = "off"
    """``off``; ``default``: the model through ``torch.compile``; ``graphs``: the training step recorded once as a CUDA
    graph and replayed; ``default_graphs``: both. An odd last batch and evaluation run as with ``off``."""
    cudnn_benchmark: bool = False
    """cuDNN tries its algorithms out on each new shape and keeps the fastest, so that rounding may differ between two
    equal runs; otherwise its heuristics choose. GPUs only."""
    batch_norm: str = "batch"
    """``batch``, or ``frozen``: running statistics are used and never updated; weight and bias still learn."""
    dropout: float | None = None
    """Rate for every dropout and drop-path layer; None keeps the model's own."""
    pretrained: bool = False
    """Start from weights that ``orchestrate data prepare`` fetched, with a new classifier for this data set."""
    stem: str = "imagenet"
    """ResNet only: ``imagenet`` (7x7 stride 2 and max-pool) or ``cifar`` (3x3 stride 1, no pool)."""
    image_size: int | None = None
    """Pixels a side that the model sees; None is the data set's own (or the model's, where it has one size only)."""

    loader: str = "resident"
    """``resident``: uint8 tensors on the device; ``dataloader``: torch DataLoader with PIL transforms."""
    workers: int = 0
    """Worker processes per rank; ``dataloader`` only."""
    augment: str = "none"
    """``none``, ``flip`` or ``crop_flip`` (pad by an eighth, random crop, random flip)."""
    drop_last: bool = False
    train_fraction: float = 1.0
    """Share of the training images, drawn once per seed, the same for all strategies."""
    test_fraction: float = 1.0
    """Share of the test images likewise, for trials: an accuracy over part of them is no result."""
    eval_every: int = 1
    """Epochs between evaluations; 0 evaluates once, at the end. The end is always evaluated."""

    def identity(self) -> dict[str, Any]:
        """The fields that are hashed: the required ones, seed and repeat always, others where not default."""
        identity: dict[str, Any] = {"v": IDENTITY_VERSION}
        for name, default in _IDENTITY_FIELDS:
            value = getattr(self, name)
            if default is _ALWAYS or value != default:
                identity[name] = value
        return identity

    def run_id(self) -> str:
        """Hash of :meth:`identity`; the same on every machine, Python version and key order."""
        # The JSON text of identity() with sorted keys, put together here: a matrix hashes tens of thousands of these.
        values = _identity_values(self)
        told = compress(zip(_IDENTITY_PREFIXES, values, strict=True), map(ne, values, _IDENTITY_DEFAULTS))
        parts = [prefix + _JSON_OF.get(type(value), _json)(value) for prefix, value in told]
        parts.append(f'"v":{IDENTITY_VERSION}')
        parts.sort()
        return hashlib.sha256(f"{{{','.join(parts)}}}".encode()).hexdigest()[:RUN_ID_DIGITS]

    def to_json(self) -> dict[str, Any]:
        """All fields, ready for ``json.dump``."""
        return _flat(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: a field is missing, or unknown to this version.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown fields {unknown}: written by a newer version?")
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in data.get("strategy_options", {}).items()}
        try:
            return cls(**{**data, "strategy_options": options})
        except TypeError as error:
            raise ValueError(str(error)) from error


_ALWAYS: Any = object()
_IDENTITY_FIELDS: list[tuple[str, Any]] = [
    (
        f.name,
        _ALWAYS
        if f.name in {"seed", "repeat"}
        or (f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
        else ({} if f.name == "strategy_options" else f.default),
    )
    for f in fields(TrainConfig)
]
_IDENTITY_PREFIXES = [f'"{name}":' for name, _ in _IDENTITY_FIELDS]
_IDENTITY_DEFAULTS = [default for _, default in _IDENTITY_FIELDS]
_identity_values = attrgetter(*(name for name, _ in _IDENTITY_FIELDS))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _json_of_float(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"{value} has no place in a run's identity")
    return float.__repr__(value)


_JSON_OF: dict[type, Callable[[Any], str]] = {
    str: json.encoder.encode_basestring_ascii,
    int: int.__repr__,
    float: _json_of_float,
    bool: ("false", "true").__getitem__,
}
"""Quicker ways to the same text as :func:`_json`."""


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(f.name for f in fields(kind))
    return names, attrgetter(*names)


def _flat(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are; at a fraction of the cost of ``asdict``, which copies what is in them."""
    names, values = _fields_of(value.__class__)
    return dict(zip(names, values(value), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a run is carried out. Not identity: none of it may change what is learned."""

    time_limit_s: int = 3600
    mem_bytes: int | None = None
    """Host memory a node; None takes the cluster file's."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; 0 writes none."""
    hang_timeout_s: int = 600
    """A rank without progress for this long ends the run; 0 switches the watch off."""
    retries: int = 0
    """How often it is sent again by itself when its program fails or hangs."""


EXECUTION_KEYS: frozenset[str] = frozenset({"time_limit", "mem", "checkpoint_every", "hang_timeout_s", "retries"})
"""The keys of ``experiment.toml`` that become :class:`Execution` (``time_limit`` and ``mem`` are texts there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the job must find when it starts, in numbers; checked in ``workloads.world`` within seconds."""

    ranks: int
    """World size."""
    nodes: int
    gpus_per_node: int
    """GPUs the run uses on each node; 0 on CPU."""
    cpus_per_rank: int
    gpu_name: str = ""
    """Text that each GPU's name must contain; empty accepts any."""
    gpu_memory_gb: float = 0.0
    """Nominal memory of each GPU in GB (10^9), accepted within 15 %; 0 accepts any."""
    allow_mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One planned run: the content of ``spec.json``."""

    run_id: str
    label: str
    """For people; not unique. The full label, never shortened."""
    experiment: str
    train: TrainConfig
    execution: Execution
    expect: Expectation
    target: str
    """``local`` or the cluster's name."""
    data_root: str
    """Absolute folder that holds data sets; may be empty when the data set is embedded."""
    dataset_digest: str = ""
    """Digest of the data set's content at submit; empty where it could not be had."""
    code_digest: str = ""
    """Digest of the ``workloads`` package at submit."""
    snapshot: str = ""
    """Name of the code that was submitted, see ``workloads.frozen``; empty before that."""

    def to_json(self) -> dict[str, Any]:
        return {
            "spec_version": SPEC_VERSION,
            "run_id": self.run_id,
            "label": self.label,
            "experiment": self.experiment,
            "target": self.target,
            "data_root": self.data_root,
            "dataset_digest": self.dataset_digest,
            "code_digest": self.code_digest,
            "snapshot": self.snapshot,
            "train": self.train.to_json(),
            "execution": _flat(self.execution),
            "expect": _flat(self.expect),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Raises ValueError when the data is not a spec this version can read."""
        if data.get("spec_version") != SPEC_VERSION:
            raise ValueError(f"spec_version {data.get('spec_version')!r} is not {SPEC_VERSION}")
        rest = {k: v for k, v in data.items() if k not in {"spec_version", "train", "execution", "expect"}}
        try:
            return cls(
                train=TrainConfig.from_json(data["train"]),
                execution=Execution(**data["execution"]),
                expect=Expectation(**data["expect"]),
                **rest,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a run spec: {error}") from error


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
    warmup_s: float | None = None
    """The first steps, apart from the steady ones."""
    compile_s: float | None = None
    """Compiling and recording before the first step; None with ``compile = "off"``."""
    evaluate_s: float | None = None
    step_time_s: float | None = None
    """Median of the steady steps."""
    samples_per_s: float | None = None
    """Steady, all ranks."""
    starvation_ratio: float | None = None
    """Step time with the real input over step time with one resident batch; above 1.02 is input-bound."""
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
    """Commit, packages, driver, node, script: see ``workloads.provenance``."""
    started_at: str | None = None
    """UTC, ISO 8601."""
    ended_at: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: a NaN or infinity becomes null, is named in ``nonfinite`` and marks the run as diverged."""
        data: dict[str, Any] = {"spec_version": SPEC_VERSION}
        nonfinite = dict(self.nonfinite)
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                nonfinite[f.name] = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
                value = None
            data[f.name] = value
        data["nonfinite"] = nonfinite
        data["diverged"] = self.diverged or bool({"train_loss", "test_loss"} & set(nonfinite))
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Raises ValueError when the data is not a result this version can read."""
        if data.get("spec_version") != SPEC_VERSION:
            raise ValueError(f"spec_version {data.get('spec_version')!r} is not {SPEC_VERSION}")
        known = {f.name for f in fields(cls)}
        try:
            result = cls(**{k: v for k, v in data.items() if k in known})
            State(result.state)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a run result: {error}") from error
        return result
