"""What ``fsdp`` keeps on a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

COUNT = """
import json, os, pathlib
from workloads.strategies.fsdp import Fsdp
step = Fsdp.train_step
def train_step(self, batch):
    loss = step(self, batch)
    states = [v for s in self.optimizer.state.values() for v in s.values() if v.dim()]
    held = {"parameters": sum(s.numel() for s in self._shards), "states": sum(v.numel() for v in states)}
    rank = os.environ["SUBMITIT_LOCAL_GLOBALID"]
    pathlib.Path(os.environ["COUNTS"], rank + ".json").write_text(json.dumps(held))
    return loss
Fsdp.train_step = train_step
"""


@pytest.mark.parametrize("options", [{}, {"wrap": "model"}], ids=str)
def test_a_rank_keeps_half(launcher: Any, data_root: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Of two ranks each has about half of the parameters and of Adam's two numbers for each; together they have all."""
    run = launcher.write(
        tmp_path,
        data_root=data_root,
        model="vit_tiny",
        dataset="imagefolder/few",
        strategy="fsdp",
        strategy_options=options,
        hardware="cpu:2",
        optimizer="adam",
        steps=1,
    )
    launcher.succeed(run, ranks=2, prelude=COUNT, env={"COUNTS": str(tmp_path)})
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    whole = run.attempt(1).read_result().num_parameters
    assert sum(h["parameters"] for h in held) == whole
    for own in held:
        assert own["states"] == 2 * own["parameters"]
        assert own["parameters"] == pytest.approx(whole / 2, rel=0.01)
