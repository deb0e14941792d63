"""Faults inside a job: what is kept, what the messages say, how fast it ends."""

from __future__ import annotations

import platform
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.variants import Variant, missing_packages
from workloads import registry
from workloads.job.entry import ExitCode

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

FEW: dict[str, Any] = {"dataset": "imagefolder/few", "batch_size": 8}
"""An epoch is five steps."""
LONG: dict[str, Any] = FEW | {"epochs": 4000}
"""Still going when the fault comes."""


def _fault(what: str, *, strategy: str = "eager", step: int = 3) -> str:
    """Return code that makes a training step (0-based) do ``what``.

    It imports torch before the watchdog starts, and what the first optimizer imports: torch._dynamo, for seconds.
    """
    return f"""
import os, signal, time
import torch, workloads.engines.torch_loop
from workloads import registry
torch.optim.SGD([torch.zeros(1)], lr=1.0)
Strategy = registry.strategies()["{strategy}"].create()
whole, count = Strategy.train_step, iter(range(10**9))
def train_step(self, batch):
    if next(count) == {step}:
        {what}
    return whole(self, batch)
Strategy.train_step = train_step
"""


def _trains(launcher: Any, run: Any, rank: int = 0, attempt: int = 1) -> None:
    """Wait until a rank has finished an epoch."""
    launcher.wait_for(lambda: launcher.events(run.attempt(attempt), "epoch", rank), "the first epoch")


@pytest.mark.parametrize(("strategy", "ranks"), [("eager", 1), ("ddp", 2)])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    launcher: Any, data_root: Path, tmp_path: Path, strategy: str, ranks: int
) -> None:
    """kill -9 of all ranks in the middle of epoch 2, then a second attempt: every bit and loss is equal.

    Dropout and augmentation are on, so their random numbers must be restored too; times add up over attempts.
    """
    train = FEW | {
        "strategy": strategy,
        "hardware": f"cpu:{ranks}",
        "epochs": 3,
        "augment": "crop_flip",
        "optimizer": "adam",
        "lr": 1e-3,
        "schedule": "cosine",
        "warmup_steps": 5,
    }
    undisturbed, killed = (
        launcher.write(tmp_path / name, data_root=data_root, **train) for name in ("undisturbed", "killed")
    )
    launcher.succeed(undisturbed, ranks=ranks)
    prelude = _fault("os.kill(os.getpid(), signal.SIGKILL)", strategy=strategy, step=7)
    first = launcher.start(killed, ranks=ranks, prelude=prelude)
    assert first.exit_codes()[0] == -signal.SIGKILL
    assert not killed.attempt(1).result.exists()
    launcher.succeed(killed, ranks=ranks, attempt=2)

    one, two = (torch.load(run.checkpoint, weights_only=True) for run in (undisturbed, killed))
    assert one["model"].keys() == two["model"].keys()
    for name in one["model"]:
        assert torch.equal(one["model"][name], two["model"][name]), name
    result, reference = killed.attempt(2).read_result(), undisturbed.attempt(1).read_result()
    assert result.resumed_from_epoch == 1
    losses = [
        [loss for e in launcher.events(attempt, "steps") for loss in e["loss"]]
        for attempt in (killed.attempt(2), undisturbed.attempt(1))
    ]
    assert losses[0] == losses[1][5:]
    for name in ("test_loss", "test_accuracy", "train_loss", "lr_applied", "epochs_done", "steps_done"):
        assert getattr(result, name) == getattr(reference, name), name
    assert result.total_time_s > launcher.events(killed.attempt(1), "epoch")[0]["t_s"]


