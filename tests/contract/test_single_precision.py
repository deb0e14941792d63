"""Strategies without double precision, such as ``deepspeed``, equal eager as closely as single precision allows.

They differ from eager in double precision about as much as eager in single precision does, since both only round and
add in another order. How much depends on the case: the bounds below are a few times the measured differences of both. A
wrong gradient differs more: gradients clipped to a norm of 1, DeepSpeed's default, by 0.005 to 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.variants import Variant, variants

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

VARIANTS = [variant for variant in variants(2) if not variant.has_double_precision]
EAGER, DDP = Variant("eager", 1), Variant("ddp", 2)
NUM_TEST = 21


@dataclass(frozen=True)
class Case:
    """What to train."""

    name: str
    bound: float
    """Largest allowed difference of a parameter or loss from double precision."""
    train: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return self.name


def _case(name: str, bound: float, **train: Any) -> Case:
    return Case(name, bound, tuple(train.items()))


SGD = _case("sgd", 1e-3, optimizer="sgd", lr=0.01, weight_decay=1e-3, batch_norm="frozen", steps=20)
"""Every fifth batch has 7 samples: 4 and 3."""
ADAM = _case("adam", 2e-3, optimizer="adam", lr=1e-3, batch_norm="frozen", steps=10)
ODD = _case("odd", 1e-5, optimizer="sgd", lr=0.01, batch_norm="frozen", steps=6, batch_size=19)
"""Batches of 19, 19 and 1 samples: of the last one, the second rank has none."""
NORM = _case("norm", 0.05, optimizer="sgd", lr=0.01, steps=4, batch_size=20)
"""Live batch norm, over 10 and 9 or 10 samples of a rank."""
_LAST = {variant.strategy: variant for variant in VARIANTS}
CASES = [
    (variant, case)
    for variant in VARIANTS
    for case in ((SGD, ADAM, ODD, NORM) if variant is _LAST[variant.strategy] else (SGD,))
]


@pytest.fixture(scope="module")
def learned(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(variant, precision, case) -> parameters, losses and result."""
    runs = tmp_path_factory.mktemp("runs")
    wanted = [(variant, "fp32", case) for variant, case in CASES]
    for case in (SGD, ADAM, ODD, NORM):
        reference = DDP if case is NORM else EAGER  # test_batch_norm.py checks ddp's batch norm
        wanted += [(reference, precision, case) for precision in ("fp32", "fp64")]
    small = {"model": "cnn", "dropout": 0.0, "dataset": "imagefolder/few", "batch_size": 8, "eval_every": 0, "seed": 3}
    written = {
        key: launcher.write(
            runs,
            data_root=data_root,
            execution={"checkpoint_every": 1000, "hang_timeout_s": 200},
            precision=key[1],
            **small | dict(key[2].train),
            **key[0].train,
        )
        for key in wanted
    }
    for ranks in (1, 2):
        launcher.succeed([run for key, run in written.items() if key[0].ranks == ranks], ranks=ranks, within_s=900)
    found = {}
    for key, run in written.items():
        losses = [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]
        model = torch.load(run.checkpoint, weights_only=True)["model"]
        found[key] = {name: tensor.double() for name, tensor in model.items()}, losses, run.attempt(1).read_result()
    return found


@pytest.mark.parametrize(("variant", "case"), CASES, ids=str)
def test_it_differs_no_more_than_rounding_does(learned: dict[Any, Any], variant: Variant, case: Case) -> None:
    """Every parameter, running statistic and loss."""
    reference = DDP if case is NORM else EAGER
    exact, rounded, found = (
        learned[k] for k in ((reference, "fp64", case), (reference, "fp32", case), (variant, "fp32", case))
    )
    assert found[0].keys() == exact[0].keys()
    assert 0 < _farthest(found, exact) < case.bound
    assert 0 < _farthest(rounded, exact) < case.bound, "the bound is that of single precision"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_evaluation_counts_every_sample_once(learned: dict[Any, Any], variant: Variant) -> None:
    result, eager = learned[variant, "fp32", SGD][2], learned[EAGER, "fp32", SGD][2]
    assert result.num_test_samples == NUM_TEST == sum(row["support"] for row in result.per_class)
    assert result.per_class == eager.per_class
    assert result.batch_norm_treatment == "frozen"
    assert len(result.memory_by_rank) == 2


def _farthest(one: Any, other: Any) -> float:
    parameters = max(float((one[0][k] - other[0][k]).abs().max()) for k in one[0])
    losses = max(abs(a - b) for a, b in zip(one[1], other[1], strict=True))
    return max(parameters, losses)
