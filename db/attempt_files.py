"""What the files of one attempt say, as rows. Reads files, knows no database."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from db.models import attempts, classes, epochs, ranks, results
from db.rows import Row, typed, typed_all
from workloads.contract import RANK_LOST, State
from workloads.files.event_log import read_events
from workloads.files.json_file import read_json
from workloads.files.run_dir import AttemptDir


@dataclass(frozen=True, slots=True)
class IngestProblem:
    """A file or folder that could not be taken in. It is tried again each time."""

    path: Path
    what: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as it was when it was last read."""

    size: int
    mtime_ns: int
    read_bytes: int = 0
    """How far an append-only file was read."""

    def is_same_file(self, other: Seen | None) -> bool:
        return other is not None and (self.size, self.mtime_ns) == (other.size, other.mtime_ns)


def look(path: Path) -> Seen | None:
    """A file as it is now; None when there is none.

    Raises:
        OSError: its folder cannot be read.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Seen(status.st_size, status.st_mtime_ns)


def files(attempt: AttemptDir) -> tuple[Path, ...]:
    """The files of an attempt that are taken in."""
    return (attempt.submission, attempt.exit, attempt.result, attempt.events())


@dataclass(slots=True)
class AttemptReading:
    """What was read of one attempt."""

    values: dict[str, Any]
    """Its row of the table ``attempts``, by column."""
    result: Row | None = None
    classes: list[Row] = field(default_factory=list)
    ranks: list[Row] = field(default_factory=list)
    epochs: list[Row] = field(default_factory=list)
    seen: dict[Path, Seen] = field(default_factory=dict)
    """The files that were read, as they were."""
    problems: list[IngestProblem] = field(default_factory=list)


def read_attempt(
    run_id: str, folder: AttemptDir, before: Mapping[str, Any] | None, known: Mapping[Path, Seen]
) -> AttemptReading | None:
    """Read what changed in an attempt's folder; None when nothing did.

    Args:
        run_id: its run.
        folder: where it lies.
        before: the row the store has, if any.
        known: files as they were when they were last read.

    Raises:
        OSError: the folder cannot be read.
    """
    now = {path: seen for path in files(folder) if (seen := look(path)) is not None}
    changed = {path for path, seen in now.items() if not seen.is_same_file(known.get(path))}
    if not changed:
        return None
    start = {"run_id": run_id, "attempt": folder.number, "target": "", "reason": "", "message": "", "shape": {}}
    reading = AttemptReading(dict(before or start))
    if before is None or changed - {folder.events()}:
        _read_verdict(reading, folder, now)
    if folder.events() in changed:
        _read_events(reading, folder, now[folder.events()], known.get(folder.events()))
    return reading


def _read_verdict(reading: AttemptReading, folder: AttemptDir, now: Mapping[Path, Seen]) -> None:
    """State and circumstances: from the result, else from how the attempt was seen to end, else what the store says."""
    values = reading.values

    def told(path: Path, read: Callable[[], dict[str, Any]]) -> bool:
        if path not in now:
            return False
        try:
            said = {**values, "state": State.LOST, **read()}
            typed(attempts, said)
        except (OSError, ValueError, RecursionError) as error:
            reading.problems.append(ingest_problem(path, error))
            return False
        values.update(said)
        reading.seen[path] = now[path]
        return True

    state = values.get("state")
    sent = told(folder.submission, lambda: _submission(folder))
    ended = told(folder.exit, lambda: _exit(folder))
    seen = {name: values.get(name) for name in ("state", "reason", "message")} if ended else None
    if told(folder.result, lambda: _result(reading, folder)):
        if values["reason"] == RANK_LOST:
            # What it measured counts; how the job ended is for whoever saw all of it.
            values |= seen or {"state": State.RUNNING, "reason": "", "message": ""}
        return
    if ended:
        return
    if sent and state in {None, State.SUBMITTING}:
        state = State.PENDING if values.get("job_id") else State.SUBMITTING
    if state is None:
        values["message"] = "nothing says who sent it"
    values["state"] = state or State.LOST


def _submission(folder: AttemptDir) -> dict[str, Any]:
    said = _object(folder.submission)
    if said.get("attempt", folder.number) != folder.number:
        raise ValueError(f"belongs to attempt {said['attempt']}")
    names = ("token", "target", "job_id", "submitted_at", "time_limit_s", "shape", "recovery")
    values = {name: said[name] for name in names if said.get(name) is not None}
    if "job_id" in values:
        values["job_id"] = str(values["job_id"])
    return values


def _exit(folder: AttemptDir) -> dict[str, Any]:
    said = _object(folder.exit)
    values = {
        "state": _end_state(said.get("state")),
        "reason": said.get("reason") or "",
        "message": said.get("message") or "",
        "ended_at": said.get("ended_at"),
    }
    if values["state"] == State.SUCCEEDED:
        # Success is the result's to say: a run counts as done when there is something to show for it.
        values |= {"state": State.FAILED, "reason": "no_result", "message": "it ended without error and left no result"}
    return values


def _result(reading: AttemptReading, folder: AttemptDir) -> dict[str, Any]:
    result = folder.read_result()
    keys = {"run_id": result.run_id, "attempt": result.attempt}
    for name, kind in (("provenance", dict), ("nonfinite", dict), ("per_class", list), ("memory_by_rank", list)):
        if not isinstance(getattr(result, name), kind):
            raise ValueError(f"{name} is not a {kind.__name__}")
    digests = {name: result.provenance.get(name) for name in ("code_digest", "packages_digest")}
    row = typed(results, {**result.to_json(), **digests})
    by_class = [typed(classes, {**_each(c), **keys, "class_index": i}) for i, c in enumerate(result.per_class)]
    by_rank = [typed(ranks, {**_each(r), **keys}) for r in result.memory_by_rank]
    values = {"state": _end_state(result.state), "reason": result.reason, "message": result.message}
    known = reading.values
    times = {
        "started_at": known.get("started_at") or result.started_at,
        "ended_at": result.ended_at or known.get("ended_at"),
    }
    reading.result, reading.classes, reading.ranks = row, by_class, by_rank
    return {**values, **times}


def _read_events(reading: AttemptReading, folder: AttemptDir, now: Seen, before: Seen | None) -> None:
    path = folder.events()
    # A file that shrank is another one.
    offset = before.read_bytes if before is not None and before.read_bytes <= now.size else 0
    try:
        events, end = read_events(path, offset, "start", "epoch")
    except (OSError, RecursionError) as error:
        reading.problems.append(ingest_problem(path, error))
        return
    reading.seen[path] = replace(now, read_bytes=end)
    starts = [e for e in events if e["event"] == "start"]
    if starts and (offset == 0 or not reading.values.get("started_at")):
        reading.values["started_at"] = _utc(starts[0].get("time")) or reading.values.get("started_at")
    keys = {"run_id": reading.values["run_id"], "attempt": reading.values["attempt"]}
    found = [event | keys | {"diverged": _has_diverged(event)} for event in events if event["event"] == "epoch"]
    try:
        reading.epochs = typed_all(epochs, found)
    except ValueError:
        for event in found:
            try:
                reading.epochs.append(typed(epochs, event))
            except ValueError as error:
                reading.problems.append(IngestProblem(path, f"an epoch's {error}"))


def ingest_problem(path: Path, error: BaseException) -> IngestProblem:
    """What a person is told of a file that could not be read."""
    if isinstance(error, OSError):
        return IngestProblem(path, error.strerror or str(error))
    if isinstance(error, RecursionError):
        return IngestProblem(path, "nested too deeply")
    return IngestProblem(path, str(error).removeprefix(f"{path}: "))


def _object(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _each(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f"{item!r} is not a JSON object")
    return item


def _end_state(word: Any) -> State:
    state = State(word)
    if state.live or state is State.PLANNED:
        raise ValueError(f"state {word!r} is no end")
    return state


def _has_diverged(event: Mapping[str, Any]) -> bool:
    """The writer turns NaN and infinity into null; a loss that was not measured is not there at all."""
    losses = [event.get("train_loss", 0.0), event.get("test_loss", 0.0)]
    return any(loss is None or (isinstance(loss, float) and not math.isfinite(loss)) for loss in losses)


def _utc(time_s: Any) -> str | None:
    try:
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
    except (TypeError, ValueError, OverflowError, OSError):
        return None
