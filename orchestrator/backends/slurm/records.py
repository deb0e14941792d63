"""Files of clusters and of the arrays that were submitted to them.

    RUNS/sites/<target>/site.json            limits of the cluster (ClusterLimits)
    RUNS/sites/<target>/scripts/<shape>.sh   the job script of each resource shape
    RUNS/sites/<target>/newest.json          what Slurm last reported (SlurmReport)
    RUNS/jobs/orc-<token>/array.json         one array, complete before its sbatch: index -> attempt (ArrayRecord)
    RUNS/jobs/orc-<token>/specs.json         what its tasks train (workloads.files.array_record)
    RUNS/jobs/orc-<token>/code               folder that comes first in the PYTHONPATH of its tasks
    RUNS/jobs/orc-<token>/call.pkl           submitit's call, the same for all tasks
    RUNS/jobs/orc-<token>/cancel.<index>     the task was cancelled
    RUNS/jobs/orc-<token>/ended              all its tasks have ended

The token is in the job's name, so an array whose ``sbatch`` did not answer is found in the queue.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workloads.contract import Submission
from workloads.contract.flat import flat, from_flat
from workloads.files.array_record import record_file, specs_file
from workloads.files.json_file import read_json, write_bytes, write_json
from workloads.files.packed_specs import pack_specs
from workloads.files.run_dir import AttemptDir, RunDir, jobs_folder, sites_folder

if TYPE_CHECKING:
    from orchestrator.backends.base import Request
    from orchestrator.cluster.profile import ClusterProfile, Nodes
    from workloads.contract import ResourceShape, RunSpec

JOB_NAME_PREFIX = "orc-"


@dataclass(frozen=True, slots=True)
class QueuePair:
    """A queue that accepts the runs of a shape: a pair of partition and QOS."""

    partition: str = ""
    qos: str = ""
    max_time_s: int = 0
    """0: no limit, or unknown."""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.partition, self.qos))) or "the default queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLimits:
    """How much a cluster accepts, and how to query it."""

    name: str
    """The target: the name of the profile."""
    poll_seconds: int = 60
    max_submit: int = 0
    """Jobs a user may have queued, each array task counted; 0: unknown."""
    array_index_max: int = 1000
    array_parallel: int = 0
    """Tasks of an array that run at once; 0: all."""
    accounting: str = "auto"
    """``auto``, ``sacct`` or ``squeue``."""
    requeue: bool = False
    """Whether Slurm requeues a job that was preempted or lost its node."""
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """How often recovery resubmits a run (``profile.Recovery``)."""
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``cpu`` or logical type of GPU -> ``mem_bytes`` of a node, ``mem_style``, ``max_time_s`` of each queue."""
    excluded: str = ""
    queue_choice: str = "first"
    """``first`` or ``earliest``: which of the queues that accept a run gets it."""

    @classmethod
    def of(cls, profile: ClusterProfile) -> Self:
        same = ("name", "poll_seconds", "max_submit", "array_index_max", "array_parallel")
        return cls(
            **{name: getattr(profile, name) for name in same},
            accounting=profile.accounting.value,
            requeue=profile.requeue == "requeue",
            queue_choice=profile.queue_choice.value,
            recovery=profile.recovery.model_dump(),
            nodes={kind: _limits(nodes) for kind, nodes in (*profile.gpu.items(), ("cpu", profile.cpu)) if nodes},
            excluded=str(profile.extra.get("exclude", "")),
        )


def _limits(nodes: Nodes) -> dict[str, Any]:
    caps = {f"{queue.partition}/{queue.qos}": queue.max_time_s for queue in nodes.queue}
    return {"mem_bytes": nodes.node_mem_bytes, "mem_style": nodes.mem_style.value, "max_time_s": caps}


