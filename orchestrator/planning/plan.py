"""A plan: runs with their states and shapes, excluded cells, GPU-hours, checks and job scripts. Values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.backends.slurm.records import ClusterLimits, QueuePair
from orchestrator.environment.snapshot import code_digest
from orchestrator.planning.matrix import Cell, Excluded
from workloads.contract import Expectation, ResourceShape, RunSpec


class CellState(StrEnum):
    """State of a planned run by the store; the value of ``state`` in ``plan --json``."""

    NEW = "new"
    DONE = "done"
    RUNNING = "running"
    """Submitted and not ended: submitting, pending or running."""
    FAILED = "failed"
    """Ended without a result; ``submit`` submits it again."""
    STALE = "stale"
    """Done, but code, packages or data changed since; ``submit --stale`` reruns it."""

    @property
    def label(self) -> str:
        """For tables, where ``running`` would hide that a run may still be pending."""
        return "under way" if self is CellState.RUNNING else self.value


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One cell of the matrix that the target can run."""

    cell: Cell
    shape: ResourceShape
    state: CellState
    why: str = ""
    """Reason of every state but ``new``."""


@dataclass(frozen=True, slots=True)
class Script:
    """The job script of all runs of one resource shape, byte for byte what Slurm gets."""

    name: str
    shape: ResourceShape
    text: str
    queues: tuple[QueuePair, ...] = ()
    """Queues that such runs may go to by arguments of ``sbatch``; the script's own is the first."""


@dataclass(frozen=True, slots=True)
class GpuHours:
    """GPU-hours of the runs to submit. None: there is no measured history."""

    low: float | None
    expected: float | None
    high: float
    """Time limit × GPUs of every run to submit."""
    basis: str
    """What ``expected`` is based on, in words."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding before anything is submitted."""

    blocking: bool
    """Whether ``submit`` stops until it is fixed."""
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What would run."""

    experiment: str
    target: str
    """``local`` or the cluster's name."""
    digests: dict[str, str]
    """Of its sources: experiment, cluster, store, code, ..."""
    runs: list[PlannedRun]
    excluded: list[Excluded]
    merged: int
    """Number of duplicate cells."""
    gpu_hours: GpuHours
    checks: list[Check]
    runs_folder: Path
    data_root: Path | None
    dataset_digests: dict[str, str]
    scripts: list[Script] = field(default_factory=list)
    cluster: ClusterLimits | None = None
    """None for this machine."""
    packages: dict[str, dict[str, str]] = field(default_factory=dict)
    """Interpreter of jobs -> versions of the measured packages; empty where it could not run here."""
    created_at: str = ""
    experiment_file: Path | None = None
    sets: tuple[str, ...] = ()
    """The ``--set`` texts."""

    def counts(self) -> Counter[CellState]:
        """Number of runs in each state."""
        return Counter(run.state for run in self.runs)

    def to_submit(self, *, stale: bool = False) -> list[PlannedRun]:
        """Runs that ``submit`` submits: new and failed ones; stale ones on request."""
        wanted = {CellState.NEW, CellState.FAILED} | ({CellState.STALE} if stale else set())
        return [run for run in self.runs if run.state in wanted]

    def spec(self, run: PlannedRun, snapshot: str = "", expect: Expectation | None = None) -> RunSpec:
        """The content of a run's ``spec.json``; ``expect`` is its shape's expectation, to share between runs."""
        return RunSpec(
            run_id=run.cell.run_id,
            label=run.cell.label,
            experiment=self.experiment,
            train=run.cell.train,
            execution=run.cell.execution,
            expect=expect or run.shape.expectation(),
            target=self.target,
            data_root=str(self.data_root or ""),
            dataset_digest=self.dataset_digests.get(run.cell.train.dataset, ""),
            code_digest=code_digest(run.cell.train, self.runs_folder),
            snapshot=snapshot,
        )

    def to_json(self) -> dict[str, Any]:
        """The output of ``plan --json``: every run with every training field."""
        return {
            "experiment": self.experiment,
            "target": self.target,
            "created_at": self.created_at,
            "runs": [
                {
                    "run_id": run.cell.run_id,
                    "label": run.cell.label,
                    "state": run.state.value,
                    "why": run.why,
                    **run.cell.train.to_json(),
                }
                for run in self.runs
            ],
            "excluded": [{"cell": e.fields, "rule": e.rule, "why": e.why} for e in self.excluded],
            "merged": self.merged,
            "gpu_hours": asdict(self.gpu_hours),
            "scripts": [
                {
                    "name": s.name,
                    "runs": sum(r.shape == s.shape for r in self.to_submit()),
                    "queues": [str(pair) for pair in s.queues],
                    "text": s.text,
                }
                for s in self.scripts
            ],
            "checks": [asdict(check) for check in self.checks],
            "digests": self.digests,
        }
