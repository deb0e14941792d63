"""Checkpoints of the TensorFlow engine: a numpy archive, parameters with torch's names and memory layout."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from workloads.engines.checkpoint import VERSION, DamagedCheckpointError
from workloads.files.json_file import write_bytes

_ABOUT = "about"


def save(path: Path, run_id: str, state: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write a checkpoint; a kill leaves the old one or the new one.

    Args:
        state: ``model``: arrays by name; ``optimizer``: ``steps``, and arrays by name for each slot.
        progress: where training stands and what was measured, as JSON values.

    Raises:
        OSError: the disk is full or the folder not writable; the previous checkpoint is unchanged.
    """
    optimizer = dict(state["optimizer"])
    about = {"version": VERSION, "run_id": run_id, "steps": optimizer.pop("steps"), "progress": progress}
    arrays = {f"{slot}/{name}": array for slot, arrays in optimizer.items() for name, array in arrays.items()}
    arrays |= {f"model/{name}": array for name, array in state["model"].items()}
    arrays[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content.getvalue())


def load(path: Path, run_id: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the state and the progress of a checkpoint; None when there is none.

    Raises:
        DamagedCheckpointError: it is truncated, damaged, or of another run or version.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            about = json.loads(stored[_ABOUT].tobytes())
            if about["version"] != VERSION or about["run_id"] != run_id:
                raise ValueError(f"version {about['version']} of run {about['run_id']}")
            groups: dict[str, dict[str, Any]] = {"model": {}}
            for key in stored.files:
                group, slash, name = key.partition("/")
                if slash:
                    groups.setdefault(group, {})[name] = stored[key]
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedCheckpointError(f"{path}: {type(error).__name__}: {error}".partition("\n")[0]) from error
    model = groups.pop("model")
    return {"model": model, "optimizer": {"steps": about["steps"], **groups}}, about["progress"]
