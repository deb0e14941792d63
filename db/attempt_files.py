"""Reading the files of one attempt into rows. Knows no database."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Table

from db.models import attempts, classes, epochs, ranks, results
from db.rows import Row, typed, typed_all
from workloads.contract import RANK_LOST, State
from workloads.files.event_log import read_events
from workloads.files.json_file import read_object
from workloads.files.run_dir import AttemptDir

UNREADABLE = (OSError, ValueError, RecursionError)
"""What reading a file raises that is missing, damaged, or JSON nested too deeply for Python's parser."""


@dataclass(frozen=True, slots=True)
class IngestProblem:
    """A file or folder that could not be ingested. Every later ``collect`` tries it again."""

    path: Path
    what: str

    @classmethod
    def of(cls, path: Path, error: BaseException) -> Self:
        """Return what people read about a file that could not be read."""
        if isinstance(error, OSError):
            return cls(path, error.strerror or str(error))
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error).removeprefix(f"{path}: ")
        return cls(path, what)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size and time of a file when it was last read."""

    size: int
    mtime_ns: int
    read_bytes: int = 0
    """How far an append-only file was read."""

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Return a file's stamp now; None when it does not exist. Raises OSError if its folder cannot be read."""
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(status.st_size, status.st_mtime_ns)

    def is_same_file(self, other: FileStamp | None) -> bool:
        return other is not None and (self.size, self.mtime_ns) == (other.size, other.mtime_ns)


def ingested_files(attempt: AttemptDir) -> tuple[Path, ...]:
    return (attempt.submission, attempt.exit, attempt.result, attempt.events())


@dataclass(slots=True)
class AttemptReading:
    """What was read of one attempt."""

    values: dict[str, Any]
    """Its row of the table ``attempts``, by column."""
    rows: dict[Table, list[Row]] = field(default_factory=lambda: {t: [] for t in (results, classes, ranks, epochs)})
    """Of the tables that belong to an attempt."""
    stamps: dict[Path, FileStamp] = field(default_factory=dict)
    """Of the files that were read."""
    problems: list[IngestProblem] = field(default_factory=list)


def read_attempt(
    run_id: str, folder: AttemptDir, stored: Mapping[str, Any] | None, known: Mapping[Path, FileStamp]
) -> AttemptReading | None:
    """Read the files of an attempt that have changed; None when none has. Raises OSError if the folder is unreadable.

    ``stored`` is its row in the store, if any, by column; ``known`` has the stamps of files as they were last read.
    """
    now = {path: stamp for path in ingested_files(folder) if (stamp := FileStamp.of(path)) is not None}
    changed = {path for path, stamp in now.items() if not stamp.is_same_file(known.get(path))}
    if not changed:
        return None
    new = {"run_id": run_id, "attempt": folder.number, "target": "", "reason": "", "message": "", "shape": {}}
    reading = AttemptReading(dict(stored or new))
    events = folder.events()
    if stored is None or changed - {events}:
        _read_state(reading, folder, now)
    if events in changed:
        _read_events(reading, events, now[events], known.get(events))
    return reading


def _read_state(reading: AttemptReading, folder: AttemptDir, now: Mapping[Path, FileStamp]) -> None:
    """Read the state from the result, else from ``exit.json``; where both are missing, the stored one stays."""
    values = reading.values

    def read(path: Path, parse: Callable[[], dict[str, Any]]) -> bool:
        """Update the values from a file; return whether it exists and is valid."""
        if path not in now:
            return False
        try:
            updated = {**values, "state": State.LOST, **parse()}
            typed(attempts, updated)
        except UNREADABLE as error:
            reading.problems.append(IngestProblem.of(path, error))
            return False
        values.update(updated)
        reading.stamps[path] = now[path]
        return True

    state = values.get("state")
    submitted = read(folder.submission, lambda: _submission(folder))
    ended = read(folder.exit, lambda: _exit(folder))
    observed = {name: values.get(name) for name in ("state", "reason", "message")} if ended else None
    if read(folder.result, lambda: _result(reading, folder)):
        if values["reason"] == RANK_LOST:
            # The rank that wrote it only lost its peer. What it measured counts; exit.json has the job's end.
            values |= observed or {"state": State.RUNNING, "reason": "", "message": ""}
        return
    if ended:
        return
    if submitted and state in {None, State.SUBMITTING}:
        state = State.PENDING if values.get("job_id") else State.SUBMITTING
    if state is None:
        values["message"] = "submission.json is missing"
    values["state"] = state or State.LOST


