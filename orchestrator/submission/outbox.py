"""Specs of runs that are being submitted, in one file for each submit: an interrupted submit is resumed from it."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from orchestrator.backends.local.records import QueueFolder
from workloads.contract import RunSpec
from workloads.files.json_file import write_bytes
from workloads.files.packed_specs import pack_specs, unpack_specs

MAX_AGE_S = 3600.0
"""Older files belong to killed submits: no submit takes so long."""


def write(runs: Path, specs: Sequence[RunSpec]) -> Path:
    """Write the specs of one submit; return the file, which the submit deletes when it is done."""
    folder = QueueFolder(runs)
    folder.create()
    path = folder.outbox / f"{uuid.uuid4().hex}.json"
    write_bytes(path, pack_specs(specs))
    return path


def read(runs: Path) -> dict[str, RunSpec]:
    """Specs of all interrupted submits by run id; of one run the newest."""
    specs: dict[str, RunSpec] = {}
    for path in sorted(_files(runs), key=lambda path: path.stat().st_mtime):
        with contextlib.suppress(OSError, ValueError):
            specs |= {spec.run_id: spec for spec in unpack_specs(path.read_bytes())}
    return specs


def clear(runs: Path) -> None:
    """Delete the files of submits that were killed long ago."""
    for path in _files(runs):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > MAX_AGE_S:
                path.unlink()


def _files(runs: Path) -> list[Path]:
    # write_bytes writes to a hidden file first.
    return list(QueueFolder(runs).outbox.glob("[!.]*"))
