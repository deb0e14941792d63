"""Asking Slurm: one ``squeue`` and at most one ``sacct`` for any number of arrays, no more often than the site allows.

Of what ``squeue`` lists an array is known by its name, so that one whose number is not known yet is found too, and a
number that was used before is never taken for ours. It lists ended jobs for some minutes. ``sacct`` is asked for tasks
that have ended or are not listed; where there is no accounting ``scontrol`` is. Answers are kept on disk: commands that
follow within ``poll_seconds`` read them there. After failures the pause grows.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.backends.slurm import commands
from orchestrator.backends.slurm.commands import Answer
from orchestrator.backends.slurm.records import ArrayRecord, ClusterFolder, ClusterLimits
from orchestrator.backends.slurm.status import Phase, base_state, parse_indices, phase_of
from workloads.files.json_file import read_json, write_json

log = logging.getLogger(__name__)

IDS_PER_CALL = 200
QUEUED_AGE_S = 2.0
LONGEST_PAUSE = 8
"""After failed polls the pause grows to this many times ``poll_seconds``."""
NO_ACCOUNTING = re.compile(r"accounting storage is disabled|[Nn]o accounting|Slurm accounting", re.IGNORECASE)
_NO_SUCH_JOB = re.compile(r"Invalid job id", re.IGNORECASE)
_SACCT_FIELDS = "JobID,JobName,State,ExitCode,ElapsedRaw,NodeList"
_SQUEUE_FIELDS = "%F|%K|%j|%T|%M|%N|%r"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the scheduler says of one task."""

    state: str
    reason: str = ""
    elapsed_s: float | None = None
    node: str = ""
    exit_code: int | None = None
    out_of_memory: bool = False
    """Whether a step of it was ended for its memory."""

    @property
    def phase(self) -> Phase:
        return phase_of(self.state)


@dataclass(slots=True)
class SeenArray:
    """What the scheduler says of one array."""

    job_ids: list[str] = field(default_factory=list)
    """More than one when a lost answer led to a second job of the name."""
    tasks: dict[int, Seen] = field(default_factory=dict)


@dataclass(slots=True)
class Newest:
    """What was last heard; the content of ``newest.json``."""

    at: float = 0.0
    """When Slurm was last asked, seconds since the epoch."""
    heard_at: float = 0.0
    """When it last answered."""
    failures: int = 0
    problem: str = ""
    no_accounting: bool = False
    accounting_failed: bool = False
    """Accounting gave no answer, so what is not listed may have ended well."""
    queued: int = 0
    """How many jobs of this user waited or ran then, each task of an array counted."""
    arrays: dict[str, SeenArray] = field(default_factory=dict)
    """By the name of the array."""
    over_since: dict[str, float] = field(default_factory=dict)
    """Token of an attempt -> when it was first found neither waiting nor active."""
    clusters: dict[str, str] = field(default_factory=dict)
    """Host and configuration file -> name of the cluster that clients there talk to."""
    cluster: str = ""
    """The name of the cluster that arrays were sent to."""

    @classmethod
    def read(cls, folder: ClusterFolder) -> Newest:
        """An empty one when there is none, or a damaged one."""
        try:
            data: dict[str, Any] = read_json(folder.newest)
            arrays = {
                name: SeenArray(a["job_ids"], {int(i): Seen(**seen) for i, seen in a["tasks"].items()})
                for name, a in data.pop("arrays").items()
            }
            return cls(**data, arrays=arrays)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def write(self, folder: ClusterFolder) -> None:
        """Nobody's command may fail because this could not be kept."""
        arrays = {
            name: {"job_ids": array.job_ids, "tasks": {i: _plain(seen) for i, seen in array.tasks.items()}}
            for name, array in self.arrays.items()
        }
        try:
            write_json(folder.newest, _plain(self) | {"arrays": arrays}, durable=False)
        except OSError as error:
            log.warning("%s: cannot be written: %s", folder.newest, error.strerror)


def _plain(value: Any) -> dict[str, Any]:
    """The fields as they are: ``asdict`` copies each, which takes long for thousands of tasks."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def poll(folder: ClusterFolder, site: ClusterLimits, records: Sequence[ArrayRecord], *, fresh: bool = False) -> Newest:
    """What Slurm says of these arrays: the kept answer, or a new one when that is old enough or ``fresh`` is asked."""
    newest = Newest.read(folder)
    pause_s = site.poll_seconds * min(2**newest.failures, LONGEST_PAUSE)
    if not records or (not fresh and 0 <= time.time() - newest.at < pause_s):
        return newest
    newest.at = time.time()
    try:
        _check_cluster(newest)
        newest.arrays, newest.queued = _squeue([record.name for record in records])
        _ask_about_ended(newest, site, records)
        newest.heard_at, newest.failures, newest.problem = newest.at, 0, ""
    except _UnheardError as error:
        newest.failures, newest.problem = newest.failures + 1, str(error)
        log.warning("Slurm could not be asked, so states are as last seen: %s", error)
    newest.write(folder)
    return newest


def find(folder: ClusterFolder, site: ClusterLimits, record: ArrayRecord) -> list[str] | None:
    """Numbers of the jobs that have an array's name; None when nobody could be asked. Not rate-limited."""
    newest = Newest.read(folder)
    try:
        _check_cluster(newest)
        found = _squeue([record.name])[0].get(record.name, SeenArray()).job_ids
        if not found and site.accounting != "squeue" and not newest.no_accounting:
            found = _sacct_by_name(newest, record)
    except _UnheardError as error:
        log.warning("Slurm could not be asked: %s", error)
        return None
    newest.write(folder)
    return found


