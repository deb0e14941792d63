"""Query Slurm: one ``squeue`` and at most one ``sacct`` for any number of arrays, as often as the site allows.

``squeue`` rows count by the array's name: that finds an array whose job id is unknown, and never takes another job with
a reused id for ours. ``squeue`` lists ended jobs for ``MinJobAge`` seconds (slurm.conf(5), 300 by default). ``sacct``
is queried for tasks that have ended or are not listed, ``scontrol`` where there is no accounting. The answers are kept
on disk for commands that follow within ``poll_seconds``. The pause grows after failures.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from orchestrator.backends.slurm import commands
from orchestrator.backends.slurm.records import JOB_NAME_PREFIX, ArrayRecord, ClusterFolder, ClusterLimits
from orchestrator.backends.slurm.states import (
    Phase,
    base_state,
    parse_elapsed,
    parse_exit_code,
    parse_indices,
    phase_of,
)
from workloads.files.array_record import record_file
from workloads.files.json_file import read_json, write_bytes
from workloads.files.run_dir import jobs_folder

log = logging.getLogger(__name__)

IDS_PER_CALL = 200
QUEUED_AGE_S = 2.0
LONGEST_PAUSE = 8
"""After failures the pause grows to this many times ``poll_seconds``."""
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled|no accounting|Slurm accounting", re.IGNORECASE)
_NO_SUCH_JOB = re.compile(r"Invalid job id", re.IGNORECASE)
_SACCT_FIELDS = "JobID,JobName,State,ExitCode,ElapsedRaw,NodeList"
_SQUEUE_FIELDS = "%F|%K|%j|%T|%M|%N|%r"


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What Slurm reports of one task."""

    state: str = ""
    reason: str = ""
    elapsed_s: float | None = None
    node: str = ""
    exit_code: int | None = None
    out_of_memory: bool = False
    """Whether a step of it ended at its memory limit."""

    @property
    def phase(self) -> Phase:
        return phase_of(self.state)


Rows = dict[str, dict[int, tuple[str, TaskRecord]]]
"""Job id of an array -> index -> (job name, record)."""
_Wanted = dict[str, tuple[ArrayRecord, list[int]]]
"""Job id of an array -> its record and the tasks that have ended or are not listed."""


@dataclass(slots=True)
class ArrayReport:
    """What Slurm reports of one array."""

    job_ids: list[str] = field(default_factory=list)
    """More than one if ``sbatch`` was called twice because the first answer was lost."""
    tasks: dict[int, TaskRecord] = field(default_factory=dict)


@dataclass(slots=True)
class SlurmReport:
    """What Slurm last reported; the content of ``newest.json``."""

    asked_at: float = 0.0
    """When Slurm was last queried, seconds since the epoch."""
    answered_at: float = 0.0
    failures: int = 0
    problem: str = ""
    no_accounting: bool = False
    accounting_failed: bool = False
    """``sacct`` did not answer, so a task that is not listed may have ended well."""
    queued: int = 0
    """How many jobs of this user waited or ran, each task of an array counted."""
    arrays: dict[str, ArrayReport] = field(default_factory=dict)
    """By the name of the array."""
    ended_since: dict[str, float] = field(default_factory=dict)
    """Token of an attempt -> when it was first found neither waiting nor active."""
    clusters: dict[str, str] = field(default_factory=dict)
    """Host and configuration file -> name of the cluster that its clients talk to."""
    cluster: str = ""
    """Name of the cluster that has the arrays."""

    @classmethod
    def read(cls, folder: ClusterFolder) -> SlurmReport:
        """Read the last report; an empty one if it is missing, damaged or of another version."""
        try:
            return _json().validate_json(folder.newest.read_bytes())
        except (OSError, ValueError):
            return cls()

    def write(self, folder: ClusterFolder) -> None:
        """Write the report if possible; a full disk must not fail the command."""
        try:
            write_bytes(folder.newest, _json().dump_json(self), durable=False)
        except OSError as error:
            log.warning("cannot write %s: %s", folder.newest, error.strerror)


@cache
def _json() -> TypeAdapter[SlurmReport]:
    return TypeAdapter(SlurmReport)


def poll(
    folder: ClusterFolder, limits: ClusterLimits, records: Sequence[ArrayRecord], *, fresh: bool = False
) -> SlurmReport:
    """Return what Slurm reports of these arrays: the last report, or a new one if that is too old or ``fresh``."""
    report = SlurmReport.read(folder)
    pause_s = limits.poll_seconds * min(2**report.failures, LONGEST_PAUSE)
    if not records or (not fresh and 0 <= time.time() - report.asked_at < pause_s):
        return report
    report.asked_at = time.time()
    try:
        _check_cluster(report)
        report.arrays, report.queued = _squeue([record.name for record in records])
        _query_ended(report, limits, records)
        report.answered_at, report.failures, report.problem = report.asked_at, 0, ""
    except _NoAnswerError as error:
        report.failures, report.problem = report.failures + 1, str(error)
        log.warning("Slurm does not answer, so states are as last seen: %s", error)
    report.write(folder)
    return report


