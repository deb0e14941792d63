"""Checkpoints of the TensorFlow engine; they need numpy only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from workloads.engines import tf_checkpoint  # noqa: E402
from workloads.engines.checkpoint import DamagedCheckpointError  # noqa: E402


def _saved(path: Path) -> dict[str, Any]:
    weights = {"conv1.weight": np.arange(6.0).reshape(2, 3), "bn1.running_var": np.ones(2, np.float32)}
    state = {"model": weights, "optimizer": {"steps": 7, "exp_avg": {"conv1.weight": np.zeros((2, 3))}}}
    tf_checkpoint.save(path, "a" * 16, state, {"epoch": 2, "train_loss": float("nan")})
    return state


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Names with dots and slots apart, types kept, a loss that is no number too; nothing else stays in the folder."""
    path = tmp_path / "checkpoint" / "last.pt"
    assert tf_checkpoint.load(path, "a" * 16) is None
    state = _saved(path)
    found = tf_checkpoint.load(path, "a" * 16)
    assert found is not None
    loaded, progress = found
    assert progress["epoch"] == 2 and progress["train_loss"] != progress["train_loss"]
    assert loaded["optimizer"]["steps"] == 7
    assert (loaded["optimizer"]["exp_avg"]["conv1.weight"] == 0).all()
    for name, array in state["model"].items():
        assert (loaded["model"][name] == array).all() and loaded["model"][name].dtype == array.dtype
    assert [p.name for p in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "last.pt"
    _saved(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DamagedCheckpointError, match=r"last\.pt: (BadZipFile|ValueError: version 1 of run a{16})"):
        tf_checkpoint.load(path, "a" * 16 if damage == "cut" else "b" * 16)