def num_queued(folder: ClusterFolder) -> tuple[int, float] | None:
    """How many jobs of this user wait or run, each task of an array counted, and when that was so.

    What :func:`poll` heard a moment ago will do. None when it cannot be told.
    """
    newest = Newest.read(folder)
    if not newest.problem and 0 <= time.time() - newest.heard_at < QUEUED_AGE_S:
        return newest.queued, newest.heard_at
    asked_at = time.time()
    answer = commands.run("squeue", "--noheader", f"--user={os.getuid()}", "--array", "--format=%i")
    return (len(answer.stdout.split()), asked_at) if answer.ok else None


class _UnheardError(Exception):
    """A question got no answer; nothing may be concluded from what is missing."""


def _ask(*argv: str) -> Answer:
    answer = commands.run(*argv)
    if not answer.ok:
        raise _UnheardError(f"{argv[0]}: {(answer.text or f'exit code {answer.exit_code}').splitlines()[0]}")
    return answer


def _check_cluster(newest: Newest) -> None:
    """Numbers of another cluster's jobs say nothing about ours."""
    key = f"{os.uname().nodename} {os.environ.get('SLURM_CONF', '')}"
    if key not in newest.clusters:
        match = re.search(r"^ClusterName\s*=\s*(\S+)", _ask("scontrol", "show", "config").stdout, re.MULTILINE)
        newest.clusters[key] = match[1] if match else ""
    here = newest.clusters[key]
    newest.cluster = newest.cluster or here
    if here != newest.cluster:
        raise _UnheardError(f"this machine talks to cluster {here}, the runs are on {newest.cluster}")


def _squeue(names: Sequence[str]) -> tuple[dict[str, SeenArray], int]:
    """What the queue has of these arrays, and how many jobs of this user wait or run.

    All jobs of the user are asked for: ``squeue`` itself would pick those of a name, the controller's work is the same.
    """
    answer = _ask("squeue", "--noheader", f"--user={os.getuid()}", "--states=all", f"--format={_SQUEUE_FIELDS}")
    arrays: dict[str, SeenArray] = {}
    wanted, queued = set(names), 0
    for line in answer.stdout.splitlines():
        words = line.split("|", 6)
        if len(words) != 7 or not words[0].strip().isdigit():
            continue
        job_id, tasks, name, state, elapsed, node, reason = (word.strip() for word in words)
        indices = parse_indices(tasks)
        queued += 0 if phase_of(state) is Phase.ENDED else len(indices) or 1
        if name not in wanted:
            continue
        array = arrays.setdefault(name, SeenArray())
        if job_id not in array.job_ids:
            array.job_ids.append(job_id)
        seen = Seen(state, reason, seconds(elapsed), "" if "(" in node else node)
        for index in indices:
            _prefer(array.tasks, index, seen)
    for array in arrays.values():
        array.job_ids.sort(key=int)
    return arrays, queued


def _prefer(tasks: dict[int, Seen], index: int, seen: Seen) -> None:
    """Of two jobs of one name the one that goes on counts."""
    known = tasks.get(index)
    if known is None or known.phase is Phase.ENDED:
        tasks[index] = seen


def _ask_about_ended(newest: Newest, site: ClusterLimits, records: Sequence[ArrayRecord]) -> None:
    """Fill in how tasks ended, from accounting or else from the controller."""
    wanted: dict[str, list[int]] = {}
    by_id = {}
    for record in records:
        if record.job_id is None:
            continue
        seen = newest.arrays.get(record.name, SeenArray()).tasks
        over = [i for i in range(len(record.tasks)) if i not in seen or seen[i].phase is Phase.ENDED]
        if over:
            wanted[record.job_id] = over
            by_id[record.job_id] = record
    if not wanted:
        return
    if not _ask_accounting(newest, site, by_id, wanted):
        for job_id, over in wanted.items():
            known = newest.arrays.get(by_id[job_id].name, SeenArray()).tasks
            # What squeue lists as ended well needs no more words.
            if any(i in known and base_state(known[i].state) != "COMPLETED" for i in over):
                _merge(newest, by_id, _scontrol(job_id))


