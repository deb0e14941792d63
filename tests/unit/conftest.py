"""Run directories as jobs leave them, and stores to take them into."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from db import connect
from workloads.contract import Execution, Expectation, RunResult, RunSpec, State, TrainConfig
from workloads.files.event_log import EventLog
from workloads.files.json_file import write_json
from workloads.files.run_dir import AttemptDir, RunDir


@dataclass
class Campaign:
    """A runs folder that fills up."""

    runs: Path
    specs: dict[str, RunSpec] = field(default_factory=dict)

    def spec(self, *, label: str = "", experiment: str = "study", **train: Any) -> RunSpec:
        """A run that was planned and has no directory yet."""
        fields = {"model": "cnn", "dataset": "digits", "strategy": "eager", "hardware": "cpu:1", "cpus": 1, **train}
        config = TrainConfig.from_json(fields)
        spec = RunSpec(
            run_id=config.run_id(),
            label=label or f"{config.model} {config.strategy} seed={config.seed}",
            experiment=experiment,
            train=config,
            execution=Execution(),
            expect=Expectation(ranks=1, nodes=1, gpus_per_node=0, cpus_per_rank=1),
            target="local",
            data_root="",
        )
        self.specs[spec.run_id] = spec
        return spec

    def run(self, **spec: Any) -> RunDir:
        """A run with its ``spec.json``."""
        made = self.spec(**spec)
        directory = RunDir.of(self.runs, made.run_id)
        directory.write_spec(made)
        return directory

    def submit(self, run: RunDir, number: int = 1, **submission: Any) -> AttemptDir:
        """An attempt that was submitted."""
        attempt = run.attempt(number).create()
        values = {
            "token": f"token-{run.run_id}-{number}",
            "target": "local",
            "attempt": number,
            "job_id": f"{number}000",
            "submitted_at": f"2026-01-0{number}T00:00:00+00:00",
            "time_limit_s": 3600,
            "shape": {"nodes": 1},
        }
        write_json(attempt.submission, values | submission)
        return attempt

    def train(self, attempt: AttemptDir, epochs: range = range(1, 3), **event: Any) -> None:
        """The events of a job that started and ran these epochs."""
        log = EventLog(attempt.events())
        log.write("start", pid=1, host="node", rank=0)
        for epoch in epochs:
            log.write("epoch", **{"epoch": epoch, "steps": 12, "train_loss": 1 / epoch, "epoch_time_s": 1.5, **event})
        log.close()

    def finish(self, attempt: AttemptDir, **result: Any) -> None:
        """The result of a job that ended."""
        values: dict[str, Any] = {"state": State.SUCCEEDED.value, "test_accuracy": 0.9, "epoch_time_s": 1.5}
        values |= {"total_time_s": 10.0, "metrics": {"samples_per_s": 1000.0}, "peak_memory_bytes": 2**30}
        run_id = attempt.path.parent.parent.name
        attempt.write_result(RunResult(run_id=run_id, attempt=attempt.number, **{**values, **result}))

    def done(self, *, result: dict[str, Any] | None = None, **spec: Any) -> AttemptDir:
        """A run with one finished attempt."""
        attempt = self.submit(self.run(**spec))
        self.train(attempt)
        self.finish(attempt, **(result or {}))
        return attempt


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    """Files and databases wait for no disk here: that matters to a power cut, which no test makes."""
    really_connect = connect._connect_sqlite

    def quick(path: Path, *, read_only: bool) -> sqlite3.Connection:
        connection = really_connect(path, read_only=read_only)
        if not read_only:
            connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(connect, "_connect_sqlite", quick)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return Campaign(tmp_path / "runs")


@pytest.fixture(scope="session")
def postgresql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket folder of a PostgreSQL server of our own."""
    psycopg = pytest.importorskip("psycopg", reason='needs the extra "postgres"')
    programs = [shutil.which("initdb"), *map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    initdb = next((program for program in programs if program), None)
    if initdb is None:
        pytest.skip("PostgreSQL's server programs are not installed")
    folder = Path("/tmp") / f"pg-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    # The server refuses to run as root.
    owner = {"user": "nobody"} if os.geteuid() == 0 else {}
    if owner:
        shutil.chown(folder, "nobody")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    subprocess.run([initdb, "-D", folder / "data", "-A", "trust", "-N", "-U", "me"], check=True, **owner, **quiet)
    options = ["-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
    server = subprocess.Popen([Path(initdb).with_name("postgres"), "-D", folder / "data", *options], **owner, **quiet)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(host=str(folder), user="me", dbname="postgres").close()
                break
            except psycopg.OperationalError:  # its socket is there before it takes calls
                assert server.poll() is None and time.monotonic() < until, "the server did not start"
                time.sleep(0.05)
        yield str(folder)
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name of a database that does not exist yet or is empty, of both kinds."""
    if request.param == "sqlite":
        return str(tmp_path / "results.db")
    socket = request.getfixturevalue("postgresql_server")
    name = f"test_{uuid.uuid4().hex[:8]}"
    import psycopg

    with psycopg.connect(host=socket, user="me", dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://me@/{name}?host={socket}"