def find(folder: ClusterFolder, limits: ClusterLimits, record: ArrayRecord) -> list[str] | None:
    """Return the ids of the jobs with an array's name; None if Slurm does not answer. Ignores ``poll_seconds``."""
    report = SlurmReport.read(folder)
    try:
        _check_cluster(report)
        found = _squeue([record.name])[0].get(record.name, ArrayReport()).job_ids
        if not found and limits.accounting != "squeue" and not report.no_accounting:
            found = _find_in_accounting(report, record)
    except _NoAnswerError as error:
        log.warning("Slurm does not answer: %s", error)
        return None
    report.write(folder)
    return found


def num_queued(folder: ClusterFolder) -> tuple[int, float] | None:
    """Return how many jobs of this user wait or run, each task of an array counted, and when that was so.

    Uses a report of :func:`poll` that is younger than :data:`QUEUED_AGE_S`. None if Slurm does not answer.
    """
    report = SlurmReport.read(folder)
    if not report.problem and 0 <= time.time() - report.answered_at < QUEUED_AGE_S:
        return report.queued, report.answered_at
    asked_at = time.time()
    answer = commands.run("squeue", "--noheader", f"--user={os.getuid()}", "--array", "--format=%i")
    return (len(answer.stdout.split()), asked_at) if answer.ok else None


def queued_elsewhere(runs: Path, run_ids: Collection[str]) -> dict[Path, list[str]]:
    """Return which of these runs wait or run from other runs folders, by folder; empty if Slurm does not answer."""
    # squeue(1), %o: the command of a job is the submitted script, which lies in its array's folder.
    answer = commands.run("squeue", "--noheader", f"--user={os.getuid()}", "--format=%j|%o")
    found: dict[Path, list[str]] = {}
    for line in dict.fromkeys(answer.stdout.splitlines()):
        name, _, script = line.partition("|")
        array = Path(script).parent
        if not name.startswith(JOB_NAME_PREFIX) or array.name != name or array.parent == jobs_folder(runs):
            continue
        with contextlib.suppress(OSError, ValueError):
            record = ArrayRecord.from_json(read_json(record_file(array)))
            if both := [task.run_id for task in record.tasks if task.run_id in run_ids]:
                found.setdefault(array.parents[1], []).extend(both)
    return found


