"""Steps recorded as CUDA graphs give the same losses as plain steps, and are really replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

from tests.contract.conftest import data_root, launcher  # noqa: E402, F401 (fixtures)
from tests.contract.variants import Variant  # noqa: E402

EAGER = Variant("eager", 1, kind="gpu")
VARIANTS = [
    EAGER,
    Variant("local_sgd", 2, (("period", 1),), kind="gpu"),
    Variant("ddp", 2, kind="gpu"),
    Variant("ddp", 2, (("bucket_cap_mb", 1), ("static_graph", True)), kind="gpu"),
]

RATE = 2.0**-7
"""A power of two: the learning rate of a recorded step is a single-precision number."""
SHARED: dict[str, Any] = {
    "dataset": "imagefolder/few",
    "model": "vit_tiny",
    "dropout": 0.0,
    "precision": "fp64",
    "batch_size": 16,
    "steps": 20,
    "lr": RATE,
    "eval_every": 1,
}
"""Seven epochs of two full batches and one of 7 samples, with an evaluation after each."""

CASES: dict[str, dict[str, Any]] = {
    "momentum": SHARED,
    "adam": SHARED | {"optimizer": "adam", "lr": 2.0**-10},
    "live batch norm": SHARED | {"model": "resnet18", "image_size": 32},
    "bf16": SHARED | {"precision": "bf16"},
    "dropout": SHARED | {"dropout": 0.3},
    "schedule": SHARED | {"schedule": "cosine", "warmup_steps": 4},
}
CLOSE = {"bf16": 0.03, "schedule": 1e-6}
"""Case -> absolute tolerance of every loss; default 1e-9. The rates of a schedule are rounded to single precision."""
SPLIT = ("momentum", "adam", "bf16")
"""Cases whose losses do not depend on how a batch is split over ranks."""

COUNT_REPLAYS = """
import os, torch
replay = torch.cuda.CUDAGraph.replay
def counted(graph):
    with open(os.environ["REPLAYS"], "a") as stream:
        stream.write(".")
    return replay(graph)
