"""ExperimentSpec, target and store -> Plan: what is new, done or stale, what is excluded and why.

The plan file names the digests of all sources, so that ``submit`` knows whether it is still current. Nothing here
imports a framework or needs Slurm; the database is opened only where it exists.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.slurm.records import ClusterLimits, QueuePair
from orchestrator.cluster import cluster_file, job_script, resources
from orchestrator.config import experiment as experiments
from orchestrator.environment.interpreter import Packages
from orchestrator.environment.snapshot import code_digest
from orchestrator.errors import InputError
from orchestrator.planning import checks, matrix, plan_file
from orchestrator.planning.costs import gpu_hours
from orchestrator.planning.matrix import Excluded
from orchestrator.planning.plan import CellState, Plan, PlannedRun, Script
from orchestrator.plugins import Plugins
from orchestrator.rules.rule import Exclusion
from orchestrator.rules.target_rules import TargetRules
from orchestrator.workspace import Workspace
from workloads import registry
from workloads.contract import ResourceShape, State
from workloads.lazy import lazy_imports
from workloads.provenance import software

with lazy_imports(__name__):
    from db import connect, queries
    from orchestrator.backends.local import machine as local_machines
    from orchestrator.tracking import tracker

if TYPE_CHECKING:
    from db.queries import Duration, RunRecord
    from orchestrator.backends.local.machine import Machine
    from orchestrator.cluster.cluster_file import ClusterProfile

log = logging.getLogger(__name__)


def make_plan(
    workspace: Workspace,
    spec: experiments.ExperimentSpec,
    profile: ClusterProfile | None,
    machine: Machine | None,
    records: Mapping[str, RunRecord],
    durations: Sequence[Duration],
    packages: Packages,
    *,
    digests: Mapping[str, str] | None = None,
) -> Plan:
    """Compare the matrix with what the target can run and what the store has.

    Args:
        workspace: has the runs folder and the data sets.
        spec: the experiment.
        profile: the cluster; None plans for ``machine``.
        machine: this machine; may be None where there is a profile.
        records: the store's runs by run id.
        durations: measured runs, for the expected GPU-hours.
        packages: what the jobs' interpreter has installed.
        digests: of the sources, kept in the plan.
    """
    root, local, target = workspace.data_root, profile is None, profile.name if profile else resources.LOCAL

    @cache
    def dataset_digest(name: str) -> str:
        declaration = registry.find(registry.datasets(), name)
        assert declaration is not None, "the experiment file was checked"
        return declaration.digest(root, name)

    expanded = matrix.expand(spec, default_cpus=resources.default_cpus(profile), data_root=root)
    rules = TargetRules(profile, machine, packages, Plugins.installed())
    excluded, runs = list(expanded.excluded), []
    for cell in expanded.cells:
        shape = rules.place(cell.train, cell.execution)
        if isinstance(shape, Exclusion):
            fields = {name: value for name, value in cell.train.identity().items() if name != "v"}
            excluded.append(Excluded(fields=fields, rule=shape.rule, why=shape.why))
            continue
        state, why = CellState.NEW, ""
        if record := records.get(cell.run_id):
            code = code_digest(cell.train, workspace.runs)
            state, why = _cell_state(record, target, code, packages.digest, dataset_digest(cell.train.dataset))
        runs.append(PlannedRun(cell, shape, state, why))
    datasets = {run.cell.train.dataset for run in runs}
    plan = Plan(
        experiment=spec.name,
        target=target,
        digests=dict(digests or {}),
        runs=runs,
        excluded=excluded,
        merged=expanded.merged,
        gpu_hours=gpu_hours([run for run in runs if run.state in {CellState.NEW, CellState.FAILED}], durations),
        checks=[
            *checks.matrix_checks(expanded, runs),
            *checks.other_target_checks(runs, records, target),
            *checks.memory_checks(runs, machine),
            *checks.target_checks(profile, packages),
            *checks.dataset_checks(datasets, root, dataset_digest, local=local),
            *checks.weights_checks(runs, root, local=local),
        ],
        runs_folder=workspace.runs,
        data_root=root,
        dataset_digests={name: dataset_digest(name) for name in datasets},
        cluster=ClusterLimits.of(profile) if profile else None,
        packages=_installed_packages(runs, profile, packages),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if profile is not None:
        plan.scripts.extend(_scripts(plan.to_submit(stale=True), profile, workspace.runs))
    return plan


def current_plan(
    workspace: Workspace, *, local: bool, cluster: Path | None, sets: Sequence[str] = (), fresh: bool = False
) -> Plan:
    """Return the plan of a workspace: that of the plan file while its sources are unchanged, else a new one, saved.

    Args:
        workspace: has the experiment, the plan file, the store and the data sets.
        local: plan for this machine even where a cluster is configured.
        cluster: a cluster file or the name of a shipped profile.
        sets: ``--set`` texts.
        fresh: make a new plan even if nothing changed.
    """
    spec = experiments.load(workspace.experiment, sets)
    profile = cluster_file.choose(local=local, named=cluster, cwd=Path.cwd(), hostname=socket.gethostname())
    workspace = workspace.with_data(profile.data if profile else "")
    records, durations = _history(workspace)
    machine = local_machines.local_machine() if profile is None else None
    packages = Packages.of(profile.python if profile else None)
    digests = {
        "experiment": spec.digest,
        "target": profile.name if profile else resources.LOCAL,
        "cluster": profile.digest if profile else _digest(repr(machine)),
        "store": _digest(repr(sorted((r, str(records[r])) for r in records))),
        "code": software.code_digest(),
        "packages": packages.digest,
        "runs": str(workspace.runs),
        "data": str(workspace.data_root or ""),
    }
    if not fresh and (saved := _saved_plan(workspace.plan_file, digests)):
        return saved
    plan = replace(
        make_plan(workspace, spec, profile, machine, records, durations, packages, digests=digests),
        experiment_file=workspace.experiment.absolute(),
        sets=tuple(sets),
    )
    try:
        plan_file.save(plan, workspace.plan_file)
    except OSError as error:
        raise InputError(
            f"cannot write the plan file: {error.strerror}",
            where=str(workspace.plan_file),
            hint="run in a folder you may write to, or name another runs folder with --runs",
        ) from error
    return plan


def _saved_plan(path: Path, digests: Mapping[str, str]) -> Plan | None:
    """The plan of the plan file, where it is still current."""
    try:
        plan = plan_file.read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s; planning anew", error)
        return None
    # Data sets and weights that failed a check, and plug-ins, may have changed while no digest did.
    may_differ = any(check.blocking for check in plan.checks) or any(
        registry.foreign_packages(run.cell.train) for run in plan.runs
    )
    return plan if plan.digests == digests and not may_differ else None


def _history(workspace: Workspace) -> tuple[dict[str, RunRecord], list[Duration]]:
    """The store's runs and durations, after reading new results; nothing where no run was ever submitted."""
    if workspace.is_empty:
        return {}, []
    with connect.open_store(workspace.database) as store:
        tracker.refresh(store, workspace.runs)
        return queries.run_records(store), queries.durations(store)


