"""``compile = "default"`` equals ``off`` under every strategy that supports it; CUDA graphs need GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.variants import Variant, widest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHARED: dict[str, Any] = {
    "dataset": "imagefolder/few",
    "model": "cnn",
    "dropout": 0.0,
    "batch_norm": "frozen",
    "precision": "fp64",
    "batch_size": 16,
    "steps": 5,
    "lr": 0.01,
    "eval_every": 0,
}
"""Of three batches an epoch, the last has 7 samples: it runs the step as written."""

EAGER = Variant("eager", 1)


def _first_and_last() -> list[Variant]:
    """The first and the last variant of each strategy that supports ``default``."""
    found: dict[str, list[Variant]] = {}
    for variant in widest(1, 2):
        if variant.has_double_precision and variant.supports_compile("default"):
            found.setdefault(variant.strategy, []).append(variant)
    return [variant for of_one in found.values() for variant in dict.fromkeys((of_one[0], of_one[-1]))]


VARIANTS = _first_and_last()

TRACED_ONLY = """
import functools, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""
"""torch.compile traces and differentiates models as usual, and runs the traced code instead of compiling it in C++."""


@pytest.fixture(scope="module")
def runs(launcher: Any, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    root = tmp_path_factory.mktemp("runs")
    written = {
        variant: launcher.write(root, data_root=data_root, compile="default", **SHARED, **variant.train)
        for variant in VARIANTS
    }
    reference = launcher.write(root, data_root=data_root, **SHARED, **EAGER.train)
    launcher.succeed(reference)
    for ranks in (1, 2):
        group = [run for variant, run in written.items() if variant.ranks == ranks]
        launcher.succeed(group, ranks=ranks, within_s=400, prelude=TRACED_ONLY)
    return written | {"off": reference}


def _losses(launcher: Any, run: Any) -> list[float]:
    steps = [loss for e in launcher.events(run.attempt(1), "steps") for loss in e["loss"]]
    return [*steps, run.attempt(1).read_result().test_loss]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_compiled_model_equals_eager(launcher: Any, runs: dict[Any, Any], variant: Variant) -> None:
    """Within 1e-9, with momentum and an odd batch between whole ones."""
    assert _losses(launcher, runs[variant]) == pytest.approx(_losses(launcher, runs["off"]), abs=1e-9)
    result = runs[variant].attempt(1).read_result()
    (event,) = launcher.events(runs[variant].attempt(1), "compile")
    assert (event["compile"], event["compile_s"]) == ("default", result.compile_s)
    assert result.compile_s > 0
    assert 0 < result.startup_s < result.total_time_s - result.compile_s - result.train_time_s


def test_without_compile_no_time_is_measured(runs: dict[Any, Any]) -> None:
    """Nor telemetry without GPUs, for which the result names the reason."""
    result = runs["off"].attempt(1).read_result()
    assert (result.compile_s, result.telemetry, result.energy_j) == (None, "no GPUs", None)
