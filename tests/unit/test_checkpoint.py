"""Progress in a checkpoint, read before a strategy exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROGRESS: dict[str, Any] = {"epoch": 2, "balance_applied": [9, 13]}


def test_progress_is_read_alone_from_a_usable_checkpoint(tmp_path: Path) -> None:
    """Of none, of another run's and of one that was cut short there is none: nobody takes those over."""
    from workloads.engines import checkpoint

    path = tmp_path / "checkpoint.pt"
    assert checkpoint.progress_of(path, "run") == {}
    state = {"model": {"weight": torch.ones(1000)}, "optimizer": {}}
    checkpoint.save(path, "run", state, PROGRESS)
    assert checkpoint.progress_of(path, "run") == PROGRESS
    assert checkpoint.load(path, "run") is not None
    assert checkpoint.progress_of(path, "other") == {}
    whole = path.read_bytes()
    for missing in (10, 500, len(whole) // 2):
        path.write_bytes(whole[:-missing])
        assert checkpoint.progress_of(path, "run") == {}
        with pytest.raises(checkpoint.DamagedCheckpointError):
            checkpoint.load(path, "run")
