"""Findings about this machine, the target and the workspace.

psutil is not used: of what is checked here it offers free disk space and CPU affinity, which the standard library has,
but not GPUs, file locks, or whether a disk is local.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from db.filesystem import is_local, is_url, lock_problem
from orchestrator import own_packages
from orchestrator.backends.slurm import commands
from orchestrator.cluster import cluster_file
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.config import experiment as experiments
from orchestrator.doctor import site
from orchestrator.doctor.findings import Finding, Level, fail, note, ok
from orchestrator.environment import interpreter
from orchestrator.environment.interpreter import Packages
from orchestrator.errors import OrchestrateError
from orchestrator.planning import checks, planner
from orchestrator.planning.plan import Plan
from orchestrator.units import counted
from orchestrator.workspace import Workspace
from workloads import registry
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect
    from orchestrator.backends.local import machine as local_devices
    from orchestrator.doctor import probing

__all__ = ["Finding", "Level", "examine"]

MIN_FREE_BYTES = 1 << 30


def examine(workspace: Workspace, *, local: bool, cluster: Path | None, probe_s: float = 0.0) -> Iterator[Finding]:
    """Check everything a run needs, cheapest first; wait ``probe_s`` seconds for probe jobs, 0 submits none.

    ``local`` checks this machine even if there is a cluster; ``cluster`` is a file or the name of a shipped profile.
    """
    yield ok("python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")
    for name, path in own_packages.shadowing():
        what = f"{path} has the name of orchestrate's package {name}, which is used instead"
        yield note("python", what, f"rename it if a plug-in imports it as {name}")
    try:
        profile = cluster_file.choose(local=local, named=cluster, cwd=Path.cwd(), hostname=socket.gethostname())
        chosen = True
    except OrchestrateError as error:
        yield fail("target", f"{error.where}: {error.what}" if error.where else error.what, error.hint)
        profile, chosen = None, False
    workspace = workspace.with_data(profile.data if profile else "")
    yield from _runs_folder(workspace.runs, shared=profile is not None and not probe_s)
    yield _database(workspace.database)
    if chosen and profile is None:
        yield ok("target", "this machine (local mode)")
        devices = local_devices.local_machine()
        names = ", ".join(dict.fromkeys(gpu.name for gpu in devices.gpus))
        counts = f"{counted(len(devices.cores), 'CPU core')}, {counted(len(devices.gpus), 'GPU')}"
        yield ok("machine", f"{counts} ({names})" if names else counts)
    packages = Packages.of(profile.python if profile else None)
    yield from _strategies(packages)
    if packages.versions is not None:
        env = dict(os.environ)
        if profile is not None:  # jobs have the environment of the cluster file instead
            env = {k: v for k, v in env.items() if not k.startswith("PYTHON")} | dict(profile.env)
        if problem := interpreter.find_missing_bytecode(packages.python, env):
            yield note("start-up", *problem)
    spec, found = _experiment(workspace.experiment)
    yield found
    plan = None
    if spec is not None and chosen:
        # The plan of the whole experiment, as if nothing had run; nothing is written.
        machine = local_devices.local_machine() if profile is None else None
        plan = planner.make_plan(workspace, spec, profile, machine, {}, [], packages)
        yield from _data(workspace, plan)
    if profile is not None:
        yield ok("target", f"cluster {profile.name}")
        yield from _slurm(workspace, profile, plan, packages, probe_s)


def _slurm(
    workspace: Workspace, profile: ClusterProfile, plan: Plan | None, packages: Packages, probe_s: float
) -> Iterator[Finding]:
    yield from site.profile_findings(profile)
    missing = [command for command in ("sbatch", "squeue", "scancel") if shutil.which(command) is None]
    for command in missing:
        yield fail("slurm", f"no {command} on PATH", "run this on a login node of the cluster")
    if missing:
        return
    failed = False
    hosts = (socket.gethostname(), socket.getfqdn())
    for finding in site.examine(profile, plan, _run, user=getpass.getuser(), hosts=hosts):
        failed = failed or finding.level is Level.FAIL
        yield finding
    if not probe_s:
        yield note("probe", "compute nodes were not checked", "orchestrate doctor --probe submits short jobs")
    elif failed:
        yield note("probe", "no probe was submitted: fix the failures first", "then orchestrate doctor --probe")
    else:
        try:
            yield from probing.probe(workspace, profile, plan, packages, patience_s=probe_s)
        except OrchestrateError as error:
            yield fail("probe", str(error), error.hint)


def _run(*argv: str) -> tuple[bool, str]:
    answer = commands.run(*argv)
    return answer.ok, answer.stdout if answer.ok else answer.text


def _runs_folder(runs: Path, *, shared: bool) -> Iterator[Finding]:
    folder = _existing(runs)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield fail("runs", f"{folder}: not writable ({error.strerror})", "name another with --runs")
        return
    if folder == runs and folder.stat().st_mode & stat.S_IWOTH:
        # A pickle can run any code: whoever can write one here runs it as you (documentation of pickle).
        what = f"{runs} is writable for everybody, and jobs run pickles from it"
        yield fail("runs", what, f"chmod o-w {runs}")
        return
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < MIN_FREE_BYTES:
        what = f"{runs}: only {free_bytes / 2**20:.0f} MiB free"
        yield note("runs", what, "free some space, or name another disk with --runs")
    else:
        yield ok("runs", f"{runs}, {free_bytes / 2**30:.0f} GiB free")
    if shared and is_local(folder):
        what = f"{folder} is on a disk of this machine, which compute nodes may not see"
        yield note("runs", what, "orchestrate doctor --probe finds out; --runs names a folder on a shared disk")


def _existing(path: Path) -> Path:
    """Return the path, or the first folder above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def _database(database: str) -> Finding:
    path = Path(database)
    if is_url(database):
        where = "server"
    elif is_local(_existing(path)):
        where = "local disk"
    elif problem := lock_problem(_existing(path.parent)):
        fix = "name a file on a local disk with --db, or a PostgreSQL server; orchestrate db rebuild fills it"
        return fail("database", f"{database}: files cannot be locked there ({problem})", fix)
    else:
        where = "network disk: commands that write at the same time take turns"
    if not is_url(database) and not path.exists():
        return ok("database", f"{database} (created by the first submit; {where})")
    try:
        with connect.open_store(database, read_only=True):
            return ok("database", f"{database} ({where})")
    except OrchestrateError as error:
        return fail("database", error.what, error.hint)


