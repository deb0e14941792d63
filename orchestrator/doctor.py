"""Findings about this machine, the target and the workspace: each one line with its remedy."""

from __future__ import annotations

import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from orchestrator import cluster as clusters
from orchestrator import experiment as experiments
from orchestrator import matrix, resources
from orchestrator.cli.workspace import Workspace
from orchestrator.errors import OrchestrateError
from orchestrator.interpreter import Packages
from orchestrator.profile import ClusterProfile
from workloads import registry

MINIMUM_FREE_BYTES = 1 << 30


class Verdict(StrEnum):
    """How a finding stands."""

    OK = "ok"
    NOTE = "note"
    """Usable, but worth knowing."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    subject: str
    verdict: Verdict
    what: str
    fix: str = ""


def examine(workspace: Workspace, *, local: bool, cluster: Path | None) -> Iterator[Finding]:
    """Look at everything a run needs, cheapest first; never raises for what it finds."""
    yield _python()
    yield from _runs_folder(workspace.runs)
    yield _database(workspace.database)
    try:
        profile = clusters.choose(local=local, named=cluster, cwd=Path.cwd(), hostname=socket.gethostname())
    except OrchestrateError as error:
        yield Finding("target", Verdict.FAIL, f"{error.where}: {error.what}" if error.where else error.what, error.hint)
        profile = None
    else:
        if profile is None:
            yield Finding("target", Verdict.OK, "this machine (local mode)")
            yield _machine()
        else:
            yield Finding("target", Verdict.OK, f"cluster {profile.name}")
            yield from _slurm_commands()
    packages = Packages.of(profile.python if profile else None)
    yield from _strategies(packages)
    yield from _experiment(workspace, profile)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", Verdict.OK, f"{version} at {sys.executable}")


def _runs_folder(runs: Path) -> Iterator[Finding]:
    folder = next(p for p in (runs, *runs.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding("runs", Verdict.FAIL, f"{folder}: not writable ({error.strerror})", "name another with --runs")
        return
    mode = folder.stat().st_mode
    if folder == runs and mode & stat.S_IWOTH:
        yield Finding(
            "runs", Verdict.FAIL, f"{runs} is writable for everybody, and jobs run pickles from it", f"chmod o-w {runs}"
        )
        return
    free = shutil.disk_usage(folder).free
    if free < MINIMUM_FREE_BYTES:
        yield Finding(
            "runs", Verdict.NOTE, f"{runs}: only {free / 2**20:.0f} MiB free", "free some, or name another disk"
        )
    else:
        yield Finding("runs", Verdict.OK, f"{runs}, {free / 2**30:.0f} GiB free")


def _database(database: str) -> Finding:
    if "://" not in database and not Path(database).exists():
        return Finding("database", Verdict.OK, f"{database} (made at the first submit)")
    from db.engine import open_store

    try:
        with open_store(database, read_only=True):
            return Finding("database", Verdict.OK, database)
    except OrchestrateError as error:
        return Finding("database", Verdict.FAIL, error.what, error.hint)


def _machine() -> Finding:
    from orchestrator.executors.machine import local_machine

    machine = local_machine()
    gpus = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
    what = f"{len(machine.cores)} CPU cores, {len(machine.gpus)} GPUs" + (f" ({gpus})" if gpus else "")
    return Finding("machine", Verdict.OK, what)


def _slurm_commands() -> Iterator[Finding]:
    for command in ("sbatch", "squeue", "scancel"):
        path = shutil.which(command)
        if path is None:
            yield Finding("slurm", Verdict.FAIL, f"no {command} on PATH", "run this on a login node of the cluster")
        else:
            yield Finding("slurm", Verdict.OK, path)


def _strategies(packages: Packages) -> Iterator[Finding]:
    if packages.versions is None:
        yield Finding("packages", Verdict.NOTE, f"{packages.python} could not be asked: {packages.problem}")
        return
    for name, strategy in registry.strategies().items():
        missing = packages.missing(strategy.packages)
        if missing:
            fix = f"{packages.python} -m pip install {' '.join(missing)}"
            yield Finding("strategy", Verdict.NOTE, f"{name}: not available, {', '.join(missing)} missing", fix)
        else:
            yield Finding("strategy", Verdict.OK, name)


def _experiment(workspace: Workspace, profile: ClusterProfile | None) -> Iterator[Finding]:
    path = workspace.experiment
    if not path.exists():
        yield Finding("experiment", Verdict.NOTE, f"no {path} here", "orchestrate init --study demo")
        return
    try:
        spec = experiments.load(path)
    except OrchestrateError as error:
        yield Finding("experiment", Verdict.FAIL, error.text())
        return
    yield Finding("experiment", Verdict.OK, f"{path}: {spec.name}")
    cells = matrix.expand(spec, default_cpus=resources.default_cpus(profile), data_root=workspace.data_root).cells
    for name in sorted({cell.train.dataset for cell in cells}):
        declaration = registry.find(registry.datasets(), name)
        problems = declaration.check(workspace.data_root, name) if declaration else []
        for problem in problems:
            yield Finding("data", Verdict.FAIL, f"{name}: {problem.where}: {problem.what}", problem.fix)
        if not problems:
            yield Finding("data", Verdict.OK, name)
