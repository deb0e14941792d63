"""The training configuration: a run's identity (``run_id``) is computed here and nowhere else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import compress
from operator import attrgetter, ne
from typing import Any, Self

from workloads.contract.flat import flat
from workloads.contract.hardware import Hardware

IDENTITY_VERSION = 1
"""Increment it only when the meaning of an existing field changes; a new field with a default needs no increment."""

INT64 = range(-(2**63), 2**63)
"""Whole numbers that TOML and every database can hold."""

RUN_ID_DIGITS = 16
"""Hex digits of a run id: 64 bits, so a collision among a million runs has a chance of 3e-8."""


def key(default: Any, **allowed: Any) -> Any:
    """A field whose key in ``experiment.toml`` may hold ``choices``, or a range: ``gt``, ``ge``, ``lt`` and ``le``."""
    return field(default=default, metadata=allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The training configuration of one run: all that may change what is learned or how fast. All of it is identity.

    Field names are the keys of ``experiment.toml`` and the columns of the table ``runs``.
    """

    model: str
    dataset: str
    strategy: str
    strategy_options: dict[str, bool | int | float | str | tuple[int, ...]] = field(default_factory=dict)
    """Only the options that differ from the strategy's own defaults."""
    hardware: Hardware
    cpus: int = field(metadata={"ge": 1})
    """CPU cores for the whole run (all nodes, all ranks)."""
    seed: int = key(0, ge=0)
    repeat: int = key(0, ge=0)
    """Index of a repetition that differs in nothing else."""

    epochs: int = key(10, ge=1)
    steps: int | None = key(None, ge=1)
    """Train for this many optimizer steps instead of ``epochs``."""
    batch_size: int = key(128, ge=1)
    """Global: samples per optimizer step over all ranks."""
    optimizer: str = key("sgd", choices=("sgd", "adam", "adamw"))
    lr: float = key(0.05, gt=0)
    momentum: float = key(0.9, ge=0, le=1)
    """SGD only."""
    nesterov: bool = False
    weight_decay: float = key(0.0, ge=0)
    schedule: str = key("constant", choices=("constant", "cosine", "linear"))
    """``cosine`` and ``linear`` go to zero over the whole run."""
    warmup_steps: int = key(0, ge=0)
    """Linear warm-up from 0 over this many steps, before ``schedule``."""
    label_smoothing: float = key(0.0, ge=0, lt=1)

    precision: str = key("fp32", choices=("fp64", "fp32", "tf32", "bf16"))
    """``fp64``, ``fp32`` (TF32 off everywhere), ``tf32`` or ``bf16`` (autocast)."""
    channels_last: bool = False
    compile: str = key("off", choices=("off", "default", "graphs", "default_graphs"))
    """``off``; ``default``: the model through ``torch.compile``; ``graphs``: the training step recorded once as a CUDA
    graph and replayed; ``default_graphs``: both. An odd last batch and evaluation run as with ``off``."""
    cudnn_benchmark: bool = False
    """cuDNN benchmarks its algorithms on each new shape and keeps the fastest, so that two equal runs may round
    differently; otherwise its heuristics choose. GPUs only."""
    batch_norm: str = key("batch", choices=("batch", "frozen"))
    """``batch``, or ``frozen``: running statistics are used and never updated; weight and bias still learn."""
    dropout: float | None = key(None, ge=0, lt=1)
    """Rate for every dropout and drop-path layer; None keeps the model's own."""
    pretrained: bool = False
    """Start from weights that ``orchestrate data prepare`` fetched, with a new classifier for this data set."""
    stem: str = key("imagenet", choices=("imagenet", "cifar"))
    """ResNet only: ``imagenet`` (7x7 stride 2 and max-pool) or ``cifar`` (3x3 stride 1, no pool)."""
    image_size: int | None = key(None, ge=1)
    """Pixels per side of the model's input; None is the data set's own size, or the model's where it has only one."""

    loader: str = key("resident", choices=("resident", "dataloader"))
    """``resident``: uint8 tensors on the device; ``dataloader``: torch DataLoader with PIL transforms."""
    workers: int = key(0, ge=0)
    """Worker processes per rank; ``dataloader`` only."""
    augment: str = key("none", choices=("none", "flip", "crop_flip"))
    """``none``, ``flip`` or ``crop_flip`` (pad by an eighth, random crop, random flip)."""
    drop_last: bool = False
    train_fraction: float = key(1.0, gt=0, le=1)
    """Share of the training images, drawn once per seed and the same for all strategies."""
    test_fraction: float = key(1.0, gt=0, le=1)
    """Share of the test images, drawn likewise; for trials, since an accuracy over part of them is no result."""
    eval_every: int = key(1, ge=0)
    """Epochs between evaluations; 0 evaluates only at the end, which is always evaluated."""

    def identity(self) -> dict[str, Any]:
        """The fields that are hashed: the required ones, seed and repeat always, others where not default."""
        values = _identity_values(self)
        hashed = compress(zip(_IDENTITY_NAMES, values, strict=True), map(ne, values, _IDENTITY_DEFAULTS))
        return {"v": IDENTITY_VERSION, **dict(hashed)}

    def run_id(self) -> str:
        """Hash of :meth:`identity`; the same on every machine, Python version and key order."""
        # The text of json.dumps(self.identity(), sort_keys=True), twice as fast: a plan hashes tens of thousands.
        values = _identity_values(self)
        hashed = compress(zip(_IDENTITY_PREFIXES, values, strict=True), map(ne, values, _IDENTITY_DEFAULTS))
        parts = [prefix + _JSON_OF.get(type(value), _json)(value) for prefix, value in hashed]
        parts.append(f'"v":{IDENTITY_VERSION}')
        parts.sort()
        return hashlib.sha256(f"{{{','.join(parts)}}}".encode()).hexdigest()[:RUN_ID_DIGITS]

    def to_json(self) -> dict[str, Any]:
        """All fields, ready for ``json.dump``."""
        return flat(self) | {"hardware": self.hardware.text}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; raises ValueError if a field is missing, or unknown to this version."""
        if unknown := sorted(data.keys() - set(_IDENTITY_NAMES)):
            raise ValueError(f"unknown fields {unknown}: written by a newer version?")
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in data.get("strategy_options", {}).items()}
        try:
            return cls(**{**data, "strategy_options": options, "hardware": Hardware.parse(data.get("hardware", ""))})
        except TypeError as error:
            raise ValueError(str(error)) from error


_IDENTITY_NAMES = [f.name for f in fields(TrainConfig)]
_SPECIAL_DEFAULTS: dict[str, Any] = {"strategy_options": {}, "seed": dataclasses.MISSING, "repeat": dataclasses.MISSING}
_IDENTITY_DEFAULTS = [_SPECIAL_DEFAULTS.get(f.name, f.default) for f in fields(TrainConfig)]
"""Values that are not hashed. ``MISSING``, the default of required fields too, equals none: those are always hashed."""
_IDENTITY_PREFIXES = [f'"{name}":' for name in _IDENTITY_NAMES]
_identity_values = attrgetter(*("hardware.text" if name == "hardware" else name for name in _IDENTITY_NAMES))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _json_of_float(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be part of a run's identity")
    return float.__repr__(value)


_JSON_OF: dict[type, Callable[[Any], str]] = {
    str: json.encoder.encode_basestring_ascii,
    int: int.__repr__,
    float: _json_of_float,
    bool: ("false", "true").__getitem__,
}
"""Faster ways to the text of :func:`_json`."""