def _strategies(packages: Packages) -> Iterator[Finding]:
    if packages.versions is None:
        yield note("packages", f"{packages.python} could not be queried: {packages.problem}")
        return
    for name, strategy in registry.strategies().items():
        if missing := packages.missing(strategy.packages):
            what = f"{name}: not available, {', '.join(missing)} missing"
            yield note("strategy", what, packages.install_command(missing))
        else:
            yield ok("strategy", name)


def _experiment(path: Path) -> tuple[experiments.ExperimentSpec | None, Finding]:
    if not path.exists():
        return None, note("experiment", f"no {path} here", "orchestrate init --study demo")
    try:
        spec = experiments.load(path)
    except OrchestrateError as error:
        return None, fail("experiment", error.text())
    return spec, ok("experiment", f"{path}: {spec.name}")


def _data(workspace: Workspace, plan: Plan) -> Iterator[Finding]:
    for name in sorted({run.cell.train.dataset for run in plan.runs}):
        declaration = registry.find(registry.datasets(), name)
        assert declaration is not None, name
        if declaration.needs_root and (unseen := checks.unseen_reason(workspace.data_root, local=plan.cluster is None)):
            yield note("data", f"{name}: {unseen}", "orchestrate doctor --probe checks it from a node")
            continue
        problems = declaration.check(workspace.data_root, name)
        for problem in problems:
            yield fail("data", f"{name}: {problem.where}: {problem.what}", problem.fix)
        if not problems:
            yield ok("data", name)
    for rule, why in dict.fromkeys((excluded.rule, excluded.why) for excluded in plan.excluded):
        yield note("plan", f"cells are excluded by {rule}: {why}", "orchestrate plan shows which")