def _cell_state(record: RunRecord, target: str, code: str, packages: str, data: str) -> tuple[CellState, str]:
    """The state of a run that the store has, and the reason; ``code``, ``packages``, ``data`` are today's digests."""
    state, attempt = State(record.state), f"attempt {record.attempt}"
    if state is State.PLANNED:
        return CellState.NEW, ""
    if state.live:
        return CellState.RUNNING, f"{attempt} is {state.value}"
    if state is not State.SUCCEEDED:
        return CellState.FAILED, f"{attempt} ended as {state.value}" + (f": {record.reason}" if record.reason else "")
    digests = {
        "code": (record.code_digest, code),
        "packages": (record.packages_digest, packages),
        "data set": (record.dataset_digest, data),
    }
    changed = [name for name, (then, now) in digests.items() if then and now and then != now]
    if changed:
        return CellState.STALE, f"{' and '.join(changed)} changed since {attempt}"
    why = attempt if record.target == target else f"{attempt} on {record.target}"
    if record.dataset_digest and not data:
        why += "; its data set is not prepared here, so whether it changed since is unknown"
    return CellState.DONE, why


def _installed_packages(
    runs: Sequence[PlannedRun], profile: ClusterProfile | None, packages: Packages
) -> dict[str, dict[str, str]]:
    """Versions of the measured packages by interpreter of these runs; ``packages`` are the default interpreter's."""
    pythons = {profile.interpreter(run.shape.node_kind) for run in runs} if profile else {packages.python}
    found = [packages if python == packages.python else Packages.of(python) for python in sorted(pythons)]
    return {one.python: software.measured_versions(one.versions or {}) for one in found}


def _scripts(runs: Sequence[PlannedRun], profile: ClusterProfile, runs_folder: Path) -> list[Script]:
    scripts = []
    names: Counter[str] = Counter()
    for shape in dict.fromkeys(run.shape for run in runs):
        names[shape.name] += 1
        name = shape.name if names[shape.name] == 1 else f"{shape.name}-{names[shape.name]}"
        text = job_script.render(shape, profile, runs=runs_folder, python=profile.python)
        scripts.append(Script(name, shape, text, queue_pairs(shape, profile)))
    return scripts


def queue_pairs(shape: ResourceShape, profile: ClusterProfile) -> tuple[QueuePair, ...]:
    """The queues for runs of a shape. Arguments of ``sbatch`` replace the script's partition or QOS but cannot remove
    it, so a queue that leaves one of them out is none where the script names it."""
    return tuple(
        QueuePair(queue.partition, queue.qos, queue.max_time_s)
        for queue in resources.queues(profile, shape)
        if (queue.partition or not shape.partition) and (queue.qos or not shape.qos)
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