class _NoAnswerError(Exception):
    """A query has no answer; nothing may be concluded from what is missing."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


def _query(*argv: str) -> str:
    answer = commands.run(*argv)
    if not answer.ok:
        text = answer.text or f"exit code {answer.exit_code}"
        raise _NoAnswerError(f"{argv[0]}: {text.splitlines()[0]}", text)
    return answer.stdout


def _check_cluster(report: SlurmReport) -> None:
    """Check that this machine talks to the cluster that has the arrays: another one reuses its job ids."""
    key = f"{os.uname().nodename} {os.environ.get('SLURM_CONF', '')}"
    if key not in report.clusters:
        match = re.search(r"^ClusterName\s*=\s*(\S+)", _query("scontrol", "show", "config"), re.MULTILINE)
        report.clusters[key] = match[1] if match else ""
    here = report.clusters[key]
    report.cluster = report.cluster or here
    if here != report.cluster:
        raise _NoAnswerError(f"this machine talks to cluster {here}, the runs are on {report.cluster}")


def _squeue(names: Sequence[str]) -> tuple[dict[str, ArrayReport], int]:
    """Return what the queue lists of these arrays, and how many jobs of this user wait or run.

    Lists all jobs of the user: with ``--name``, squeue selects rows itself after the controller has sent them all.
    """
    text = _query("squeue", "--noheader", f"--user={os.getuid()}", "--states=all", f"--format={_SQUEUE_FIELDS}")
    arrays: dict[str, ArrayReport] = {}
    wanted, queued = set(names), 0
    for line in text.splitlines():
        words = line.split("|", 6)
        if len(words) != 7 or not words[0].strip().isdigit():
            continue
        job_id, tasks, name, state, elapsed, node, reason = (word.strip() for word in words)
        indices = parse_indices(tasks)
        queued += 0 if phase_of(state) is Phase.ENDED else len(indices) or 1
        if name not in wanted:
            continue
        array = arrays.setdefault(name, ArrayReport())
        if job_id not in array.job_ids:
            array.job_ids.append(job_id)
        task = TaskRecord(state, reason, parse_elapsed(elapsed), "" if "(" in node else node)
        for index in indices:
            _add(array, index, task)
    for array in arrays.values():
        array.job_ids.sort(key=int)
    return arrays, queued


def _add(array: ArrayReport, index: int, task: TaskRecord) -> None:
    """Add a record. Of two for one index, from jobs with the same name or from two commands, a live one counts."""
    if index not in array.tasks or array.tasks[index].phase is Phase.ENDED:
        array.tasks[index] = task


def _query_ended(report: SlurmReport, limits: ClusterLimits, records: Sequence[ArrayRecord]) -> None:
    """Add how tasks ended, from accounting or else from the controller."""
    wanted: _Wanted = {}
    for record in records:
        tasks = report.arrays.get(record.name, ArrayReport()).tasks
        ended = [i for i in range(len(record.tasks)) if i not in tasks or tasks[i].phase is Phase.ENDED]
        if record.job_id is not None and ended:
            wanted[record.job_id] = record, ended
    if not wanted or _query_accounting(report, limits, wanted):
        return
    for job_id, (record, ended) in wanted.items():
        tasks = report.arrays.get(record.name, ArrayReport()).tasks
        # squeue alone suffices for tasks that it lists as COMPLETED.
        if any(i in tasks and base_state(tasks[i].state) != "COMPLETED" for i in ended):
            _merge(report, wanted, _scontrol(job_id))


def _query_accounting(report: SlurmReport, limits: ClusterLimits, wanted: _Wanted) -> bool:
    """Query ``sacct`` about tasks; return whether it answered."""
    report.accounting_failed = False
    if limits.accounting == "squeue" or report.no_accounting:
        return False
    tasks = [f"{job_id}_{i}" for job_id, (_, ended) in wanted.items() for i in ended]
    ids = tasks if len(tasks) <= IDS_PER_CALL else list(wanted)
    try:
        for batch in commands.batches(ids, IDS_PER_CALL):
            _merge(report, wanted, _sacct(f"--jobs={','.join(batch)}"))
    except _NoAnswerError as error:
        report.no_accounting = limits.accounting == "auto" and bool(_NO_ACCOUNTING.search(error.text))
        report.accounting_failed = not report.no_accounting
        if report.accounting_failed:
            log.warning("Slurm's accounting does not answer: %s", error.text)
        return False
    return True


def _find_in_accounting(report: SlurmReport, record: ArrayRecord) -> list[str]:
    # From a day before: the clocks of this machine and of slurmdbd differ.
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.asked_at - 86400))
    try:
        rows = _sacct(f"--name={record.name}", f"--starttime={since}", "--allocations")
    except _NoAnswerError as error:
        if not _NO_ACCOUNTING.search(error.text):
            raise
        report.no_accounting = True
        return []
    return sorted((a for a, tasks in rows.items() if any(n == record.name for n, _ in tasks.values())), key=int)


def _sacct(*selection: str) -> Rows:
    """Query ``sacct``. Of a task's steps only a reached memory limit counts."""
    rows: Rows = {}
    for line in _query("sacct", "--noheader", "--parsable2", f"--format={_SACCT_FIELDS}", *selection).splitlines():
        words = line.split("|")
        if len(words) != 6:
            continue
        job_id, name, state, exit_code, elapsed, nodes = words
        whole, _, step = job_id.partition(".")
        array, _, indices = whole.partition("_")
        for index in parse_indices(indices.strip("[]")):
            tasks = rows.setdefault(array, {})
            if not step:
                node = "" if "one assigned" in nodes else nodes
                elapsed_s = float(elapsed) if elapsed.strip().isdigit() else None
                tasks[index] = (name, TaskRecord(state, "", elapsed_s, node, parse_exit_code(exit_code)))
            elif index in tasks and base_state(state) == "OUT_OF_MEMORY":
                tasks[index] = (tasks[index][0], replace(tasks[index][1], out_of_memory=True))
    return rows


def _scontrol(job_id: str) -> Rows:
    """Query what the controller still has in memory of an array."""
    try:
        text = _query("scontrol", "--oneliner", "show", "job", job_id)
    except _NoAnswerError as error:
        if _NO_SUCH_JOB.search(error.text):
            return {}
        raise
    rows: Rows = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        task = TaskRecord(
            fields.get("JobState", ""),
            fields.get("Reason", ""),
            parse_elapsed(fields.get("RunTime", "")),
            fields.get("NodeList", "").strip("()").replace("null", ""),
            parse_exit_code(fields.get("ExitCode", "")),
        )
        for index in parse_indices(fields.get("ArrayTaskId", "")):
            rows.setdefault(fields.get("ArrayJobId", ""), {})[index] = (fields.get("JobName", ""), task)
    return rows


def _merge(report: SlurmReport, wanted: _Wanted, rows: Rows) -> None:
    """Add the rows of our arrays; a job with another name had the same id before, or has it now."""
    for job_id, tasks in rows.items():
        if job_id in wanted:
            record = wanted[job_id][0]
            array = report.arrays.setdefault(record.name, ArrayReport([job_id]))
            for index, (name, task) in tasks.items():
                if name == record.name:
                    _add(array, index, task)
