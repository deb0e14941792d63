"""A study on a throw-away cluster: its folder, and the command line as somebody at a login node types it."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import cli
from orchestrator.environment.interpreter import Packages
from tests.slurm.lab import Lab

for _module in ("verbs.plan", "verbs.status", "verbs.results", "log_files"):
    importlib.import_module(f"orchestrator.cli.{_module}")
for _module in (
    "alembic.command",
    "db.ingest",
    "db.queries",
    "submitit",
    "typer._adapters",
    "orchestrator.submission.submitter",
):
    importlib.import_module(_module)

ROOT = Path(__file__).parents[2]

_PACKAGES = functools.cache(Packages.of)

CLUSTER = """
[cluster.lab]
poll_seconds = 1
{top}
[cluster.lab.gpu.a100]
type = "a100"
node_gpus = 2
cpus_per_gpu = 1
mem_per_gpu = "200M"
queue = [{{ partition = "{partition}", max_time = "4h" }}]
[cluster.lab.gpu.a30]
type = "a30"
node_gpus = 2
cpus_per_gpu = 1
mem_per_gpu = "200M"
queue = [{{ partition = "{partition}", max_time = "4h" }}]
"""
DEFAULTS = """
name = "check"
[defaults]
model = "cnn"
dataset = "digits"
strategy = "probe"
epochs = 3
time_limit = "10m"
"""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command printed, and its exit code."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass
class Study:
    """Commands run in forks of the test process: nothing is imported again, and any of them may be killed."""

    lab: Lab
    folder: Path
    path: list[Path] = field(default_factory=list)
    """Folders that come first in PATH, with fake commands."""
    user: str = ""
    """The user who runs commands; empty for the user of the tests."""
    python: Path = Path(sys.executable)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def write(self, matrix: str, *, top: str = "", partition: str = "htc", defaults: str = DEFAULTS) -> None:
        """Write the experiment and the cluster file."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "experiment.toml").write_text(defaults + matrix)
        top = f"python = {json.dumps(str(self.python))}\n{self.lab.slurm_bin}{top}"
        (self.folder / "cluster.toml").write_text(CLUSTER.format(top=top, partition=partition))

    def run(self, *argv: str, expect: int | None = 0, before: Callable[[], None] | None = None) -> Done:
        """Run ``orchestrate ...``; fails the test if the exit code differs from the expected one."""
        done = self._in_user(argv) if self.user else self._in_fork(argv, before)
        assert expect is None or done.exit_code == expect, f"{argv}: exit {done.exit_code}: {done.stdout}{done.stderr}"
        return done

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join([*map(str, self.path), self.lab.env["PATH"]])
        return self.lab.env | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}

    def _in_user(self, argv: tuple[str, ...]) -> Done:
        env = {k: v for k, v in self.env.items() if k != "HOME"} | {"HOME": str(self.folder), "USER": self.user}
        command = [str(self.python), "-m", "orchestrator", *argv]
        done = subprocess.run(
            command, cwd=self.folder, env=env, user=self.user, capture_output=True, text=True, timeout=120, check=False
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def _in_fork(self, argv: tuple[str, ...], before: Callable[[], None] | None) -> Done:
        packages = _PACKAGES(str(self.python))
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            pid = os.fork()
            if pid == 0:
                self._child(argv, before, packages, stdout.fileno(), stderr.fileno())
            _, status = os.waitpid(pid, 0)
            texts = []
            for stream in (stdout, stderr):
                stream.seek(0)
                texts.append(stream.read())
        return Done(os.waitstatus_to_exitcode(status), *texts)

    def _child(
        self, argv: tuple[str, ...], before: Callable[[], None] | None, packages: Packages, stdout: int, stderr: int
    ) -> None:
        code = 70
        try:
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            os.chdir(self.folder)
            env = self.env
            os.environ.clear()
            os.environ.update(env)
            # Slow and without effect here: listing an interpreter's packages, waiting for the disk.
            Packages.of = lambda python: packages  # type: ignore[method-assign, assignment]
            os.fsync = lambda descriptor: None  # type: ignore[assignment]
            logging.getLogger().handlers.clear()
            if before is not None:
                before()
            code = cli.run(list(argv))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def status(self) -> list[dict[str, Any]]:
        """Return the rows of ``status``, without recovery."""
        return list(json.loads(self.run("status", "--json", "--no-recover").stdout))

    def states(self) -> list[str]:
        return [row["state"] for row in self.status()]

    def until(self, what: Callable[[list[dict[str, Any]]], bool], timeout_s: float = 60) -> list[dict[str, Any]]:
        """Run ``status`` until a condition holds for its rows; return them."""
        deadline = time.monotonic() + timeout_s
        while not what(rows := self.status()):
            assert time.monotonic() < deadline, [
                {k: r[k] for k in ("label", "state", "reason", "message")} for r in rows
            ]
            time.sleep(0.3)
        return rows

    def until_ended(self, timeout_s: float = 90) -> list[dict[str, Any]]:
        live = {"submitting", "pending", "running"}
        return self.until(lambda rows: bool(rows) and not any(row["state"] in live for row in rows), timeout_s)

    def queued(self) -> list[str]:
        """Return the tasks that Slurm has for this study, except cancelled ones, as ``array_index``."""
        names = [path.name for path in (self.runs / "jobs").glob("orc-*")]
        if not names:
            return []
        listed = self.lab.command(
            *("env", "SLURM_BITSTR_LEN=0", "squeue", "-h", "--array", "--states=all", f"--name={','.join(names)}"),
            "--format=%i %T",
        )
        return sorted(task for task, state in map(str.split, listed.splitlines()) if state != "CANCELLED")

    def forget(self) -> None:
        """Cancel its jobs."""
        if ids := {task.partition("_")[0] for task in self.queued()}:
            self.lab.command("scancel", *ids)

    def log(self, name: str) -> str:
        return self.run("logs", name, "--all").stdout


def job_ids(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(str(row["job_id"]) for row in rows)


def num_submitted(done: Done) -> int:
    match = re.match(r"(\d+) runs? submitted", done.stdout)
    assert match, done
    return int(match[1])
