"""What a plan is: runs with their actions and shapes, exclusions, costs, checks and scripts. Values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.backends.slurm.records import ClusterLimits, QueuePair
from orchestrator.planning.matrix import Cell, Excluded
from orchestrator.environment.snapshot import code_digest
from workloads.contract import Expectation, ResourceShape, RunSpec


class CellState(StrEnum):
    """What the store says of a planned run; the word under ``state`` in ``plan --json``."""

    NEW = "new"
    DONE = "done"
    RUNNING = "running"
    """Sent and not ended: submitting, pending or running."""
    FAILED = "failed"
    """Ended without a result; ``submit`` sends it again."""
    STALE = "stale"
    """Done, but code, packages or data changed since; ``submit --stale`` runs it again."""

    @property
    def label(self) -> str:
        """For people, who take a run that waits in a queue for none that is running."""
        return "under way" if self is CellState.RUNNING else self.value


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One cell of the matrix that the target can run."""

    cell: Cell
    shape: ResourceShape
    state: CellState
    why: str = ""
    """For every action but ``new``: what the store says, in words."""


@dataclass(frozen=True, slots=True)
class Script:
    """The job script of all runs of one resource shape, byte for byte what Slurm gets."""

    name: str
    shape: ResourceShape
    text: str
    queues: tuple[QueuePair, ...] = ()
    """The queues that take such runs and can be said beside the script; the script's own is the first."""


@dataclass(frozen=True, slots=True)
class GpuHours:
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
    gpu_hours: GpuHours
    checks: list[Check]
    runs_folder: Path
    data_root: Path | None
    dataset_digests: dict[str, str]
    scripts: list[Script] = field(default_factory=list)
    cluster: ClusterLimits | None = None
    """What submit must know of the cluster; None for this machine."""
    packages: dict[str, dict[str, str]] = field(default_factory=dict)
    """Interpreter of jobs -> the measured packages it has, with versions; none where it could not be asked."""
    created_at: str = ""
    experiment_file: Path | None = None
    sets: tuple[str, ...] = ()
    """What ``--set`` said beside it."""

    def counts(self) -> Counter[CellState]:
        """Runs by action."""
        return Counter(run.state for run in self.runs)

    def to_submit(self, *, stale: bool = False) -> list[PlannedRun]:
        """What ``submit`` sends: all without a result that are not under way; the stale ones on request."""
        wanted = {CellState.NEW, CellState.FAILED} | ({CellState.STALE} if stale else set())
        return [run for run in self.runs if run.state in wanted]

    def spec(self, run: PlannedRun, snapshot: str = "", expect: Expectation | None = None) -> RunSpec:
        """The content of a run's ``spec.json``, with the name of the code that is submitted.

        Args:
            expect: of the run's shape, where it is at hand.
        """
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
        """What ``plan --json`` prints: every run with every training field."""
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
