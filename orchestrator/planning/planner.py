"""RunSpecs + shapes + store -> Plan: what would run, what is done, what is excluded and why. Writes one plan file.

A plan is made from digests of its sources, so that ``submit`` can tell whether it still holds (:func:`current_plan`).
Imports no framework and needs no ``srun``; the database is opened only where it exists.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.backends.slurm.records import ClusterLimits, QueuePair
from orchestrator.cluster import cluster_file, job_script, resources
from orchestrator.config import experiment as experiments
from orchestrator.environment.interpreter import Packages
from orchestrator.environment.snapshot import code_digest
from orchestrator.errors import InputError
from orchestrator.planning import matrix, memory_fit, plan_file
from orchestrator.planning.costs import gpu_hours
from orchestrator.planning.matrix import Excluded, Matrix
from orchestrator.planning.plan import CellState, Check, Plan, PlannedRun, Script
from orchestrator.plugins import Plugins
from orchestrator.rules.rule import Exclusion
from orchestrator.rules.target_rules import TargetRules
from orchestrator.units import counted
from orchestrator.workspace import Workspace
from workloads import registry
from workloads.contract import ResourceShape, State, TrainConfig
from workloads.provenance import software

if TYPE_CHECKING:
    from db.queries import Duration, RunRecord
    from orchestrator.backends.local.machine import Machine
    from orchestrator.cluster.cluster_file import ClusterProfile
    from workloads.registry import DatasetDeclaration

log = logging.getLogger(__name__)

PLAN_VERSION = 2


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
    """Put matrix, target and store together.

    Args:
        workspace: where the runs folder and the data sets are.
        spec: the experiment.
        profile: the cluster; None plans for this machine.
        machine: this machine; needed when ``profile`` is None.
        records: what the store knows of each run, by run id.
        durations: measured runs, for the expected GPU-hours.
        packages: what the job's interpreter has installed.
        digests: names of the sources, kept in the plan.
    """
    expanded = matrix.expand(spec, default_cpus=resources.default_cpus(profile), data_root=workspace.data_root)
    target_rules = TargetRules(profile, machine, packages, Plugins.installed())
    data = _DataSets(workspace.data_root, local=profile is None)
    excluded = list(expanded.excluded)
    target = profile.name if profile else "local"
    runs = []
    for cell in expanded.cells:
        shape = target_rules.place(cell.train, cell.execution)
        if isinstance(shape, Exclusion):
            excluded.append(Excluded(fields=_fields(cell.train), rule=shape.rule, why=shape.why))
            continue
        record = records.get(cell.run_id)
        if record is None:
            runs.append(PlannedRun(cell, shape, CellState.NEW))
        else:
            code = code_digest(cell.train, workspace.runs)
            action, why = _cell_state(record, target, code, packages.digest, data.digest(cell.train.dataset))
            runs.append(PlannedRun(cell, shape, action, why))
    plan = Plan(
        experiment=spec.name,
        target=target,
        digests=dict(digests or {}),
        runs=runs,
        excluded=excluded,
        merged=expanded.merged,
        gpu_hours=gpu_hours([run for run in runs if run.state in {CellState.NEW, CellState.FAILED}], durations),
        checks=[
            *_remarks(expanded, runs),
            *_elsewhere(runs, records, target),
            *memory_fit.memory_checks(runs, machine),
            *_account(profile),
            *_unknown(packages),
            *data.findings({run.cell.train.dataset for run in runs}),
            *_weights(runs, workspace.data_root, local=profile is None),
        ],
        runs_folder=workspace.runs,
        data_root=workspace.data_root,
        dataset_digests={name: data.digest(name) for name in {run.cell.train.dataset for run in runs}},
        cluster=ClusterLimits.of(profile) if profile is not None else None,
        packages=_packages(runs, profile, packages),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if profile is not None:
        plan.scripts.extend(_scripts(plan.to_submit(stale=True), profile, workspace.runs))
    return plan


def current_plan(
    workspace: Workspace, *, local: bool, cluster: Path | None, sets: Sequence[str] = (), fresh: bool = False
) -> Plan:
    """The plan of a workspace: the plan file where all its sources are unchanged, else a new one, saved.

    Args:
        workspace: the files of this invocation.
        local: run on this machine whatever cluster there is.
        cluster: a cluster file or the name of a shipped profile.
        sets: ``--set`` texts.
        fresh: plan anew even if nothing changed.

    Raises:
        InputError: the experiment or cluster file has mistakes, or no target can be chosen.
    """
    spec = experiments.load(workspace.experiment, sets)
    profile = cluster_file.choose(local=local, named=cluster, cwd=Path.cwd(), hostname=socket.gethostname())
    workspace = workspace.with_data(profile.data if profile else "")
    records, durations = _history(workspace)
    machine = None
    if profile is None:
        from orchestrator.backends.local.machine import local_machine

        machine = local_machine()
    packages = Packages.of(profile.python if profile else None)
    digests = {
        "experiment": spec.digest,
        "target": profile.name if profile else "local",
        "cluster": profile.digest if profile else _digest(repr(machine)),
        "store": _digest(repr(sorted((r, str(records[r])) for r in records))),
        "code": software.code_digest(),
        "packages": packages.digest,
        "runs": str(workspace.runs),
        "data": str(workspace.data_root or ""),
    }
    if not fresh:
        try:
            plan = plan_file.read(workspace.plan_file)
        except FileNotFoundError:
            plan = None
        except (OSError, ValueError) as error:
            log.warning("%s; planning anew", error)
            plan = None
        if plan is not None and plan.digests == digests and not _may_be_outdated(plan):
            return plan
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


def _may_be_outdated(plan: Plan) -> bool:
    """Data sets that were found wanting, and plug-ins, may have changed without any of a plan's sources changing."""
    plugins = any(registry.foreign_packages(run.cell.train) for run in plan.runs)
    return plugins or any(check.blocking for check in plan.checks)