def _ask_accounting(
    newest: Newest, site: ClusterLimits, by_id: Mapping[str, ArrayRecord], wanted: Mapping[str, Sequence[int]]
) -> bool:
    """Ask ``sacct`` about tasks; whether it answered."""
    newest.accounting_failed = False
    if site.accounting == "squeue" or newest.no_accounting:
        return False
    tasks = [f"{job_id}_{i}" for job_id, over in wanted.items() for i in over]
    ids = tasks if len(tasks) <= IDS_PER_CALL else list(wanted)
    for batch in commands.batches(ids, IDS_PER_CALL):
        answer = commands.run("sacct", *_SACCT, f"--jobs={','.join(batch)}")
        if not answer.ok:
            if site.accounting == "auto" and NO_ACCOUNTING.search(answer.text):
                newest.no_accounting = True
            else:
                newest.accounting_failed = True
                log.warning("Slurm's accounting could not be asked: %s", answer.text or answer.exit_code)
            return False
        _merge(newest, by_id, _sacct_rows(answer.stdout))
    return True


_SACCT = ("--noheader", "--parsable2", f"--format={_SACCT_FIELDS}")


def _sacct_rows(text: str) -> dict[str, dict[int, tuple[str, Seen]]]:
    """Array -> index -> (name, what accounting says); the states of steps only tell of the memory limit."""
    rows: dict[str, dict[int, tuple[str, Seen]]] = {}
    for line in text.splitlines():
        words = line.split("|")
        if len(words) != 6:
            continue
        job_id, name, state, exit_code, elapsed, nodes = words
        whole, _, step = job_id.partition(".")
        array, _, indices = whole.partition("_")
        for index in parse_indices(indices.strip("[]")):
            tasks = rows.setdefault(array, {})
            if step:
                if index in tasks and base_state(state) == "OUT_OF_MEMORY":
                    tasks[index] = (tasks[index][0], replace(tasks[index][1], out_of_memory=True))
                continue
            node = "" if "one assigned" in nodes else nodes
            tasks[index] = (name, Seen(state, "", _number(elapsed), node, parse_exit_code(exit_code)))
    return rows


def _sacct_by_name(newest: Newest, record: ArrayRecord) -> list[str]:
    """By name, since a day before it was sent: clocks differ."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.asked_at - 86400))
    answer = commands.run("sacct", *_SACCT, f"--name={record.name}", f"--starttime={since}", "--allocations")
    if not answer.ok:
        if NO_ACCOUNTING.search(answer.text):
            newest.no_accounting = True
            return []
        raise _UnheardError(f"sacct: {answer.text.splitlines()[0] if answer.text else answer.exit_code}")
    rows = _sacct_rows(answer.stdout)
    return sorted((a for a, tasks in rows.items() if any(n == record.name for n, _ in tasks.values())), key=int)


def _scontrol(job_id: str) -> dict[str, dict[int, tuple[str, Seen]]]:
    """What the controller still knows of an array."""
    answer = commands.run("scontrol", "--oneliner", "show", "job", job_id)
    if not answer.ok:
        if _NO_SUCH_JOB.search(answer.text):
            return {}
        raise _UnheardError(f"scontrol: {answer.text.splitlines()[0] if answer.text else answer.exit_code}")
    rows: dict[str, dict[int, tuple[str, Seen]]] = {}
    for line in answer.stdout.splitlines():
        found = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        seen = Seen(
            found.get("JobState", ""),
            found.get("Reason", ""),
            seconds(found.get("RunTime", "")),
            found.get("NodeList", "").strip("()").replace("null", ""),
            parse_exit_code(found.get("ExitCode", "")),
        )
        for index in parse_indices(found.get("ArrayTaskId", "")):
            rows.setdefault(found.get("ArrayJobId", ""), {})[index] = (found.get("JobName", ""), seen)
    return rows


def _merge(
    newest: Newest, by_id: Mapping[str, ArrayRecord], rows: Mapping[str, Mapping[int, tuple[str, Seen]]]
) -> None:
    """Take over what is said of our tasks; a job of another name has had the number before, or has it now."""
    for job_id, tasks in rows.items():
        record = by_id.get(job_id)
        if record is None:
            continue
        array = newest.arrays.setdefault(record.name, SeenArray([job_id]))
        for index, (name, seen) in tasks.items():
            known = array.tasks.get(index)
            if name == record.name and (known is None or known.phase is Phase.ENDED):
                array.tasks[index] = seen


def seconds(text: str) -> float | None:
    """Slurm's ``[days-][hours:]minutes:seconds``; None for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, rest = (int(word or 0) for word in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def parse_exit_code(text: str) -> int | None:
    """The exit code in ``75:0``; a signal is negative, as in ``0:9``."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None:
        return None
    code, signal = int(match[1]), int(match[2])
    return code if code or not signal else -signal


def _number(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None