def _submission(folder: AttemptDir) -> dict[str, Any]:
    data = read_object(folder.submission)
    if data.get("attempt", folder.number) != folder.number:
        raise ValueError(f"belongs to attempt {data['attempt']}")
    names = ("token", "target", "job_id", "submitted_at", "time_limit_s", "shape", "recovery")
    values = {name: data[name] for name in names if data.get(name) is not None}
    if "job_id" in values:
        values["job_id"] = str(values["job_id"])
    return values


def _exit(folder: AttemptDir) -> dict[str, Any]:
    data = read_object(folder.exit)
    state = _end_state(data.get("state"))
    values = {"state": state, "reason": data.get("reason") or "", "message": data.get("message") or ""}
    if state == State.SUCCEEDED:
        # Only a result makes a success: a run counts as done when there are numbers.
        values = {"state": State.FAILED, "reason": "no_result", "message": "it ended without error and left no result"}
    return {**values, "ended_at": data.get("ended_at")}


def _result(reading: AttemptReading, folder: AttemptDir) -> dict[str, Any]:
    result = folder.read_result()
    for name, kind in (("provenance", dict), ("nonfinite", dict), ("per_class", list), ("memory_by_rank", list)):
        if not isinstance(getattr(result, name), kind):
            raise ValueError(f"{name} is not a {kind.__name__}")
    key = {"run_id": result.run_id, "attempt": result.attempt}
    digests = {name: result.provenance.get(name) for name in ("code_digest", "packages_digest")}
    rows = {
        results: [typed(results, {**result.to_json(), **digests})],
        classes: [typed(classes, {**_object(c), **key, "class_index": i}) for i, c in enumerate(result.per_class)],
        ranks: [typed(ranks, {**_object(rank), **key}) for rank in result.memory_by_rank],
    }
    stored = reading.values
    values = {
        "state": _end_state(result.state),
        "reason": result.reason,
        "message": result.message,
        "started_at": stored.get("started_at") or result.started_at,
        "ended_at": result.ended_at or stored.get("ended_at"),
    }
    reading.rows |= rows
    return values


def _read_events(reading: AttemptReading, path: Path, now: FileStamp, before: FileStamp | None) -> None:
    # A file that shrank was replaced.
    offset = before.read_bytes if before is not None and before.read_bytes <= now.size else 0
    try:
        events, end = read_events(path, offset, "start", "epoch")
    except (OSError, RecursionError) as error:
        reading.problems.append(IngestProblem.of(path, error))
        return
    reading.stamps[path] = replace(now, read_bytes=end)
    values = reading.values
    starts = [e for e in events if e["event"] == "start"]
    if starts and (offset == 0 or not values.get("started_at")):
        values["started_at"] = _utc(starts[0].get("time")) or values.get("started_at")
    key = {"run_id": values["run_id"], "attempt": values["attempt"]}
    found = [event | key | {"diverged": _has_diverged(event)} for event in events if event["event"] == "epoch"]
    try:
        reading.rows[epochs] = typed_all(epochs, found)
    except ValueError:
        for event in found:
            try:
                reading.rows[epochs].append(typed(epochs, event))
            except ValueError as error:
                reading.problems.append(IngestProblem(path, f"an epoch's {error}"))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is not a JSON object")
    return value


def _end_state(word: Any) -> State:
    state = State(word)
    if state.live or state is State.PLANNED:
        raise ValueError(f"state {word!r} is not the end of an attempt")
    return state


def _has_diverged(event: Mapping[str, Any]) -> bool:
    """Whether a loss was NaN or infinite: the job writes those as null, and leaves out what it did not measure."""
    losses = [event.get("train_loss", 0.0), event.get("test_loss", 0.0)]
    return any(loss is None or (isinstance(loss, float) and not math.isfinite(loss)) for loss in losses)


def _utc(time_s: Any) -> str | None:
    try:
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
    except (TypeError, ValueError, OverflowError, OSError):
        return None
