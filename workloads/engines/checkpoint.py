"""Checkpoints of model and optimizer on the CPU; a killed writer leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import torch
    from torch import nn

VERSION = 1
_READ_ERRORS = (RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile)


class DamagedCheckpointError(Exception):
    """The file exists and cannot be used."""


def cpu_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what :meth:`workloads.strategies.shared.protocol.Strategy.state_dict` returns for a whole model."""
    return {"model": _to_cpu(module.state_dict()), "optimizer": _to_cpu(optimizer.state_dict())}


def _to_cpu(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {k: _to_cpu(v) for k, v in state.items()}
    if isinstance(state, list):
        return [_to_cpu(v) for v in state]
    return state


class _Stream(io.BufferedWriter):
    """Keeps the error of a failed write; torch's PyTorchStreamWriter raises a RuntimeError that only has a position."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def save(path: Path, run_id: str, state: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write a checkpoint: temporary file in the same folder, fsync, rename.

    Args:
        state: a strategy's state.
        progress: position of the training and measured values: numbers, texts and lists of them.

    Raises:
        OSError: the disk is full or the folder is not writable; the previous checkpoint is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        stream = _Stream(io.FileIO(descriptor, "wb"))
        with stream:
            torch.save({"version": VERSION, "run_id": run_id, **state, "progress": progress}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except RuntimeError as error:
        raise OSError(f"{path}: {stream.failure.strerror if stream.failure else error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def load(path: Path, run_id: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return a strategy's state and the progress of a checkpoint; None without a checkpoint.

    Raises:
        DamagedCheckpointError: it is truncated, damaged, of another run or another version.
    """
    if not path.exists():
        return None
    content = _content(path, run_id)
    return {"model": content["model"], "optimizer": content["optimizer"]}, content["progress"]


def progress_of(path: Path, run_id: str) -> dict[str, Any]:
    """Return the progress of a checkpoint without reading its parameters; empty without a usable checkpoint.

    For values that are needed before the strategy exists that could load the state.
    """
    with contextlib.suppress(DamagedCheckpointError):  # load reports it
        return dict(_content(path, run_id, mmap=True)["progress"]) if path.exists() else {}
    return {}


def _content(path: Path, run_id: str, *, mmap: bool = False) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        if content["version"] != VERSION or content["run_id"] != run_id:
            raise ValueError(f"version {content['version']} of run {content['run_id']}")
        return {name: content[name] for name in ("model", "optimizer", "progress")}
    except (*_READ_ERRORS, OSError) as error:
        # torch's reader seeks before the start of a small truncated file: EINVAL. Other errors are the disk's.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpointError(f"{path}: {type(error).__name__}: {error}".partition("\n")[0]) from error


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that people can inspect it and the next one has its place."""
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    return aside
