"""``sbatch --test-only``: what its answers mean, and which queue an array goes to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.backends.processes import Answer
from orchestrator.backends.slurm import commands, queue_choice
from orchestrator.backends.slurm.records import QueuePair
from orchestrator.cluster import cluster_file, resources, sample_scripts

SCRIPT = Path("/runs/script.sh")


def answers(
    monkeypatch: pytest.MonkeyPatch, say: Callable[[tuple[str, ...]], tuple[int, str]]
) -> list[tuple[str, ...]]:
    """Let ``sbatch`` print this; return a list that its calls are added to."""
    asked: list[tuple[str, ...]] = []

    def run(*argv: str, timeout_s: float = 0) -> Answer:
        asked.append(argv)
        code, text = say(argv)
        return Answer(argv, code, "", text)

    monkeypatch.setattr(commands, "run", run)
    return asked


@pytest.mark.parametrize(
    ("code", "text", "start", "rejection"),
    [
        (
            0,
            "sbatch: Job 7 to start at 2026-11-28T02:48:23 using 1 processors on nodes a in partition p",
            "2026-11-28T02:48:23",
            "",
        ),
        (
            0,
            "Note: job 5 limit\nsbatch: Job 7 to start at 2026-12-01T00:00:00 using 48 processors on nodes a[1-2]",
            "2026-12-01T00:00:00",
            "",
        ),
        (
            1,
            "allocation failure: Requested node configuration is not available",
            "",
            "Requested node configuration is not available",
        ),
        (
            1,
            "sbatch: error: Invalid qos specification\nallocation failure: Invalid qos specification",
            "",
            "Invalid qos specification",
        ),
        (1, "", "", "sbatch --test-only ended with exit code 1 and no message"),
    ],
)
def test_estimate(monkeypatch: pytest.MonkeyPatch, code: int, text: str, start: str, rejection: str) -> None:
    """A start or Slurm's message, whatever a site's wrapper prints around it."""
    asked = answers(monkeypatch, lambda argv: (code, text))
    assert queue_choice.estimate(SCRIPT, "--qos=x") == queue_choice.StartEstimate(start, rejection)
    assert asked == [("sbatch", "--test-only", "--qos=x", str(SCRIPT))]


STARTS = {"slow": "2026-12-02T00:00:00", "fast": "2026-12-01T09:00:00", "also": "2026-12-01T09:00:00"}


def said(argv: tuple[str, ...]) -> tuple[int, str]:
    name = next(word.removeprefix("--partition=") for word in argv if word.startswith("--partition="))
    return (0, f"sbatch: Job 1 to start at {STARTS[name]} using") if name in STARTS else (1, "Invalid partition")


def test_the_earliest_start_wins_and_ties_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues with a lower limit are not tried, those that reject are not considered; if all reject, none is chosen."""
    asked = answers(monkeypatch, said)
    pairs = [
        QueuePair("slow"),
        QueuePair("brief", "", 60),
        QueuePair("gone"),
        QueuePair("fast", "q"),
        QueuePair("also"),
    ]
    found = queue_choice.earliest(SCRIPT, pairs, {"exclude": "n1"}, count=3, time_limit_s=3600)
    assert found is not None and (found[0], found[1].start) == (QueuePair("fast", "q"), STARTS["fast"])
    assert [word for argv in asked for word in argv if word.startswith("--part")] == [
        f"--partition={name}" for name in ("slow", "gone", "fast", "also")
    ]
    assert all({"--array=0-2", "--exclude=n1"} <= set(argv) for argv in asked) and "--qos=q" in asked[2]
    assert queue_choice.earliest(SCRIPT, pairs, {"partition": "x"}, count=1, time_limit_s=60) is None
    assert queue_choice.earliest(SCRIPT, [QueuePair("gone")], {}, count=1, time_limit_s=60) is None


def test_all_queues_that_accept_a_shape() -> None:
    """In the order of the cluster file, without those whose limits it exceeds."""
    sol = cluster_file.load("sol")
    for limit_s, names in ((3600, ["htc/public", "public/public"]), (5 * 3600, ["public/public"])):
        shape = sample_scripts.sample(sol, "a100:2", limit_s).shape
        assert shape is not None and [str(queue) for queue in resources.queues(sol, shape)] == names


def test_this_machine_has_no_queues_to_choose_among(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--queue with --local is an error, reported before anything is submitted."""
    defaults = 'name = "x"\n[defaults]\nmodel = "cnn"\ndataset = "digits"\nstrategy = "probe"\n'
    (tmp_path / "experiment.toml").write_text(f'{defaults}[matrix]\nhardware = ["cpu:1"]\n')
    with contextlib.chdir(tmp_path):
        code = cli.run(["submit", "--local", "--queue", "earliest"])
    assert code == 2 and "--queue chooses among the queues of a cluster" in capsys.readouterr().err
    assert not (tmp_path / "results.db").exists()
