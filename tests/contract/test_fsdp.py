"""What ``fsdp`` gathers and keeps on a rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workloads import registry
from workloads.contract import Hardware, TrainConfig
from workloads.errors import InputError
from workloads.strategies import fsdp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

COUNT = """
import json, os, pathlib
from workloads.strategies.fsdp import Fsdp
step = Fsdp.train_step
def train_step(self, batch):
    loss = step(self, batch)
    states = [v for s in self.optimizer.state.values() for v in s.values() if v.dim()]
    held = {"parameters": sum(s.numel() for s in self.parameters), "states": sum(v.numel() for v in states)}
    rank = os.environ["SUBMITIT_LOCAL_GLOBALID"]
    pathlib.Path(os.environ["COUNTS"], rank + ".json").write_text(json.dumps(held))
    return loss
Fsdp.train_step = train_step
"""


@pytest.mark.parametrize(("model", "units"), [("swin_tiny", 15), ("vit_tiny", 12), ("resnet18", 8)])
def test_units_are_blocks_and_hold_nearly_all_parameters(model: str, units: int) -> None:
    """Also where a pipeline's layers are halves of blocks; parameters outside of units are gathered together."""
    declaration = registry.models()[model]
    config = TrainConfig(model=model, dataset="digits", strategy="fsdp", hardware=Hardware("cpu", 2), cpus=2)
    assert declaration.layers is not None
    module = declaration.build(config, 3, 10, 32)
    options = {"wrap": "blocks", "min_unit_parameters": 50_000}
    task: Any = SimpleNamespace(module=module, options=options, layers=lambda: declaration.layers(module))
    found = list(fsdp._units(task))
    held = sum(p.numel() for unit in found for p in unit.parameters())
    assert len(found) == units and len({id(p) for unit in found for p in unit.parameters()}) == sum(
        len(list(unit.parameters())) for unit in found
    )
    assert held > 0.97 * sum(p.numel() for p in module.parameters())


def test_a_model_without_layers_needs_wrap_model() -> None:
    def layers() -> Any:
        raise InputError("ConvNeXt of timm cannot be cut into layers", hint="a strategy that keeps the model whole")

    options = {"wrap": "blocks", "min_unit_parameters": 0}
    task: Any = SimpleNamespace(module=torch.nn.Linear(1, 1), options=options, layers=layers)
    with pytest.raises(InputError, match="ConvNeXt of timm cannot be cut into layers") as raised:
        list(fsdp._units(task))
    assert raised.value.hint.startswith('set wrap = "model"')


SHARDED = """
import os, pathlib
from torch.distributed.tensor import DTensor
from workloads.strategies.fsdp import Fsdp
make = Fsdp.__init__
def __init__(self, task):
    make(self, task)
    def note(module, *_):
        if module.training and os.environ["SUBMITIT_LOCAL_GLOBALID"] == "0":
            held = sum(p.numel() for p in module.parameters() if isinstance(p, DTensor))
            note = pathlib.Path(os.environ["NOTES"], task.options["wrap"] + str(task.options["reshard"]))
            note.write_text(str(held / sum(p.numel() for p in module.parameters())))
    self.module.register_forward_hook(note)
Fsdp.__init__ = __init__
"""
"""Share of the parameters that are resharded after a forward pass."""


def test_reshard_decides_what_stays_gathered(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """All gathered parameters are resharded after the forward pass, or none, whatever is gathered at a time."""
    train: dict[str, Any] = {"model": "vit_tiny", "dataset": "imagefolder/few", "hardware": "cpu:2", "steps": 1}
    combinations = [(wrap, reshard) for wrap in ("blocks", "model") for reshard in (True, False)]
    runs = [
        launcher.write(
            tmp_path,
            data_root=data_root,
            strategy="fsdp",
            strategy_options={"wrap": wrap, "reshard": reshard},
            **train,
        )
        for wrap, reshard in combinations
    ]
    launcher.succeed(runs, ranks=2, prelude=SHARDED, env={"NOTES": str(tmp_path)})
    shares = {(w, r): float((tmp_path / f"{w}{r}").read_text()) for w, r in combinations}
    assert shares["model", True] == 1 and shares["model", False] == shares["blocks", False] == 0
    assert 0.97 < shares["blocks", True] < 1


@pytest.mark.parametrize("options", [{}, {"wrap": "model"}], ids=str)
def test_a_rank_keeps_half(launcher: Any, data_root: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Each of two ranks has about half of the parameters and of Adam's state; together they have all."""
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