class ClusterFolder:
    """The files of one cluster."""

    def __init__(self, runs: Path, target: str) -> None:
        self.runs = runs
        self.path = sites_folder(runs) / target
        self.newest = self.path / "newest.json"

    def limits(self) -> ClusterLimits | None:
        """Return None if nothing was ever submitted there from this runs folder."""
        try:
            return from_flat(ClusterLimits, read_json(self.path / "site.json"))
        except (OSError, ValueError, TypeError):
            return None

    def keep(
        self, limits: ClusterLimits, scripts: Mapping[str, str], queues: Mapping[str, Sequence[QueuePair]] | None = None
    ) -> None:
        """Store a plan's limits, and scripts and queues by the key of their shape; others stay, for ``retry``."""
        (self.path / "scripts").mkdir(parents=True, exist_ok=True)
        write_json(self.path / "site.json", asdict(limits))
        for key, text in scripts.items():
            write_bytes(self._script(key), text.encode())
        for key, pairs in (queues or {}).items():
            write_json(self._script(key).with_suffix(".queues.json"), [asdict(pair) for pair in pairs])

    def script(self, shape: ResourceShape) -> str | None:
        """Return the job script of a shape; None if no plan had it."""
        try:
            return self.script_file(shape).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def script_file(self, shape: ResourceShape) -> Path:
        """Return the script's path. A shape that recovery changed names the script of the planned one."""
        return self._script(shape.script_key)

    def queues(self, shape: ResourceShape) -> list[QueuePair]:
        """Return the queues that accept runs of a shape, best first; none if no plan listed them."""
        try:
            return [QueuePair(**pair) for pair in read_json(self.script_file(shape).with_suffix(".queues.json"))]
        except (OSError, ValueError, TypeError):
            return []

    def _script(self, key: str) -> Path:
        return self.path / "scripts" / f"{key}.sh"


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """One task of an array: an attempt."""

    run_id: str
    attempt: int
    token: str
    about: Mapping[str, Any] = field(default_factory=dict)
    """The part of its ``submission.json`` that differs from the other tasks' ones."""

    def directory(self, runs: Path) -> AttemptDir:
        return RunDir.of(runs, self.run_id).attempt(self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecord:
    """An array that was or is about to be submitted. The position of a task is its index in the array."""

    token: str
    target: str
    tasks: tuple[ArrayTask, ...]
    asked_at: float
    """Seconds since the epoch, before ``sbatch``."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """The part of ``submission.json`` that is the same for all tasks."""
    job_id: str | None = None
    """None until Slurm is known to have accepted it."""
    missed_at: float | None = None
    """When Slurm first answered without listing it."""
    partition: str = ""
    """Of the queue that was chosen as an option of ``sbatch``; empty if the script decided."""
    qos: str = ""
    expected_start: str = ""
    """Slurm's estimate for that queue, in the cluster's local time."""

    @property
    def name(self) -> str:
        """Name of the job: short, ASCII, unique."""
        return JOB_NAME_PREFIX + self.token

    def task_id(self, index: int) -> str | None:
        """Return Slurm's id of a task; None until the array's job id is known."""
        return f"{self.job_id}_{index}" if self.job_id is not None else None

    def submission(self, index: int) -> Submission:
        """Return the content of a task's ``submission.json``."""
        task = self.tasks[index]
        own = {"token": task.token, "target": self.target, "attempt": task.attempt}
        return Submission.from_json({**self.about, **task.about, **own})

    @classmethod
    def new(cls, target: str, requests: Sequence[Request]) -> Self:
        own = {"token", "attempt"}
        data = [{k: v for k, v in r.submission.to_json().items() if k not in own} for r in requests]
        different = [{k: v for k, v in values.items() if data[0].get(k) != v} for values in data]
        tasks = tuple(
            ArrayTask(r.spec.run_id, r.number, r.token, about) for r, about in zip(requests, different, strict=True)
        )
        return cls(token=uuid.uuid4().hex[:16], target=target, tasks=tasks, asked_at=time.time(), about=data[0])

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raise ValueError if the data is not a record of this version."""
        try:
            return cls(**{**data, "tasks": tuple(ArrayTask(*task) for task in data["tasks"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an array's record: {error}") from error


class ArrayFolder:
    """The files of the arrays of one runs folder."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def of(self, record: ArrayRecord) -> Path:
        return jobs_folder(self.runs) / record.name

    def create(self, record: ArrayRecord, specs: Sequence[RunSpec]) -> ArrayRecord:
        """Write a new array with the spec of each task's run; return it."""
        self.of(record).mkdir(parents=True, exist_ok=True)
        write_bytes(specs_file(self.of(record)), pack_specs(specs))
        return self.write(record)

    def write(self, record: ArrayRecord) -> ArrayRecord:
        """Write a record; return it."""
        tasks = [[t.run_id, t.attempt, t.token, *([t.about] if t.about else [])] for t in record.tasks]
        write_json(record_file(self.of(record)), flat(record) | {"tasks": tasks})
        return record

    def discard(self, record: ArrayRecord) -> None:
        """Delete an array that Slurm does not have: first the record, without which its tasks count as unsubmitted."""
        with contextlib.suppress(FileNotFoundError):
            record_file(self.of(record)).unlink()
        shutil.rmtree(self.of(record), ignore_errors=True)

    def read(self, target: str = "", *, ended: bool = False) -> list[ArrayRecord]:
        """Return the arrays of a target, or of all, oldest first; only those with live tasks unless ``ended``."""
        found = []
        for folder in jobs_folder(self.runs).glob(f"{JOB_NAME_PREFIX}*"):
            with contextlib.suppress(OSError, ValueError):
                if ended or not (folder / "ended").exists():
                    found.append(ArrayRecord.from_json(read_json(record_file(folder))))
        return sorted((r for r in found if target in {"", r.target}), key=lambda record: record.asked_at)

    def close(self, record: ArrayRecord) -> None:
        """Mark an array as ended, so that no command queries it again."""
        with contextlib.suppress(OSError):
            (self.of(record) / "ended").touch()

    def request_cancel(self, record: ArrayRecord, index: int) -> None:
        (self.of(record) / f"cancel.{index}").touch()

    def is_cancelled(self, record: ArrayRecord, index: int) -> bool:
        return (self.of(record) / f"cancel.{index}").exists()
