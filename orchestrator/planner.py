"""RunSpecs + shapes + store -> Plan: what would run, what is done, what is excluded and why. Writes one plan file.

A plan is made from digests of its sources, so that ``submit`` can tell whether it still holds (:func:`current`).
Imports no framework and needs no ``srun``; the database is opened only where it exists.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import cluster as clusters
from orchestrator import experiment as experiments
from orchestrator import matrix, render, resources
from orchestrator.cli.workspace import Workspace
from orchestrator.errors import InputError
from orchestrator.executors.slurm_records import Site
from orchestrator.interpreter import Packages
from orchestrator.matrix import Cell, Excluded, Matrix
from orchestrator.resources import ResourceShape
from workloads import registry
from workloads.contract import Execution, RunSpec, State, TrainConfig
from workloads.provenance import code_digest
from workloads.rundir import write_bytes

if TYPE_CHECKING:
    from db.queries import Duration, RunRecord
    from orchestrator.cluster import ClusterProfile
    from orchestrator.executors.machine import Machine

log = logging.getLogger(__name__)

PLAN_VERSION = 2


class Action(StrEnum):
    """What the store says of a planned run; the word under ``state`` in ``plan --json``."""

    NEW = "new"
    DONE = "done"
    RUNNING = "running"
    """Sent and not ended: submitting, pending or running."""
    FAILED = "failed"
    """Ended without a result; ``submit`` sends it again."""
    STALE = "stale"
    """Done, but code, packages or data changed since; ``submit --stale`` runs it again."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One cell of the matrix that the target can run."""

    cell: Cell
    shape: ResourceShape
    action: Action
    why: str = ""
    """For every action but ``new``: what the store says, in words."""


@dataclass(frozen=True, slots=True)
class Script:
    """The job script of all runs of one resource shape, byte for byte what Slurm gets."""

    name: str
    shape: ResourceShape
    text: str


@dataclass(frozen=True, slots=True)
class Hours:
    """A range of GPU-hours for what would be sent. ``None``: no measured history to tell from."""

    low: float | None
    expected: float | None
    high: float
    """Time limit × GPUs of every run to send."""
    basis: str
    """Where ``expected`` comes from, in words."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding made before anything is queued."""

    blocking: bool
    """Whether ``submit`` refuses until it is mended."""
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What would run. ``digests`` name its sources."""

    experiment: str
    target: str
    """``local`` or the cluster's name."""
    digests: dict[str, str]
    runs: list[PlannedRun]
    excluded: list[Excluded]
    merged: int
    """Cells that were the same as another one."""
    gpu_hours: Hours
    checks: list[Check]
    runs_folder: Path
    data_root: Path | None
    dataset_digests: dict[str, str]
    code_digest: str
    scripts: list[Script] = field(default_factory=list)
    site: Site | None = None
    """What submit must know of the cluster; None for this machine."""
    created_at: str = ""

    def counts(self) -> Counter[Action]:
        """Runs by action."""
        return Counter(run.action for run in self.runs)

    def to_send(self, *, stale: bool = False) -> list[PlannedRun]:
        """What ``submit`` sends: all without a result that are not under way; the stale ones on request."""
        wanted = {Action.NEW, Action.FAILED} | ({Action.STALE} if stale else set())
        return [run for run in self.runs if run.action in wanted]

    def spec(self, run: PlannedRun) -> RunSpec:
        """The content of a run's ``spec.json``."""
        return RunSpec(
            run_id=run.cell.run_id,
            label=run.cell.label,
            experiment=self.experiment,
            train=run.cell.train,
            execution=run.cell.execution,
            expect=run.shape.expectation(),
            target=self.target,
            data_root=str(self.data_root or ""),
            dataset_digest=self.dataset_digests.get(run.cell.train.dataset, ""),
            code_digest=self.code_digest,
        )

    def to_json(self) -> dict[str, Any]:
        """What ``plan --json`` prints: every run with every training field."""
        return {
            "experiment": self.experiment,
            "target": self.target,
            "created_at": self.created_at,
            "runs": [
                {
                    "run_id": run.cell.run_id,
                    "label": run.cell.label,
                    "state": run.action.value,
                    "why": run.why,
                    **run.cell.train.to_json(),
                }
                for run in self.runs
            ],
            "excluded": [{"cell": e.fields, "rule": e.rule, "why": e.why} for e in self.excluded],
            "merged": self.merged,
            "gpu_hours": asdict(self.gpu_hours),
            "scripts": [
                {"name": s.name, "runs": sum(r.shape == s.shape for r in self.to_send()), "text": s.text}
                for s in self.scripts
            ],
            "checks": [asdict(check) for check in self.checks],
            "digests": self.digests,
        }

    def save(self, path: Path) -> None:
        """Write the plan file; shapes and executions once each, of a training configuration what is not default."""
        tables = _Tables()
        data = {
            "plan_version": PLAN_VERSION,
            "experiment": self.experiment,
            "target": self.target,
            "created_at": self.created_at,
            "digests": self.digests,
            "merged": self.merged,
            "gpu_hours": asdict(self.gpu_hours),
            "checks": [asdict(check) for check in self.checks],
            "runs_folder": str(self.runs_folder),
            "data_root": str(self.data_root or ""),
            "dataset_digests": self.dataset_digests,
            "code_digest": self.code_digest,
            "runs": [
                [
                    run.cell.run_id,
                    run.cell.label,
                    run.action.value,
                    run.why,
                    tables.index(run.shape),
                    tables.index(run.cell.execution),
                    run.cell.train.identity(),
                ]
                for run in self.runs
            ],
            "excluded": [[e.fields, e.rule, e.why] for e in self.excluded],
            "site": asdict(self.site) if self.site else None,
            "scripts": [[s.name, tables.index(s.shape), s.text] for s in self.scripts],
            "tables": tables.rows,
        }
        # Escaped: paths may hold bytes that are no UTF-8.
        body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()[1:]
        write_bytes(path, _SEAL_START + _seal(body) + body)