torch.cuda.CUDAGraph.replay = counted
"""


def _losses(launcher: Any, run: Any) -> list[float]:  # noqa: F811
    steps = [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]
    return [*steps, run.attempt(1).read_result().test_loss]


def _write(launcher: Any, root: Path, images: Path, variant: Variant, case: str, compile: str) -> Any:  # noqa: A002, F811
    expect = {"gpus_per_node": variant.devices}
    train = CASES[case] | {"compile": compile} | variant.train
    return launcher.write(root, data_root=images, expect=expect, execution={"hang_timeout_s": 300}, **train)


@pytest.mark.parametrize(
    ("variant", "case"),
    [(EAGER, case) for case in CASES]
    + [(variant, case) for variant in VARIANTS[1:] for case in SPLIT if variant.strategy == "ddp"]
    # Without Adam: each rank's own Adam would see only its part of the batch.
    + [(VARIANTS[1], "momentum")],
    ids=str,
)
def test_recorded_steps_give_the_losses_of_plain_steps(
    launcher: Any,  # noqa: F811
    data_root: Path,  # noqa: F811
    tmp_path: Path,
    variant: Variant,
    case: str,
) -> None:
    """Smaller last batches and evaluations are not recorded: each rank replays the 14 full batches of 20 steps.

    Dropout of an epoch depends on the seed only, not on whether steps are recorded.
    """
    if torch.cuda.device_count() < variant.devices:
        pytest.skip("needs two GPUs")
    plain = _write(launcher, tmp_path, data_root, EAGER, case, "off")
    recorded = _write(launcher, tmp_path, data_root, variant, case, "graphs")
    launcher.succeed(plain)
    counter = tmp_path / "replays"
    launcher.succeed(recorded, ranks=variant.ranks, within_s=400, prelude=COUNT_REPLAYS, env={"REPLAYS": str(counter)})
    found, expected = _losses(launcher, recorded), _losses(launcher, plain)
    assert found == pytest.approx(expected, abs=CLOSE.get(case, 1e-9))
    assert expected[-2] < expected[0]
    full = sum(1 for step in range(20) if step % 3 != 2)
    starvation = (counter.stat().st_size - full * variant.ranks) / variant.ranks
    assert starvation in range(22), (
        "every full batch is replayed, and one more batch after training, for starvation_ratio"
    )
    assert recorded.attempt(1).read_result().compile_s > 0


BY_SIZE = ("balance_by", "size")
"""Cut by size: measuring layer times would replay further graphs."""
PIPELINES = [
    *(Variant("pipeline", 2, (("schedule", schedule), BY_SIZE), kind="gpu") for schedule in ("gpipe", "interleaved")),
    Variant("pipeline", 2, (("chunks", 8), BY_SIZE), kind="gpu"),
]


@pytest.mark.parametrize("case", ["momentum", "adam", "bf16"])
@pytest.mark.parametrize("variant", PIPELINES, ids=str)
def test_recorded_stages_give_the_losses_of_eager(
    launcher: Any,  # noqa: F811
    data_root: Path,  # noqa: F811
    tmp_path: Path,
    variant: Variant,
    case: str,
) -> None:
    """There are two replays per micro-batch and stage, in all steps, because smaller batches are padded."""
    if torch.cuda.device_count() < variant.devices:
        pytest.skip("needs two GPUs")
    plain = _write(launcher, tmp_path, data_root, EAGER, case, "off")
    recorded = _write(launcher, tmp_path, data_root, variant, case, "graphs")
    launcher.succeed(plain)
    counter = tmp_path / "replays"
    launcher.succeed(recorded, ranks=2, within_s=400, prelude=COUNT_REPLAYS, env={"REPLAYS": str(counter)})
    assert _losses(launcher, recorded) == pytest.approx(_losses(launcher, plain), abs=CLOSE.get(case, 1e-9))
    per_step = variant.all_options["chunks"] * (4 if variant.all_options["schedule"] == "interleaved" else 2) * 2
    assert counter.stat().st_size >= 20 * per_step and counter.stat().st_size % per_step == 0


@pytest.mark.parametrize("how", ["default", "default_graphs"])
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2], PIPELINES[0]], ids=str)
def test_compiled_kernels_give_the_losses_of_eager_kernels(
    launcher: Any,  # noqa: F811
    data_root: Path,  # noqa: F811
    tmp_path: Path,
    variant: Variant,
    how: str,
) -> None:
    if torch.cuda.device_count() < variant.devices:
        pytest.skip("needs two GPUs")
    plain = _write(launcher, tmp_path, data_root, EAGER, "momentum", "off")
    fast = _write(launcher, tmp_path, data_root, variant, "momentum", how)
    launcher.succeed(plain)
    launcher.succeed(fast, ranks=variant.ranks, within_s=500)
    assert _losses(launcher, fast) == pytest.approx(_losses(launcher, plain), abs=1e-9)


def test_a_recorded_run_resumes_from_its_checkpoint(
    launcher: Any,  # noqa: F811
    data_root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Ended after three epochs, with momentum and dropout: the second attempt ends like an uninterrupted run."""
    whole = _write(launcher, tmp_path / "whole", data_root, EAGER, "dropout", "graphs")
    broken = _write(launcher, tmp_path / "broken", data_root, EAGER, "dropout", "graphs")
    launcher.succeed(whole)
    stop = (
        "import os\nfrom workloads.engines.training import Training\nsave = Training._save\n"
        "def then_end(self):\n    save(self)\n    if self._epoch == 3:\n        os._exit(75)\n"
        "Training._save = then_end\n"
    )
    assert launcher.start(broken, prelude=stop).exit_codes() == [75]
    launcher.succeed(broken, attempt=2)
    result = broken.attempt(2).read_result()
    assert result.resumed_from_epoch == 3
    assert result.test_loss == pytest.approx(whole.attempt(1).read_result().test_loss, abs=1e-9)
