"""Runs as users start them: ``spec.json`` in a run directory, one process a rank, ``entry.run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from workloads import registry
from workloads.contract import Execution, Expectation, Hardware, RunSpec, Topology, TrainConfig
from workloads.files.event_log import read_events
from workloads.files.run_dir import AttemptDir, RunDir

PROGRAM = """
import json, sys
attempt, prelude, folders = json.loads(sys.argv[1])
exec(prelude)
from workloads.job.entry import run
for folder in folders:
    run(folder, attempt)
"""


class Ranks:
    """The processes of one launch."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self._started = time.monotonic()

    def exit_codes(self, within_s: float = 120.0) -> list[int]:
        """Return the exit codes by rank; a rank that does not end in time fails the test."""
        return [p.wait(max(0.1, self._started + within_s - time.monotonic())) for p in self.processes]

    def stderr(self, rank: int = 0) -> str:
        """Return the standard error of a rank that has ended."""
        stream = self.processes[rank].stderr
        assert stream is not None
        return stream.read()


class Launcher:
    """Writes run folders and starts ranks; kills by process id what still runs when the tests are over."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def write(
        self,
        runs: Path,
        *,
        execution: dict[str, Any] | None = None,
        expect: dict[str, Any] | None = None,
        data_root: Path | None = None,
        **train: Any,
    ) -> RunDir:
        """Write a planned run; ``train`` overrides a small configuration on one CPU rank."""
        small: dict[str, Any] = {"model": "cnn", "dataset": "digits", "strategy": "eager", "hardware": "cpu:1"}
        devices = Hardware.parse(train.get("hardware", "cpu:1")).devices
        config = TrainConfig.from_json(small | {"cpus": devices, "batch_size": 32, "epochs": 1} | train)
        strategy = registry.strategies()[config.strategy]
        ranks = devices if strategy.topology(config.strategy_options) is Topology.PROCESS_PER_DEVICE else 1
        expectation = {"ranks": ranks, "nodes": 1, "gpus_per_node": 0, "cpus_per_rank": 1} | (expect or {})
        spec = RunSpec(
            run_id=config.run_id(),
            label="test",
            experiment="test",
            train=config,
            execution=Execution(**({"hang_timeout_s": 60} | (execution or {}))),
            expect=Expectation(**expectation),
            target="local",
            data_root=str(data_root or ""),
        )
        run = RunDir.of(runs, spec.run_id)
        run.write_spec(spec)
        return run

    def start(
        self,
        runs: RunDir | Sequence[RunDir],
        *,
        ranks: int = 1,
        attempt: int = 1,
        prelude: str = "",
        env: dict[str, str] | None = None,
    ) -> Ranks:
        """Start ranks that execute the runs one after another.

        Args:
            prelude: code that runs first in every rank, such as a fault.
            env: replaces inherited variables.
        """
        folders = [str(r.path) for r in ([runs] if isinstance(runs, RunDir) else runs)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SUBMITIT_"))}
        job_id = f"{os.getpid()}-{len(self._processes)}"
        processes = []
        for rank in range(ranks):
            launcher_variables = {
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_LOCAL_NTASKS": str(ranks),
                "SUBMITIT_LOCAL_GLOBALID": str(rank),
                "SUBMITIT_LOCAL_LOCALID": str(rank),
                "SUBMITIT_LOCAL_JOB_ID": job_id,
                "PYTHONSAFEPATH": "1",
            }
            command = [sys.executable, "-c", PROGRAM, json.dumps([attempt, prelude, folders])]
            processes.append(
                subprocess.Popen(
                    command, env=inherited | launcher_variables | (env or {}), stderr=subprocess.PIPE, text=True
                )
            )
        self._processes += processes
        return Ranks(processes)

    def succeed(self, runs: RunDir | Sequence[RunDir], *, ranks: int = 1, within_s: float = 240.0, **more: Any) -> None:
        """Start ranks and require that all succeed."""
        started = self.start(runs, ranks=ranks, **more)
        codes = started.exit_codes(within_s)
        assert codes == [0] * ranks, [started.stderr(rank) for rank in range(ranks)]

    @staticmethod
    def events(attempt: AttemptDir, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [e for e in read_events(attempt.events(rank))[0] if e["event"] == kind]

    @staticmethod
    def wait_for(condition: Callable[[], object], what: str, within_s: float = 60.0) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {within_s:.0f} s"
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``imagefolder/few``: 39 training and 21 test images, gray, 8 px, of three classes."""
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    root: Path = tmp_path_factory.mktemp("data")
    pixels = np.random.default_rng(0)
    for split, count in (("train", 39), ("test", 21)):
        for number in range(count):
            folder = root / "few" / split / f"class {number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            darkest = 60 * (number % 3)
            picture = image.fromarray(pixels.integers(darkest, darkest + 120, (8, 8), np.uint8))
            picture.save(folder / f"{number:02d}.png")
    return root


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    started = Launcher()
    yield started
    started.close()
