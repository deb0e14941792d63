"""Every strategy on two GPUs gives the losses of eager on one. ``data_parallel`` needs GPUs: it is tested only here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

from orchestrator.backends.local.machine import local_machine  # noqa: E402
from tests.contract.conftest import data_root, launcher  # noqa: E402, F401 (fixtures)
from tests.contract.variants import Variant, variants  # noqa: E402

EAGER = Variant("eager", 1, kind="gpu")
VARIANTS = variants(2, kind="gpu")
SHARED: dict[str, Any] = {"dataset": "imagefolder/few", "dropout": 0.0, "batch_size": 8, "eval_every": 0, "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "vit_tiny": SHARED | {"model": "vit_tiny", "precision": "fp64", "steps": 7},
    "cnn": SHARED | {"model": "cnn", "batch_norm": "frozen", "precision": "fp64", "steps": 20},
    "bf16": SHARED | {"model": "vit_tiny", "precision": "bf16", "steps": 7},
}
CLOSE = {"vit_tiny": 1e-9, "cnn": 1e-9, "bf16": 0.03}
"""Case -> absolute tolerance of every loss. bfloat16 has 8 significant bits, and micro-batches reorder sums."""

CLOSE_IN_SINGLE = 1e-6
"""Tolerance for strategies that keep parameters in single precision always: the rounding unit near 1 is 6e-8."""


@pytest.fixture(scope="module")
def named_by_uuid() -> Iterator[None]:
    """Name the GPUs by UUID, as local mode does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpu.uuid for gpu in local_machine().gpus[:2]))
        yield


@pytest.fixture(scope="module")
def losses(
    named_by_uuid: None,
    request: pytest.FixtureRequest,
    launcher: Any,  # noqa: F811
    data_root: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[Variant, str], list[float]]:
    """Losses of each step, then the test loss, of eager and of the strategies that this session tests."""
    root = tmp_path_factory.mktemp("runs")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = [item.callspec.params.get("variant") for item in tests if hasattr(item, "callspec")]
    runs = {
        (variant, case): launcher.write(
            root, data_root=data_root, expect={"gpus_per_node": variant.devices}, **train, **variant.train
        )
        for variant in (EAGER, *(variant for variant in VARIANTS if variant in wanted))
        for case, train in CASES.items()
    }
    # One set of processes per strategy, as in real runs: DeepSpeed patches torch for the whole process.
    for strategy, ranks in sorted({(variant.strategy, variant.ranks) for variant, _ in runs}):
        own = [run for (variant, _), run in runs.items() if (variant.strategy, variant.ranks) == (strategy, ranks)]
        launcher.succeed(own, ranks=ranks, within_s=500)
    found = {}
    for key, run in runs.items():
        steps = [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]
        found[key] = [*steps, run.attempt(1).read_result().test_loss]
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_losses_on_two_gpus_equal_those_of_eager(
    losses: dict[tuple[Variant, str], list[float]], variant: Variant, case: str
) -> None:
    """In bf16 this requires that autocast is active in the threads of torchgpipe and nn.DataParallel."""
    close = CLOSE[case] if variant.has_double_precision else max(CLOSE[case], CLOSE_IN_SINGLE)
    assert losses[variant, case] == pytest.approx(losses[EAGER, case], abs=close)
    assert losses[EAGER, case][-2] < losses[EAGER, case][0]


def test_all_strategies_are_tested() -> None:
    assert {variant.strategy for variant in VARIANTS} >= {"ddp", "fsdp", "data_parallel", "model_parallel", "pipeline"}
