"""What is kept on disk of clusters and of the arrays that were sent to them.

    RUNS/sites/<target>/site.json            limits and manners of the cluster (ClusterLimits)
    RUNS/sites/<target>/scripts/<shape>.sh   the job script of each resource shape
    RUNS/sites/<target>/newest.json          what Slurm last said (orchestrator.backends.slurm.query)
    RUNS/jobs/orc-<token>/array.json         one array, whole before its sbatch: index -> attempt (ArrayRecord)
    RUNS/jobs/orc-<token>/specs.json         what its tasks train (workloads.files.array_record)
    RUNS/jobs/orc-<token>/code               folder that comes first on the path of its tasks
    RUNS/jobs/orc-<token>/call.pkl           submitit's call, the same for all tasks
    RUNS/jobs/orc-<token>/cancel.<index>     somebody asked for the end of this task
    RUNS/jobs/orc-<token>/ended              nothing of it goes on any more

The token is the name of the job, so an array whose ``sbatch`` never answered is found again in the queue.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workloads.contract import Submission
from workloads.files.array_record import create_run_folders, record_file, specs_file
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
    """A queue that takes the runs of a shape."""

    partition: str = ""
    qos: str = ""
    max_time_s: int = 0
    """0: no limit, or not known."""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.partition, self.qos))) or "the default queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLimits:
    """How much a cluster takes, and how it wants to be asked."""

    name: str
    """The target: the name of the profile."""
    poll_seconds: int = 60
    max_submit: int = 0
    """Jobs a user may have queued, array tasks counted; 0: not known."""
    array_index_max: int = 1000
    array_parallel: int = 0
    """Tasks of an array that run at once; 0: no throttle."""
    accounting: str = "auto"
    """``auto``, ``sacct`` or ``squeue``."""
    requeue: bool = False
    """Whether Slurm starts a job again that was preempted or lost its node."""
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """How often a run is sent again by itself (``profile.Recovery``)."""
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``cpu`` or logical type of GPU -> ``mem_bytes`` of a node, ``mem_style``, ``max_time_s`` of each queue."""
    excluded: str = ""
    """Nodes that the cluster file itself excludes."""

    queue_choice: str = "first"
    """``first`` or ``earliest``: which of the queues that take a run gets it."""

    @classmethod
    def of(cls, profile: ClusterProfile) -> Self:
        return cls(
            name=profile.name,
            poll_seconds=profile.poll_seconds,
            max_submit=profile.max_submit,
            array_index_max=profile.array_index_max,
            array_parallel=profile.array_parallel,
            accounting=profile.accounting.value,
            requeue=profile.requeue == "requeue",
            queue_choice=profile.queue_choice.value,
            recovery=profile.recovery.model_dump(),
            nodes={kind: _limits(nodes) for kind, nodes in (*profile.gpu.items(), ("cpu", profile.cpu)) if nodes},
            excluded=str(profile.extra.get("exclude", "")),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Keys of other versions are passed over."""
        return cls(**{k: v for k, v in data.items() if k in {f.name for f in fields(cls)}})


def _limits(nodes: Nodes) -> dict[str, Any]:
    caps = {f"{queue.partition}/{queue.qos}": queue.max_time_s for queue in nodes.queue}
    return {"mem_bytes": nodes.node_mem_bytes, "mem_style": nodes.mem_style.value, "max_time_s": caps}


class ClusterFolder:
    """The files of one cluster."""

    def __init__(self, runs: Path, target: str) -> None:
        self.runs = runs
        self.path = sites_folder(runs) / target
        self.newest = self.path / "newest.json"

    def site(self) -> ClusterLimits | None:
        """None when nothing was ever sent there from this runs folder."""
        try:
            return ClusterLimits.from_json(read_json(self.path / "site.json"))
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def keep(
        self, site: ClusterLimits, scripts: Mapping[str, str], queues: Mapping[str, Sequence[QueuePair]] | None = None
    ) -> None:
        """Take over a plan's site, its scripts and queues by the key of their shape; others stay, for ``retry``."""
        (self.path / "scripts").mkdir(parents=True, exist_ok=True)
        write_json(self.path / "site.json", asdict(site))
        for key, text in scripts.items():
            write_bytes(self._script(key), text.encode())
        for key, pairs in (queues or {}).items():
            write_json(self._script(key).with_suffix(".queues.json"), [asdict(pair) for pair in pairs])

    def script(self, shape: ResourceShape) -> str | None:
        """The job script of a shape; None when no plan had it. One that was changed since names the script it had."""
        try:
            return self.script_file(shape).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def script_file(self, shape: ResourceShape) -> Path:
        """Where the script of a shape is."""
        return self._script(shape.script_key)

    def queues(self, shape: ResourceShape) -> list[QueuePair]:
        """The queues that take runs of a shape, best first; none where no plan told them."""
        try:
            told = read_json(self.script_file(shape).with_suffix(".queues.json"))
            return [QueuePair(**pair) for pair in told]
        except (OSError, ValueError, TypeError):
            return []

    def _script(self, key: str) -> Path:
        return self.path / "scripts" / f"{key}.sh"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an array: an attempt."""

    run_id: str
    attempt: int
    token: str
    about: Mapping[str, Any] = field(default_factory=dict)
    """What its ``submission.json`` says that is not the same for the whole array."""

    def directory(self, runs: Path) -> AttemptDir:
        return RunDir.of(runs, self.run_id).attempt(self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecord:
    """An array that was, or is about to be, sent. The position of a task is its index in the array."""

    token: str
    target: str
    tasks: tuple[Task, ...]
    asked_at: float
    """Seconds since the epoch, before ``sbatch``."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What ``submission.json`` of each attempt says, as far as it is the same for all."""
    job_id: str | None = None
    """None until Slurm is known to have it."""
    missed_at: float | None = None
    """When Slurm first answered and did not know it."""
    partition: str = ""
    """The queue that was chosen for it beside the script; empty where the script decided."""
    qos: str = ""
    expected_start: str = ""
    """What Slurm said of that queue, local time of the cluster."""

    @property
    def name(self) -> str:
        """The name of the job: short, ASCII, unique."""
        return JOB_NAME_PREFIX + self.token

    def submission(self, index: int) -> Submission:
        """What ``submission.json`` of a task's attempt says."""
        task = self.tasks[index]
        own = {"token": task.token, "target": self.target, "attempt": task.attempt}
        return Submission.from_json({**self.about, **task.about, **own})

    @classmethod
    def new(cls, target: str, requests: Sequence[Request]) -> Self:
        own = {"token", "attempt"}
        about = {k: v for k, v in requests[0].submission.to_json().items() if k not in own}
        tasks = tuple(
            Task(
                r.spec.run_id,
                r.number,
                r.token,
                {k: v for k, v in r.submission.to_json().items() if k not in own and about.get(k) != v},
            )
            for r in requests
        )
        return cls(token=uuid.uuid4().hex[:16], target=target, tasks=tasks, asked_at=time.time(), about=about)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ValueError for anything that is not a record of this version."""
        try:
            return cls(**{**data, "tasks": tuple(Task(*task) for task in data["tasks"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an array's record: {error}") from error


class ArrayFolder:
    """The files of the arrays of one runs folder."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def of(self, record: ArrayRecord) -> Path:
        return jobs_folder(self.runs) / record.name

    def begin(self, record: ArrayRecord, specs: Sequence[RunSpec]) -> ArrayRecord:
        """Make a new array durable, with the spec of each task's run; returns it."""
        self.of(record).mkdir(parents=True, exist_ok=True)
        write_bytes(specs_file(self.of(record)), pack_specs(specs))
        return self.write(record)

    def write(self, record: ArrayRecord) -> ArrayRecord:
        """Make a record durable; returns it."""
        tasks = [[t.run_id, t.attempt, t.token, *([t.about] if t.about else [])] for t in record.tasks]
        data = {f.name: getattr(record, f.name) for f in fields(record)} | {"tasks": tasks}
        write_json(record_file(self.of(record)), data)
        return record

    def create_run_folders(self, record: ArrayRecord, indexes: Iterable[int]) -> None:
        """Make the folders of tasks whose jobs did not come to it."""
        create_run_folders(self.of(record), indexes)

    def keep_code(self, record: ArrayRecord, folder: str) -> None:
        """Leave word for the job script of where the submitted code lies."""
        write_bytes(self.of(record) / "code", os.fsencode(folder), durable=False)

    def missed(self, record: ArrayRecord) -> ArrayRecord:
        """Note that Slurm answered and does not know an array."""
        return record if record.missed_at is not None else self.write(replace(record, missed_at=time.time()))

    def discard(self, record: ArrayRecord) -> None:
        """Forget an array that Slurm does not have. The record goes first: without it the tasks were never sent."""
        with contextlib.suppress(FileNotFoundError):
            record_file(self.of(record)).unlink()
        shutil.rmtree(self.of(record), ignore_errors=True)

    def open(self, target: str = "") -> list[ArrayRecord]:
        """Every array of a target, or of all, that may still be going on, oldest first."""
        return self.all(target, ended=False)

    def all(self, target: str = "", *, ended: bool = True) -> list[ArrayRecord]:
        """Every array of a target, or of all, oldest first; without those of which nothing goes on unless ``ended``."""
        found = []
        for folder in jobs_folder(self.runs).glob(f"{JOB_NAME_PREFIX}*"):
            with contextlib.suppress(OSError, ValueError):
                if ended or not (folder / "ended").exists():
                    found.append(ArrayRecord.from_json(read_json(record_file(folder))))
        return sorted((r for r in found if target in {"", r.target}), key=lambda record: record.asked_at)

    def close(self, record: ArrayRecord) -> None:
        """Note that nothing of an array goes on, so that nobody asks for it again."""
        with contextlib.suppress(OSError):
            (self.of(record) / "ended").touch()

    def ask_cancel(self, record: ArrayRecord, index: int) -> None:
        (self.of(record) / f"cancel.{index}").touch()

    def is_cancelled(self, record: ArrayRecord, index: int) -> bool:
        return (self.of(record) / f"cancel.{index}").exists()