def _history(workspace: Workspace) -> tuple[dict[str, RunRecord], list[Duration]]:
    """What the store knows, new results read in first; nothing where no run was ever sent."""
    if workspace.is_empty:
        return {}, []
    from db import queries
    from db.connect import open_store
    from orchestrator.tracking import tracker

    with open_store(workspace.database) as store:
        tracker.refresh(store, workspace.runs)
        return queries.run_records(store), queries.durations(store)


def _elsewhere(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord], target: str) -> Iterator[Check]:
    """Done on other machines: ``gpu:1`` is the same run whatever GPU that was."""
    of = (records[run.cell.run_id].target for run in runs if run.state is CellState.DONE)
    done = Counter(place for place in of if place and place != target)  # damaged files may not say where
    if done:
        yield Check(
            False,
            f"{counted(done.total(), 'run')} done on {', '.join(sorted(done))} and not measured again on {target}",
            'to compare machines, name the kind in hardware ("a100:2"), or use a folder for each (--runs and --db)',
        )


def _cell_state(record: RunRecord, target: str, code: str, packages: str, data: str) -> tuple[CellState, str]:
    state = State(record.state)
    if state is State.PLANNED:
        return CellState.NEW, ""
    if state.live:
        return CellState.RUNNING, f"attempt {record.attempt} is {state.value}"
    if state is not State.SUCCEEDED:
        return CellState.FAILED, f"attempt {record.attempt} ended as {state.value}" + (
            f": {record.reason}" if record.reason else ""
        )
    changed = [
        name
        for name, then, now in (
            ("code", record.code_digest, code),
            ("packages", record.packages_digest, packages),
            ("data set", record.dataset_digest, data),
        )
        if then and now and then != now
    ]
    if changed:
        return CellState.STALE, f"{' and '.join(changed)} changed since attempt {record.attempt}"
    why = f"attempt {record.attempt}"
    if record.target != target:
        why += f" on {record.target}"
    if record.dataset_digest and not data:
        why += "; whether its data set changed since is not known, as it is not prepared here"
    return CellState.DONE, why


def unseen_reason(declaration: DatasetDeclaration, root: Path | None, *, local: bool) -> str:
    """Why a data set cannot be looked at from here, as when only a cluster's nodes see its disk; empty when it can."""
    if local or not declaration.needs_root or root is None or root.exists():
        return ""
    return f"{root} is not visible here, so it was not checked"


