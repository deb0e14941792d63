"""A laboratory for local mode: its own runs folders, lease domain, fake GPUs and tiny jobs instead of training.

Everything started below it carries the domain in its environment, and is ended by pid when the test is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.base import Request, Status
from orchestrator.backends.leases import DOMAIN_VARIABLE
from orchestrator.backends.local.executor import LocalExecutor
from orchestrator.submission import submitter
from orchestrator.workspace import Workspace
from workloads.contract import Execution, Expectation, Hardware, ResourceShape, RunSpec, Submission, TrainConfig
from workloads.files.json_file import write_json
from workloads.files.run_dir import RunDir

UUIDS = [f"GPU-{n}{n}{n}{n}0000-0000-4000-8000-00000000000{n}" for n in range(4)]

JOBS = '''
"""What runs instead of training; told what to do by the run's label."""
import json, os, signal, sys, time
from pathlib import Path
from workloads.contract import RunResult
from workloads.files.event_log import EventLog
from workloads.files.json_file import write_json
from workloads.files.run_dir import RunDir

def job(run_dir, attempt_number):
    run = RunDir(Path(run_dir))
    attempt = run.attempt(attempt_number)
    rank = int(os.environ["SUBMITIT_LOCAL_GLOBALID"])
    label = run.read_spec().label
    todo = json.loads(label if label.startswith("{") else os.environ.get("ORCHESTRATE_LAB_TODO", "{}"))
    with open(run.path.parent.parent / "starts.txt", "a") as stream:
        stream.write(f"{run.run_id} {attempt_number} {rank}\\n")
    write_json(attempt.path / f"seen.{rank}.json", {
        "pid": os.getpid(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "order": os.environ["CUDA_DEVICE_ORDER"],
        "cores": sorted(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"], "time": time.time(),
        "stdin": sys.stdin.read(), "session": os.getsid(0), "environ": dict(os.environ),
        "db": __import__("db").__file__,
    })
    print(f"rank {rank} says hello", flush=True)
    print(f"rank {rank} complains", file=sys.stderr, flush=True)
    if todo.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if todo.get("child"):
        child = os.fork()
        if child == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        write_json(attempt.path / "child.json", child)
    if todo.get("warned"):
        signal.signal(signal.SIGUSR2, lambda *a: (attempt.path / f"warned.{rank}").write_text("yes"))
    if "heeds" in todo:
        signal.signal(signal.SIGUSR2, (lambda *a: os._exit(75)) if todo["heeds"] == rank else signal.SIG_IGN)
    if todo.get("fail") == rank:
        log = EventLog(attempt.events(rank))
        log.write("error", failure_class="device_memory", message="no room on the device", rank=rank)
        raise RuntimeError("no room on the device")
    if todo.get("exit") == rank or todo.get("bad_seed") == run.read_spec().train.seed:
        os._exit(todo.get("code", 3))
    until = time.time() + todo.get("sleep", 0.0)
    while time.time() < until:
        if todo.get("progress"):
            write_json(attempt.progress(rank), {"rank": rank, "time": time.time(), "phase": "train", "epoch": 1,
                "epochs": 3, "step": 5, "steps": 9, "samples_per_s": 123.0})
        if todo.get("behind"):
            now = time.time() - todo["behind"]
            os.utime(attempt.progress(rank), (now, now))
        time.sleep(0.05)
    if todo.get("hang") == rank:
        time.sleep(600)
    if rank == 0 and not todo.get("silent"):
        attempt.write_result(RunResult(run_id=run.run_id, attempt=attempt_number, state="succeeded"))
'''


COMMAND = """
import sys
from orchestrator.backends.local.executor import LocalExecutor
LocalExecutor.__init__.__kwdefaults__["job"] = "lab_jobs:job"
{patch}
from orchestrator.cli import run
sys.exit(run(sys.argv[1:]))
"""
"""``orchestrate`` with the jobs of the lab instead of training, and a patch of the test's."""


class Lab:
    """One workspace of the test, with helpers that speak to it as commands do."""

    def __init__(self, root: Path, domain: str) -> None:
        self.root = root
        self.domain = domain
        self.runs = root / "runs"
        self.executor = LocalExecutor(self.runs, job="lab_jobs:job")
        self._count = 0

    def spec(
        self,
        *,
        ranks: int = 1,
        cpus_per_rank: int = 1,
        gpus: int = 0,
        time_limit_s: int = 60,
        hang_timeout_s: int = 600,
        **todo: Any,
    ) -> RunSpec:
        """A run whose label tells the job what to do."""
        self._count += 1
        hardware = Hardware("gpu", gpus) if gpus else Hardware("cpu", ranks)
        # The name makes ids differ between workspaces.
        train = TrainConfig(
            model=f"m{self._count}-{self.root.name}",
            dataset="synthetic",
            strategy="ddp",
            hardware=hardware,
            cpus=ranks * cpus_per_rank,
        )
        return RunSpec(
            run_id=train.run_id(),
            label=json.dumps(todo),
            experiment="lab",
            train=train,
            execution=Execution(time_limit_s=time_limit_s, hang_timeout_s=hang_timeout_s),
            expect=Expectation(ranks=ranks, nodes=1, gpus_per_node=gpus, cpus_per_rank=cpus_per_rank),
            target="local",
            data_root="",
        )

    def request(self, spec: RunSpec, attempt: int = 1) -> Request:
        """A run directory made ready, as the submitter does."""
        run = RunDir.of(self.runs, spec.run_id)
        run.write_spec(spec)
        directory = run.attempt(attempt).create()
        token = f"{spec.run_id[:12]}{attempt:04d}"
        write_json(directory.submission, {"token": token, "target": "local", "attempt": attempt, "job_id": None})
        return Request(self.runs, spec, Submission(token=token, target="local", attempt=attempt))

    def send(self, *specs: RunSpec) -> list[Request]:
        requests = [self.request(spec) for spec in specs]
        self.executor.submit(requests)
        self.executor.ensure_running()
        return requests

    def command(self, *arguments: str, patch: str = "", **options: Any) -> subprocess.Popen[str]:
        """``orchestrate ARGUMENTS`` in this workspace, started and not waited for."""
        self.root.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(patch=patch), *arguments],
            **{
                "cwd": self.root,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )

    def run(self, *arguments: str, patch: str = "") -> tuple[int, str, str]:
        """Exit code, standard output and error of ``orchestrate ARGUMENTS``."""
        process = self.command(*arguments, patch=patch)
        stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout, stderr

    def workspace(self) -> Workspace:
        self.root.mkdir(exist_ok=True)
        # What the defaults are in that folder, whatever its name.
        return Workspace(runs=self.runs, database=str(self.root / "results.db"), data_root=None)

    def submit(self, *specs: RunSpec) -> list[Request]:
        """Send runs through the store, as the verbs do."""
        done = submitter.submit_runs(self.workspace(), [(spec, ResourceShape()) for spec in specs], "local")
        by_id = {spec.run_id: spec for spec in specs}
        return [
            Request(self.runs, by_id[s.run_id], Submission(token=s.token, target="local", attempt=s.attempt))
            for s in done.submitted
        ]

    def starts(self) -> Counter[str]:
        """How often each run was started (by its rank 0)."""
        path = self.runs / "starts.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[0] for line in lines if line.endswith(" 0"))

    def queue_pid(self) -> int:
        """Process of this workspace's queue."""
        mark = f"orchestrator.backends.local.queue\0{self.runs}\0".encode(errors="surrogateescape")
        for pid in lab_processes(self.domain):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError("no queue process")

    def wait_exit(self, *requests: Request, within_s: float = 30.0) -> list[Status]:
        """Verdicts of attempts, waited for."""

        def all_ended() -> bool:
            return all(Status.read_exit(d.directory) is not None for d in requests)

        wait_until(all_ended, within_s, "attempts end")
        return [exit_ for d in requests if (exit_ := Status.read_exit(d.directory)) is not None]


def wait_until(condition: Callable[[], Any], within_s: float = 20.0, what: str = "") -> Any:
    """The first true answer of the condition."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {within_s} s: {what or condition}")


def lab_processes(domain: str) -> list[int]:
    """Everything that was started with this lease domain, except ourselves."""
    mark = f"{DOMAIN_VARIABLE}={domain}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def seen(request: Request, rank: int = 0) -> dict[str, Any]:
    """What a rank saw of its world, waited for."""
    path = request.directory.path / f"seen.{rank}.json"
    wait_until(path.exists, what=f"rank {rank} starts")
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


@pytest.fixture
def domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Leases of this test only, four fake GPUs, the jobs importable."""
    name = str(tmp_path)
    monkeypatch.setenv(DOMAIN_VARIABLE, name)
    for variable in ("CUDA_VISIBLE_DEVICES", "ORCHESTRATE_RUNS", "ORCHESTRATE_DB", "ORCHESTRATE_CLUSTER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(LocalExecutor.__init__.__kwdefaults__, "job", "lab_jobs:job")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "lab_jobs.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    listing = "".join(f"{n}, {uuid}, NVIDIA A100-SXM4-80GB, 81920\n" for n, uuid in enumerate(UUIDS))
    (bin_ / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{listing}END\n")
    (bin_ / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    yield name
    while left := lab_processes(name):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@pytest.fixture
def lab(tmp_path: Path, domain: str) -> Lab:
    return Lab(tmp_path / "w1", domain)


@pytest.fixture
def other(tmp_path: Path, domain: str) -> Lab:
    """A second workspace on the same machine."""
    return Lab(tmp_path / "w2", domain)