def test_a_damaged_checkpoint_is_set_aside(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """Training starts over, prints why, and keeps the damaged file."""
    run = launcher.write(tmp_path, data_root=data_root, **FEW)
    run.checkpoint.parent.mkdir()
    run.checkpoint.write_bytes(b"PK\x03\x04 cut short")
    started = launcher.start(run)
    assert started.exit_codes() == [0]
    assert "checkpoint cannot be used, starting over" in started.stderr()
    assert run.attempt(1).read_result().resumed_from_epoch is None
    assert run.checkpoint.with_name("last.pt.damaged").read_bytes() == b"PK\x03\x04 cut short"
    assert torch.load(run.checkpoint, weights_only=True)["progress"]["epoch"] == 1


@pytest.mark.parametrize("strategy", ["ddp", "horovod"])
def test_a_dead_rank_ends_the_others(launcher: Any, data_root: Path, tmp_path: Path, strategy: str) -> None:
    """kill -9 of rank 1: rank 0 ends within 10 s, with exit code 1, and its result names the loss of a rank."""
    if missing_packages(registry.strategies()[strategy]):
        pytest.skip(f"{strategy} is not installed")
    run = launcher.write(tmp_path, data_root=data_root, strategy=strategy, hardware="cpu:2", **LONG)
    started = launcher.start(run, ranks=2)
    _trains(launcher, run)
    started.processes[1].kill()
    killed_at = time.monotonic()
    started.processes[0].wait(10)
    assert time.monotonic() - killed_at < 10
    assert started.exit_codes() == [ExitCode.FAILED, -signal.SIGKILL]
    result = run.attempt(1).read_result()
    assert (result.state, result.reason) == ("failed", "rank_lost")
    assert result.epochs_done and result.train_loss, "what was measured before is kept"


def test_the_result_names_the_rank_that_failed(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """Rank 1 raises: the result has its message, not rank 0's about the lost connection; both end at once."""
    run = launcher.write(tmp_path, data_root=data_root, strategy="ddp", hardware="cpu:2", **LONG)
    what = "if os.environ['SUBMITIT_LOCAL_GLOBALID'] == '1': raise RuntimeError('the seventh seal')"
    prelude = _fault(what, strategy="ddp")
    started = launcher.start(run, ranks=2, prelude=prelude)
    assert started.exit_codes(within_s=60) == [ExitCode.FAILED] * 2
    result = run.attempt(1).read_result()
    assert (result.state, result.reason) == ("failed", "program_error")
    assert result.message == "rank 1: RuntimeError: the seventh seal"
    (error,) = launcher.events(run.attempt(1), "error", rank=1)
    assert error["failure_class"] == "program_error" and "train_step" in error["traceback"]
    assert launcher.events(run.attempt(1), "error", rank=0)[0]["failure_class"] == "rank_lost"
    assert "the seventh seal" in started.stderr(1)


@pytest.mark.parametrize(
    "what",
    ["time.sleep(1000)", "import ctypes; ctypes.PyDLL(None).sleep(1000)"],
    ids=["asleep", "holding the interpreter's lock"],
)
def test_a_hang_ends_the_process(launcher: Any, data_root: Path, tmp_path: Path, what: str) -> None:
    """No step for ``hang_timeout_s``: the process ends with exit code 1, also when no Python thread can run any more.

    ``hang.0.txt`` has the stacks, which show the line it hangs in.
    """
    run = launcher.write(tmp_path, data_root=data_root, execution={"hang_timeout_s": 4}, **LONG)
    started = launcher.start(run, prelude=_fault(what))
    launcher.wait_for(lambda: launcher.events(run.attempt(1), "setup"), "the start")
    begun = time.monotonic()
    started.processes[0].wait(30)
    assert 2 < time.monotonic() - begun < 15
    assert started.exit_codes() == [ExitCode.FAILED]
    assert "train_step" in run.attempt(1).hang(0).read_text()


def test_a_hang_while_starting_ends_the_process(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """Rank 1 never comes: rank 0 waits for it no longer than ``hang_timeout_s``."""
    run = launcher.write(
        tmp_path, data_root=data_root, strategy="ddp", hardware="cpu:2", execution={"hang_timeout_s": 5}
    )
    prelude = "import os, time\nif os.environ['SUBMITIT_LOCAL_GLOBALID'] == '1': time.sleep(1000)"
    started = launcher.start(run, ranks=2, prelude=prelude)
    begun = time.monotonic()
    assert started.processes[0].wait(60) == ExitCode.FAILED
    assert time.monotonic() - begun < 30
    assert run.attempt(1).hang(0).read_text() or run.attempt(1).result.exists()


def test_a_diverged_run_keeps_its_result(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """A huge learning rate makes the loss infinite or NaN: the run finishes and its result says so."""
    run = launcher.write(tmp_path, data_root=data_root, lr=1e30, **FEW)
    launcher.succeed(run)
    raw = run.attempt(1).result.read_text()
    result = run.attempt(1).read_result()
    assert result.state == "succeeded" and result.diverged
    assert result.train_loss is None and result.nonfinite["train_loss"] in {"nan", "inf"}
    assert result.num_test_samples == 21
    assert "NaN" not in raw and "Infinity" not in raw


def test_out_of_memory_is_a_state_of_its_own(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """The result keeps what was measured before."""
    run = launcher.write(tmp_path, data_root=data_root, **LONG)
    started = launcher.start(run, prelude=_fault("raise MemoryError", step=7))
    assert started.exit_codes() == [ExitCode.OUT_OF_MEMORY]
    result = run.attempt(1).read_result()
    assert (result.state, result.reason) == ("out_of_memory", "host_memory")
    assert (result.lr_applied, result.epochs_done) == (0.05, 1) and result.train_loss and result.test_accuracy


def test_sigterm_ends_after_the_step_and_resumes(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """Time limit, preemption or cancel: its own exit code, an event, no result, and a checkpoint to resume."""
    run = launcher.write(tmp_path, data_root=data_root, **LONG)
    started = launcher.start(run)
    launcher.wait_for(lambda: launcher.events(run.attempt(1), "checkpoint"), "the first checkpoint")
    started.processes[0].terminate()
    assert started.exit_codes() == [ExitCode.INTERRUPTED]
    (event,) = launcher.events(run.attempt(1), "interrupt")
    assert event["signal"] == "SIGTERM" and event["epoch"] >= 1
    assert not run.attempt(1).result.exists() and run.checkpoint.exists()
    assert not run.attempt(1).hang(0).exists()


def test_fewer_ranks_than_planned_are_wrong_hardware(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """One rank never writes a result for two; it fails before a framework is imported."""
    run = launcher.write(tmp_path, data_root=data_root, strategy="ddp", hardware="cpu:2")
    started = launcher.start(run, ranks=1, prelude="import sys; sys.modules['torch'] = None")
    assert started.exit_codes(within_s=10) == [ExitCode.WRONG_HARDWARE]
    result = run.attempt(1).read_result()
    assert result.state == "wrong_hardware"
    assert "1 rank started (submitit_local), 2 planned" in result.message
    assert "Traceback" not in started.stderr()


def test_another_gpu_than_planned_is_wrong_hardware(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """An A30 in place of an A100, as ``nvidia-smi`` reports it, within seconds and without a framework."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA A30, 24576'\n")
    tool.chmod(0o755)
    expect = {"gpus_per_node": 1, "gpu_name": "A100", "gpu_memory_gb": 80.0}
    run = launcher.write(tmp_path, data_root=data_root, hardware="a100:1", cpus=1, expect=expect)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0"}
    started = launcher.start(run, env=env, prelude="import sys; sys.modules['torch'] = None")
    assert started.exit_codes(within_s=10) == [ExitCode.WRONG_HARDWARE]
    assert "GPU 0 is a NVIDIA A30, A100 planned" in run.attempt(1).read_result().message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_unusable_gpu_is_wrong_hardware(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """nvidia-smi lists the planned GPU and torch cannot use it: the message has versions; nothing runs on the CPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA A100-SXM4-80GB, 81920'\n")
    tool.chmod(0o755)
    run = launcher.write(
        tmp_path, data_root=data_root, hardware="a100:1", cpus=1, expect={"gpus_per_node": 1, "gpu_name": "A100"}
    )
    started = launcher.start(run, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert started.exit_codes(within_s=60) == [ExitCode.WRONG_HARDWARE]
    message = run.attempt(1).read_result().message
    assert "no GPU can be used, 1 a node planned" in message and torch.__version__ in message


def test_an_unknown_timm_model_names_its_neighbours(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    run = launcher.write(tmp_path, data_root=data_root, model="timm/resnet81")
    started = launcher.start(run)
    assert started.exit_codes() == [ExitCode.FAILED]
    result = run.attempt(1).read_result()
    assert result.reason == "input"
    assert "has no model 'resnet81'" in result.message and "nearest: timm/resnet" in result.message
    assert "Traceback" not in started.stderr()


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (
            Variant("eager", 1),
            "the last batch of an epoch has 1 of 19 samples and leaves a step with a single one or none",
        ),
        (Variant("fsdp", 2, (("mixed_precision", "cast"),)), 'set mixed_precision = "autocast"'),
    ],
    ids=str,
)
def test_batch_norm_unknown_to_the_plan_is_checked_before_training(
    launcher: Any, data_root: Path, tmp_path: Path, variant: Variant, why: str
) -> None:
    """timm's models are known to have batch norm once they are built; the message is then the plan's."""
    run = launcher.write(
        tmp_path,
        data_root=data_root,
        model="timm/resnet10t",
        dataset="imagefolder/few",
        image_size=32,
        batch_size=19,
        precision="bf16",
        **variant.train,
    )
    started = launcher.start(run, ranks=variant.ranks)
    assert set(started.exit_codes()) == {ExitCode.FAILED}
    result = run.attempt(1).read_result()
    assert (result.reason, result.steps_done) == ("input", None)
    assert "timm/resnet10t has batch norm, and " in result.message and why in result.message
    assert "Traceback" not in started.stderr()


def test_a_run_measures_itself(launcher: Any, data_root: Path, tmp_path: Path) -> None:
    """The result has every figure of the tables, none is a meaningless zero, and the parts add up."""
    run = launcher.write(tmp_path, data_root=data_root, **FEW | {"epochs": 2, "batch_size": 3})
    launcher.succeed(run)
    attempt = run.attempt(1)
    result = attempt.read_result()
    assert (result.epochs_done, result.steps_done, result.num_train_samples) == (2, 26, 39)
    assert result.lr_applied == 0.05 and result.world_size == 1 and result.num_parameters == 904_899
    assert result.metrics["starvation_ratio"] is not None and 0.2 < result.metrics["starvation_ratio"] < 5
    parts = result.startup_s + result.train_time_s + result.evaluate_s
    assert parts <= result.total_time_s < parts + 5
    steps = [t for e in launcher.events(attempt, "steps") for t in e["step_time_s"]]
    assert len(steps) == 26
    assert sum(steps) == pytest.approx(result.train_time_s, rel=0.1)
    assert result.metrics["samples_per_s"] == pytest.approx(78 / result.train_time_s, rel=0.5)
    assert 10e6 < result.allocated_memory_bytes <= result.peak_memory_bytes
    assert [m["rank"] for m in result.memory_by_rank] == [0]
    assert result.provenance["packages"]["torch"] and result.provenance["python"] == platform.python_version()
    epochs = launcher.events(attempt, "epoch")
    assert [e["epoch"] for e in epochs] == [1, 2] and all("test_accuracy" in e for e in epochs)
    assert [e["epoch"] for e in launcher.events(attempt, "checkpoint")] == [1, 2]