class _DataSets:
    """Presence and digest of each data set, looked up once."""

    def __init__(self, root: Path | None, *, local: bool) -> None:
        self._root, self._local = root, local
        self._digests: dict[str, str] = {}

    def digest(self, name: str) -> str:
        """Empty when it cannot be had cheaply."""
        if name not in self._digests:
            declaration = registry.find(registry.datasets(), name)
            assert declaration is not None
            self._digests[name] = declaration.digest(self._root, name)
        return self._digests[name]

    def findings(self, names: Iterable[str]) -> list[Check]:
        found = []
        for name in sorted(names):
            declaration = registry.find(registry.datasets(), name)
            assert declaration is not None
            if unseen := unseen_reason(declaration, self._root, local=self._local):
                found.append(Check(False, f"data set {name}: {unseen}"))
                continue
            problems = declaration.check(self._root, name)
            for problem in problems:
                found.append(Check(True, f"data set {name}: {problem.where}: {problem.what}", problem.fix))
            if declaration.needs_root and not problems and not self.digest(name):
                found.append(
                    Check(
                        False,
                        f"data set {name} is not prepared, so the first run does that while its devices wait",
                        f"orchestrate data prepare {shlex.quote(name)}",
                    )
                )
        return found


def _weights(runs: Sequence[PlannedRun], root: Path | None, *, local: bool) -> Iterator[Check]:
    """Whether pretrained weights are where jobs look for them."""
    for name in sorted({run.cell.train.model for run in runs if run.cell.train.pretrained}):
        weights = registry.models()[name].weights
        assert weights is not None, "rules exclude models without"
        if root is not None and not root.exists() and not local:
            yield Check(False, f"weights of {name}: {root} is not visible here, so it was not checked")
            continue
        for problem in weights.check(root, name):
            yield Check(True, f"weights of {name}: {problem.where}: {problem.what}", problem.fix)


def _account(profile: ClusterProfile | None) -> list[Check]:
    if profile is None or not profile.needs_account or profile.account:
        return []
    what = f"cluster {profile.name} takes no job without an account"
    fix = f"orchestrate init --cluster --profile {profile.name} writes cluster.toml; set account there"
    return [Check(True, what, fix)]


def _unknown(packages: Packages) -> list[Check]:
    if packages.versions is not None:
        return []
    return [Check(False, f"packages of {packages.python}: unknown, it could not be asked here ({packages.problem})")]


def _packages(
    runs: Sequence[PlannedRun], profile: ClusterProfile | None, packages: Packages
) -> dict[str, dict[str, str]]:
    """What each interpreter of these runs has of the measured packages; ``packages`` is of the usual one."""
    pythons = {profile.interpreter(run.shape.node_kind) for run in runs} if profile else {packages.python}
    asked = [packages if python == packages.python else Packages.of(python) for python in sorted(pythons)]
    return {one.python: software.measured_versions(one.versions or {}) for one in asked}


def _remarks(expanded: Matrix, runs: Sequence[PlannedRun]) -> list[Check]:
    remarks = [Check(False, note) for note in expanded.notes]
    for label, others in expanded.merged_labels.items():
        remarks.append(Check(False, f"{label} was asked for {others + 1} times and runs once"))
    if not runs:
        remarks.append(Check(False, "every cell is excluded, nothing can run", "see the rules of the excluded cells"))
    return remarks


def _scripts(runs: Sequence[PlannedRun], profile: ClusterProfile, runs_folder: Path) -> list[Script]:
    scripts = []
    names: Counter[str] = Counter()
    for shape in dict.fromkeys(run.shape for run in runs):
        name = shape.name
        names[name] += 1
        scripts.append(
            Script(
                name if names[name] == 1 else f"{name}-{names[name]}",
                shape,
                job_script.render(shape, profile, runs=runs_folder, python=profile.python),
                queue_pairs(shape, profile),
            )
        )
    return scripts


def queue_pairs(shape: ResourceShape, profile: ClusterProfile) -> tuple[QueuePair, ...]:
    """The queues of a shape. An argument of sbatch can replace a partition or QOS of the script, and not remove it."""
    return tuple(
        QueuePair(queue.partition, queue.qos, queue.max_time_s)
        for queue in resources.queues(profile, shape)
        if (queue.partition or not shape.partition) and (queue.qos or not shape.qos)
    )


def _fields(train: TrainConfig) -> dict[str, Any]:
    """The fields that tell an excluded cell apart."""
    return {k: v for k, v in train.identity().items() if k != "v"}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
