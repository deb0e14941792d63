"""Findings about this machine, the target and the workspace: each one line with its remedy."""

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

__all__ = ["Finding", "Level", "examine"]

MINIMUM_FREE_BYTES = 1 << 30


def examine(workspace: Workspace, *, local: bool, cluster: Path | None, probe_s: float = 0.0) -> Iterator[Finding]:
    """Look at everything a run needs, cheapest first; never raises for what it finds.

    Args:
        workspace: the files of this invocation.
        local: look at this machine whatever cluster there is.
        cluster: a cluster file or the name of a shipped profile.
        probe_s: how long to wait for probe jobs; 0 sends none.
    """
    yield _python()
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
        yield _machine()
    packages = Packages.of(profile.python if profile else None)
    yield from _strategies(packages)
    if packages.versions is not None:
        problem = interpreter.find_missing_bytecode(packages.python, _variables(profile))
        if problem is not None:
            yield note("start-up", *problem)
    spec, found = _experiment(workspace)
    yield from found
    plan = None
    if spec is not None and chosen:
        plan = _plan(workspace, spec, profile, packages)
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
    hosts = (socket.gethostname(), socket.getfqdn())
    worst = False
    for finding in site.examine(profile, plan, _run, user=getpass.getuser(), hosts=hosts):
        worst = worst or finding.level is Level.FAIL
        yield finding
    if not probe_s:
        yield note("probe", "what compute nodes see was not looked at", "orchestrate doctor --probe sends short jobs")
    elif worst:
        yield note("probe", "no probe was sent, because of what must be fixed first", "then orchestrate doctor --probe")
    else:
        from orchestrator.doctor import probing

        try:
            yield from probing.probe(workspace, profile, plan, packages, patience_s=probe_s)
        except OrchestrateError as error:
            yield fail("probe", str(error), error.hint)


def _run(*argv: str) -> tuple[bool, str]:
    answer = commands.run(*argv)
    return answer.ok, answer.stdout if answer.ok else answer.text


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", Level.OK, f"{version} at {sys.executable}")


def _runs_folder(runs: Path, *, shared: bool) -> Iterator[Finding]:
    folder = next(p for p in (runs, *runs.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield fail("runs", f"{folder}: not writable ({error.strerror})", "name another with --runs")
        return
    mode = folder.stat().st_mode
    if folder == runs and mode & stat.S_IWOTH:
        yield Finding(
            "runs", Level.FAIL, f"{runs} is writable for everybody, and jobs run pickles from it", f"chmod o-w {runs}"
        )
        return
    free = shutil.disk_usage(folder).free
    if free < MINIMUM_FREE_BYTES:
        yield note("runs", f"{runs}: only {free / 2**20:.0f} MiB free", "free some, or name another disk")
    else:
        yield ok("runs", f"{runs}, {free / 2**30:.0f} GiB free")
    if shared and is_local(folder):
        what = f"{folder} is on a disk of this machine, which compute nodes may not see"
        yield note("runs", what, "orchestrate doctor --probe finds out; --runs names a folder on a shared disk")


def _database(database: str) -> Finding:
    path = Path(database)
    if is_url(database):
        where = "server"
    elif is_local(next(p for p in (path, *path.parents) if p.exists())):
        where = "local disk"
    else:
        problem = lock_problem(next(p for p in path.parents if p.exists()))
        if problem:
            fix = "name a file on a local disk with --db, or a PostgreSQL server; orchestrate db rebuild fills it"
            return fail("database", f"{database}: files cannot be locked there ({problem})", fix)
        where = "network disk: commands that write at the same time take turns"
    if "://" not in database and not path.exists():
        return ok("database", f"{database} (made at the first submit; {where})")
    from db.connect import open_store

    try:
        with open_store(database, read_only=True):
            return ok("database", f"{database} ({where})")
    except OrchestrateError as error:
        return fail("database", error.what, error.hint)


def _machine() -> Finding:
    from orchestrator.backends.local.machine import local_machine

    machine = local_machine()
    gpus = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
    what = f"{counted(len(machine.cores), 'CPU core')}, {counted(len(machine.gpus), 'GPU')}" + (
        f" ({gpus})" if gpus else ""
    )
    return Finding("machine", Level.OK, what)


def _variables(profile: ClusterProfile | None) -> dict[str, str]:
    """What a job finds set: on this machine all that is set here, on a cluster what its file says."""
    if profile is None:
        return dict(os.environ)
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | dict(profile.env)


def _strategies(packages: Packages) -> Iterator[Finding]:
    if packages.versions is None:
        yield Finding("packages", Level.NOTE, f"{packages.python} could not be asked: {packages.problem}")
        return
    for name, strategy in registry.strategies().items():
        missing = packages.missing(strategy.packages)
        if missing:
            what = f"{name}: not available, {', '.join(missing)} missing"
            yield Finding("strategy", Level.NOTE, what, packages.install_command(missing))
        else:
            yield Finding("strategy", Level.OK, name)


def _experiment(workspace: Workspace) -> tuple[experiments.ExperimentSpec | None, list[Finding]]:
    path = workspace.experiment
    if not path.exists():
        return None, [note("experiment", f"no {path} here", "orchestrate init --study demo")]
    try:
        spec = experiments.load(path)
    except OrchestrateError as error:
        return None, [fail("experiment", error.text())]
    return spec, [ok("experiment", f"{path}: {spec.name}")]


def _plan(
    workspace: Workspace, spec: experiments.ExperimentSpec, profile: ClusterProfile | None, packages: Packages
) -> Plan:
    """All of the experiment as if nothing had been run; nothing is written."""
    machine = None
    if profile is None:
        from orchestrator.backends.local.machine import local_machine

        machine = local_machine()
    return planner.make_plan(workspace, spec, profile, machine, {}, [], packages)


def _data(workspace: Workspace, plan: Plan) -> Iterator[Finding]:
    for name in sorted({run.cell.train.dataset for run in plan.runs}):
        declaration = registry.find(registry.datasets(), name)
        assert declaration is not None, name
        if unseen := checks.unseen_reason(declaration, workspace.data_root, local=plan.cluster is None):
            yield note("data", f"{name}: {unseen}", "orchestrate doctor --probe looks from a node")
            continue
        problems = declaration.check(workspace.data_root, name)
        for problem in problems:
            yield fail("data", f"{name}: {problem.where}: {problem.what}", problem.fix)
        if not problems:
            yield ok("data", name)
    for rule, why in dict.fromkeys((excluded.rule, excluded.why) for excluded in plan.excluded):
        yield note("plan", f"cells are excluded by {rule}: {why}", "orchestrate plan shows which")
