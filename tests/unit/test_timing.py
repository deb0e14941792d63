"""Windows of steps, warm-up, evaluation metrics and checkpoints."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def _record(epochs: list[int]) -> list[Any]:
    """Record steps whose loss is 10 times their number, of 5 samples each, over two ranks that see the same."""
    from workloads.measurement.timing import Clock, Recorder, StepTimes

    delivered: list[StepTimes] = []
    recorder = Recorder(Clock(CPU), lambda tensor: tensor.mul_(2), delivered.append)
    step = 0
    for steps in epochs:
        recorder.start_epoch(step)
        for _ in range(steps):
            recorder.record(torch.tensor(10.0 * step), 5)
            step += 1
        recorder.finish_epoch()
    return delivered


@pytest.mark.parametrize("epochs", [[1], [50], [51], [120, 120], [49, 1, 100]])
def test_every_step_is_delivered_once_and_in_order(epochs: list[int]) -> None:
    """Whole windows, broken ones and epochs that end with a window; losses are summed over ranks."""
    delivered = _record(epochs)
    firsts = [w.first_step for w in delivered]
    assert firsts == sorted(firsts) and firsts[0] == 0
    assert sum(len(w.times_s) for w in delivered) == sum(epochs)
    assert [loss for w in delivered for loss in w.loss_sums] == [20.0 * n for n in range(sum(epochs))]
    assert [loss for w in delivered for loss in w.losses] == [4.0 * n for n in range(sum(epochs))]
    assert all(t >= 0 for w in delivered for t in w.times_s)


def test_warm_up_steps_are_counted_apart() -> None:
    """Ten steps, a tenth of few, none of one."""
    from workloads.measurement.timing import StepTimes, Tally, warmup_steps

    assert [warmup_steps(n) for n in (1, 2, 20, 100, 5000)] == [0, 1, 2, 10, 10]
    tally = Tally(warmup=3)
    for first in (0, 2, 4):
        tally.take(StepTimes(first, [1.0 + first, 2.0 + first], [1.0, 1.0], [8, 8]))
    assert tally.warmup_time_s == 1.0 + 2.0 + 3.0
    assert tally.times_s == [4.0, 5.0, 6.0]
    assert (tally.samples, tally.steady_time_s, tally.median_step_s) == (24, 15.0, 5.0)


def test_the_first_step_of_a_new_batch_size_is_warm_up() -> None:
    """The odd last batch of the first epoch is apart, that of later epochs is steady."""
    from workloads.measurement.timing import StepTimes, Tally

    tally = Tally(warmup=1)
    for first in (0, 3):
        tally.take(
            StepTimes(first, [9.0 if first == 0 else 1.0, 1.0, 7.0 if first == 0 else 2.0], [1.0] * 3, [8, 8, 3])
        )
    assert tally.warmup_time_s == 9.0 + 7.0
    assert tally.times_s == [1.0, 1.0, 1.0, 2.0]
    assert tally.samples == 8 + 8 + 8 + 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_counts_as_diverged(bad: float) -> None:
    from workloads.measurement.timing import StepTimes, Tally

    tally = Tally(warmup=0)
    tally.take(StepTimes(0, [1.0, 1.0, 1.0], [1.0, bad, -bad], [1, 1, 1]))
    assert tally.diverged and not math.isfinite(tally.epoch_loss_sum)
    tally.start_epoch()
    tally.take(StepTimes(3, [1.0], [1.0], [1]))
    assert tally.diverged, "once diverged, always told"


def test_memory_of_a_process_is_in_bytes() -> None:
    """In a process of its own: one that ran other tests has freed memory that new tensors go into."""
    code = (
        "import torch; from workloads.measurement.memory import memory_bytes; cpu = torch.device('cpu');"
        "before, _ = memory_bytes(cpu); block = torch.ones(8 * 2**20, dtype=torch.float64);"
        "now, peak = memory_bytes(cpu); assert now - before > 0.8 * block.nbytes, (before, now); assert peak >= now"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class _Answers:
    """A strategy that knows all answers beforehand."""

    def logits(self, x: Any) -> Any:
        return x[:, :, 0, 0]


class _Batches:
    def __init__(self, logits: Any, y: Any, size: int, claims: int) -> None:
        self.num_test = claims
        self._batches = [(logits[i : i + size], y[i : i + size]) for i in range(0, len(y), size)]

    def test(self) -> Any:
        from workloads.loaders.protocol import Batch

        for logits, y in self._batches:
            yield Batch(logits[:, :, None, None], y, len(y), len(y))
        yield Batch(logits[:1, :, None, None], y[:1], 0, 5)  # a stand-in


def _evaluate(logits: Any, y: Any, claims: int) -> Any:
    from workloads.engines.communication import Communication
    from workloads.engines.torch_loop import evaluate
    from workloads.files.run_dir import AttemptDir
    from workloads.job.world import World

    communication = Communication(World.from_environment({}), AttemptDir(Path("1")), CPU, join=False, hang_timeout_s=0)
    names = tuple(f"class {n}" for n in range(logits.shape[1]))
    return evaluate(_Answers(), _Batches(logits, y, 8, claims), names, CPU, communication, lambda: None)  # type: ignore[arg-type]


def test_per_class_figures_are_scikit_learns() -> None:
    """Precision, recall, F1 and support of each class, accuracy and mean loss; a stand-in sample does not count."""
    from sklearn.metrics import accuracy_score, log_loss, precision_recall_fscore_support

    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (61,), generator=generator)
    logits = torch.randn(61, 4, generator=generator, dtype=torch.float64) + 1.5 * torch.eye(4, dtype=torch.float64)[y]
    found = _evaluate(logits, y, 61)
    answers = logits.argmax(1).numpy()
    expected = precision_recall_fscore_support(y.numpy(), answers)
    for name, figures in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [row[name] for row in found.per_class] == pytest.approx(list(figures)), name
    assert found.accuracy == pytest.approx(accuracy_score(y.numpy(), answers))
    assert found.loss == pytest.approx(log_loss(y.numpy(), torch.softmax(logits, 1).numpy()))
    assert found.samples == 61


def test_undefined_values_are_none() -> None:
    """A class that never occurs and is never answered has no precision, recall or F1: none of them is zero."""
    found = _evaluate(torch.eye(3, dtype=torch.float64)[[0, 1, 1]] * 9, torch.tensor([0, 1, 0]), 3)
    assert found.per_class[2] == {
        "class_name": "class 2",
        "precision": None,
        "recall": None,
        "f1": None,
        "support": 0,
    }


def test_a_wrong_count_of_test_samples_is_an_error() -> None:
    from workloads.errors import JobError

    with pytest.raises(JobError, match="counted 3 test samples of 4"):
        _evaluate(torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 2]), 4)


RUN_ID = "0123456789abcdef"


def _state() -> dict[str, Any]:
    from workloads.engines.checkpoint import cpu_state

    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return cpu_state(layer, optimizer)


def test_a_checkpoint_is_restored(tmp_path: Path) -> None:
    """Model, optimiser state and progress; nothing else is left in the folder; no checkpoint is None."""
    from workloads.engines import checkpoint

    path = tmp_path / "checkpoint" / "last.pt"
    assert checkpoint.load(path, RUN_ID) is None
    state = _state()
    checkpoint.save(path, RUN_ID, state, {"epoch": 3, "epoch_times_s": [1.5], "train_loss": None})
    found = checkpoint.load(path, RUN_ID)
    assert found is not None
    torch.testing.assert_close(found[0], state, rtol=0, atol=0)
    assert found[1] == {"epoch": 3, "epoch_times_s": [1.5], "train_loss": None}
    assert [p.name for p in path.parent.iterdir()] == ["last.pt"]


def test_a_failed_checkpoint_leaves_the_previous_one(tmp_path: Path) -> None:
    """On a full disk the old file stays whole and no temporary one remains. The message has the system's reason, also
    where the file is larger than a buffer and torch only says at which byte it stopped."""
    import resource

    from workloads.engines import checkpoint

    path = tmp_path / "last.pt"
    checkpoint.save(path, RUN_ID, _state(), {"epoch": 1})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        large = {"model": {str(i): torch.zeros(50_000) for i in range(3)}, "optimizer": {}}
        for state in (_state(), large):
            with pytest.raises(OSError, match="File too large"):
                checkpoint.save(path, RUN_ID, state, {"epoch": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "no checkpoint", "another run", "pickle"])
def test_a_damaged_checkpoint_is_an_error_and_a_missing_one_is_none(tmp_path: Path, damage: str) -> None:
    """Also a pickle with code in it: it is refused and not run."""
    from workloads.engines import checkpoint

    path = tmp_path / "last.pt"
    checkpoint.save(path, "f" * 16 if damage == "another run" else RUN_ID, _state(), {"epoch": 1})
    whole = path.read_bytes()
    if damage == "no checkpoint":
        torch.save([1, 2], path)
    elif damage == "pickle":
        torch.save({"version": 1, "run_id": RUN_ID, "model": _Trap(tmp_path / "sprung"), "optimizer": {}}, path)
    elif damage != "another run":
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "garbage": b"x" * 100}[damage])
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"last\.pt"):
        checkpoint.load(path, RUN_ID)
    assert not (tmp_path / "sprung").exists()
    assert checkpoint.set_aside(path) == tmp_path / "last.pt.damaged" and not path.exists()


class _Trap:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)