_SEAL_START = b'{"seal":"'


def _seal(body: bytes) -> bytes:
    """Shows that a plan file is as it was written: an edited one would send runs that are not what their ids say."""
    return hashlib.sha256(body).hexdigest().encode() + b'",'


class _Tables:
    """Shapes and executions are few and shared by many runs; the plan file holds each once."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._index: dict[ResourceShape | Execution, int] = {}

    def index(self, value: ResourceShape | Execution) -> int:
        if value not in self._index:
            self._index[value] = len(self.rows)
            self.rows.append(asdict(value))
        return self._index[value]


def read(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it was not written by this version, is damaged, or was edited.
    """
    content = path.read_bytes()
    head = len(_SEAL_START) + len(_seal(b""))
    if content[:head] != _SEAL_START + _seal(content[head:]):
        raise ValueError(f"{path}: damaged or edited, or not a plan of this version")
    data = json.loads(content)
    if data.get("plan_version") != PLAN_VERSION:
        raise ValueError(f"{path}: not a plan of this version")
    try:
        rows = data["tables"]
        shapes = {i: ResourceShape(**row) for i, row in enumerate(rows) if "ranks_per_node" in row}
        executions = {i: Execution(**row) for i, row in enumerate(rows) if "hang_timeout_s" in row}
        runs = []
        for run_id, label, action, why, shape, execution, identity in data["runs"]:
            train = TrainConfig.from_json({k: v for k, v in identity.items() if k != "v"})
            cell = Cell(train=train, execution=executions[execution], run_id=run_id, label=label)
            runs.append(PlannedRun(cell, shapes[shape], Action(action), why))
        return Plan(
            experiment=data["experiment"],
            target=data["target"],
            digests=data["digests"],
            runs=runs,
            excluded=[Excluded(fields=f, rule=r, why=w) for f, r, w in data["excluded"]],
            merged=data["merged"],
            gpu_hours=Hours(**data["gpu_hours"]),
            checks=[Check(**check) for check in data["checks"]],
            runs_folder=Path(data["runs_folder"]),
            data_root=Path(data["data_root"]) if data["data_root"] else None,
            dataset_digests=data["dataset_digests"],
            code_digest=data["code_digest"],
            scripts=[Script(n, shapes[s], t) for n, s, t in data["scripts"]],
            site=Site.from_json(data["site"]) if data["site"] else None,
            created_at=data["created_at"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged plan ({error})") from error


def make(
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
    shapes = _Shapes(profile, machine, packages)
    data = _DataSets(workspace.data_root, local=profile is None)
    code = code_digest()
    excluded = list(expanded.excluded)
    runs = []
    for cell in expanded.cells:
        shape, rule, why = shapes.of(cell)
        if shape is None:
            excluded.append(Excluded(fields=_fields(cell.train), rule=rule, why=why))
            continue
        record = records.get(cell.run_id)
        if record is None:
            runs.append(PlannedRun(cell, shape, Action.NEW))
        else:
            action, why = _action(record, code, packages.digest, data.digest(cell.train.dataset))
            runs.append(PlannedRun(cell, shape, action, why))
    plan = Plan(
        experiment=spec.name,
        target=profile.name if profile else "local",
        digests=dict(digests or {}),
        runs=runs,
        excluded=excluded,
        merged=expanded.merged,
        gpu_hours=_hours([run for run in runs if run.action in {Action.NEW, Action.FAILED}], durations),
        checks=[
            *_remarks(expanded, runs),
            *packages.findings(),
            *data.findings({run.cell.train.dataset for run in runs}),
        ],
        runs_folder=workspace.runs,
        data_root=workspace.data_root,
        dataset_digests={name: data.digest(name) for name in {run.cell.train.dataset for run in runs}},
        code_digest=code,
        site=Site.of(profile) if profile is not None else None,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if profile is not None:
        plan.scripts.extend(_scripts(plan.to_send(stale=True), profile, workspace.runs))
    return plan


def current(
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
    profile = clusters.choose(local=local, named=cluster, cwd=Path.cwd(), hostname=socket.gethostname())
    records, durations = _history(workspace)
    machine = None
    if profile is None:
        from orchestrator.executors.machine import local_machine

        machine = local_machine()
    packages = Packages.of(profile.python if profile else None)
    digests = {
        "experiment": spec.digest,
        "target": profile.name if profile else "local",
        "cluster": profile.digest if profile else _digest(repr(machine)),
        "store": _digest(repr(sorted((r, str(records[r])) for r in records))),
        "code": code_digest(),
        "packages": packages.digest,
        "runs": str(workspace.runs),
        "data": str(workspace.data_root or ""),
    }
    if not fresh:
        try:
            plan = read(workspace.plan_file)
        except FileNotFoundError:
            plan = None
        except (OSError, ValueError) as error:
            log.warning("%s; planning anew", error)
            plan = None
        # Data sets may change without any of these files changing, so a plan that found one wanting is made again.
        if plan is not None and plan.digests == digests and not any(check.blocking for check in plan.checks):
            return plan
    plan = make(workspace, spec, profile, machine, records, durations, packages, digests=digests)
    try:
        plan.save(workspace.plan_file)
    except OSError as error:
        raise InputError(
            f"cannot write the plan file: {error.strerror}",
            where=str(workspace.plan_file),
            hint="run in a folder you may write to, or name another runs folder with --runs",
        ) from error
    return plan


def _history(workspace: Workspace) -> tuple[dict[str, RunRecord], list[Duration]]:
    """What the store knows, new results read in first; nothing where no run was ever sent."""
    if "://" not in workspace.database and not Path(workspace.database).exists() and not workspace.runs.exists():
        return {}, []
    from db import queries
    from db.engine import open_store
    from orchestrator import tracker

    with open_store(workspace.database) as store:
        tracker.refresh(store, workspace.runs)
        return queries.run_states(store), queries.durations(store)


def _action(record: RunRecord, code: str, packages: str, data: str) -> tuple[Action, str]:
    state = State(record.state)
    if state is State.PLANNED:
        return Action.NEW, ""
    if state.live:
        return Action.RUNNING, f"attempt {record.attempt} is {state.value}"
    if state is not State.SUCCEEDED:
        return Action.FAILED, f"attempt {record.attempt} ended as {state.value}" + (
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
        return Action.STALE, f"{' and '.join(changed)} changed since attempt {record.attempt}"
    return Action.DONE, f"attempt {record.attempt}"


class _Shapes:
    """Resource shapes, computed once for each combination of the few fields they depend on."""

    def __init__(self, profile: ClusterProfile | None, machine: Machine | None, packages: Packages) -> None:
        self._profile, self._machine, self._packages = profile, machine, packages
        self._known: dict[Any, tuple[ResourceShape | None, str, str]] = {}

    def of(self, cell: Cell) -> tuple[ResourceShape | None, str, str]:
        """The shape, or None with the rule and the reason that exclude the cell."""
        train = cell.train
        options = tuple(sorted(train.strategy_options.items())) if train.strategy_options else ()
        key = (train.hardware, train.strategy, options, train.cpus, cell.execution, train.model, train.dataset)
        if key not in self._known:
            self._known[key] = self._compute(train, cell.execution)
        return self._known[key]

    def _compute(self, train: TrainConfig, execution: Execution) -> tuple[ResourceShape | None, str, str]:
        strategy = registry.find(registry.strategies(), train.strategy)
        model = registry.find(registry.models(), train.model)
        dataset = registry.find(registry.datasets(), train.dataset)
        assert strategy is not None and model is not None and dataset is not None, (
            "matrix.expand lets no unknown name pass"
        )
        loaded = [] if strategy.framework == registry.NO_FRAMEWORK else [*model.packages, *dataset.packages]
        missing = self._packages.missing([*strategy.packages, *loaded])
        if missing:
            return None, "packages", f"not available: {self._packages.python} has no {', '.join(missing)}"
        shape = resources.shape(train, execution, strategy, self._profile, self._machine)
        if isinstance(shape, str):
            return None, "hardware", shape
        return shape, "", ""


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
            if declaration.needs_root and self._root is not None and not self._root.exists() and not self._local:
                found.append(Check(False, f"data set {name}: {self._root} is not visible here, so it was not checked"))
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
                render.script(shape, profile, runs=runs_folder, python=profile.python),
            )
        )
    return scripts


def _hours(runs: Sequence[PlannedRun], durations: Sequence[Duration]) -> Hours:
    """GPU-hours of what would be sent: limits as upper bound, measured history as expectation where there is any."""
    high = sum(run.shape.gpu_hours_limit for run in runs)
    history = _per_unit_times(durations)
    known = [(run, times) for run in runs if (times := history.get(_history_key(run.cell.train)))]
    if not runs:
        return Hours(0.0, 0.0, 0.0, "nothing to send")
    if not known:
        return Hours(None, None, high, "no measured history yet: the limit is all that is known")

    def total(pick: Callable[[Sequence[float]], float]) -> float:
        hours = sum(pick(times) * _units(run.cell.train) * run.shape.gpus / 3600 for run, times in known)
        return hours + sum(run.shape.gpu_hours_limit for run in runs if _history_key(run.cell.train) not in history)

    basis = f"measured history for {len(known)} of {len(runs)} runs" + (
        ", the limit for the others" if len(known) < len(runs) else ""
    )
    return Hours(total(min), total(lambda times: sum(times) / len(times)), high, basis)


def _per_unit_times(durations: Sequence[Duration]) -> dict[tuple[str, ...], list[float]]:
    times: dict[tuple[str, ...], list[float]] = {}
    for d in durations:
        units = d.steps if d.steps else d.epochs
        if d.total_time_s and units:
            key = (d.model, d.dataset, d.strategy, d.hardware, "steps" if d.steps else "epochs")
            times.setdefault(key, []).append(d.total_time_s / units)
    return times


def _history_key(train: TrainConfig) -> tuple[str, ...]:
    return (train.model, train.dataset, train.strategy, train.hardware, "steps" if train.steps else "epochs")


def _units(train: TrainConfig) -> int:
    return train.steps or train.epochs


def _fields(train: TrainConfig) -> dict[str, Any]:
    """The fields that tell an excluded cell apart."""
    return {k: v for k, v in train.identity().items() if k != "v"}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


__all__ = ["Action", "Check", "Hours", "Plan", "PlannedRun", "Script", "current", "make", "read"]
