"""From run directories to rows: idempotent, incremental, safe for many processes at once and for a kill at any moment.

The directories are the truth and nothing here writes to them. Which files changed is found without a lock; the changed
ones are then read and written inside one transaction a batch of runs, with the bookkeeping of what was read, so that of
several commands each file is taken in by one, and never an older version after a newer one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, or_, select

from db.attempt_files import IngestProblem, Seen, files, ingest_problem, look, read_attempt
from db.connect import Store, open_store
from db.models import CONTENT, attempts, classes, epochs, ingested, ranks, results, runs
from db.rows import Row, run_rows, typed, upsert
from workloads.contract import State
from workloads.errors import InputError
from workloads.files.run_dir import AttemptDir, RunDir, run_dirs

RUNS_PER_TRANSACTION = 64
"""Bounds how long other commands wait for the write lock."""


@dataclass(slots=True)
class CollectReport:
    """What one call took in: files that were new or had changed."""

    runs: int = 0
    attempts: int = 0
    results: int = 0
    epochs: int = 0
    problems: list[IngestProblem] = field(default_factory=list)


def collect(store: Store, runs_folder: Path) -> CollectReport:
    """Take in what is new below the runs folder; what cannot be read is reported, and tried again each time."""
    runs_folder = runs_folder.absolute()
    collected = CollectReport()
    with store.read() as connection:
        known = _known(connection)

    def unreadable(error: OSError) -> None:
        collected.problems.append(ingest_problem(Path(error.filename or runs_folder), error))

    changed = (run for run in run_dirs(runs_folder, unreadable) if _has_changed(run, known, unreadable))
    while batch := list(islice(changed, RUNS_PER_TRANSACTION)):
        with store.write() as connection:
            _Batch(connection, runs_folder, collected).take_in(batch)
    return collected


def rebuild(store: Store, runs_folder: Path, *, drop_missing: bool = False) -> CollectReport:
    """Make the content anew from the directories, in one transaction: readers see the old content or the new one.

    What only the database can know stays: intents whose directory is about to be made, and the last that was seen of
    attempts whose files have no verdict yet.

    Args:
        store: open for writing.
        runs_folder: what the content is made from.
        drop_missing: whether runs, attempts and what they measured may go that have no files there.

    Raises:
        InputError: such would go; nothing was changed.
    """
    with tempfile.TemporaryDirectory() as folder, open_store(str(Path(folder) / "fresh.db")) as fresh:
        collect(fresh, runs_folder)
        with store.write() as target, _caught_up(fresh, runs_folder) as (source, left_out):
            old_runs = {row.run_id: tuple(row) for row in target.execute(select(runs))}
            old_attempts = target.execute(select(attempts)).mappings().all()
            old_keys = {table: _keys(target, table) for table in _LOSSES}
            for table in (*reversed(CONTENT), ingested):
                target.execute(delete(table))
            for table in (*CONTENT, ingested):
                for part in source.execute(select(table)).partitions(10_000):
                    upsert(target, table, [tuple(row) for row in part])
            _carry_over(target, old_runs, old_attempts)
            for table, counted in () if drop_missing else _LOSSES.items():
                if lost := old_keys[table] - _keys(target, table):
                    why = "; ".join([_named(lost), *(f"{problem.path}: {problem.what}" for problem in left_out[:3])])
                    raise InputError(
                        f"{len(lost)} of {len(old_keys[table])} {counted} in {runs_folder}",
                        where=store.database,
                        why=f"they would be lost: {why}",
                        hint="name the right folder with --runs, or add --drop-missing",
                    )
    # The directories may have changed while the new content was made.
    problems = collect(store, runs_folder).problems
    with store.read() as connection:
        counts = {
            t.name: connection.execute(select(func.count()).select_from(t)).scalar_one()
            for t in (runs, attempts, results, epochs)
        }
    return CollectReport(**counts, problems=problems)


_LOSSES: dict[Table, str] = {
    runs: "runs in the database have no readable directory",
    attempts: "attempts in the database have no readable files",
    results: "results in the database have no readable file",
    epochs: "epochs in the database are in no readable file",
}
"""What a rebuild loses by leave only, and how it is said, the largest loss first."""


@contextmanager
def _caught_up(fresh: Store, runs_folder: Path) -> Iterator[tuple[Connection, list[IngestProblem]]]:
    """The new content once more up to date, now that no other command can take in what it does not have."""
    left_out = collect(fresh, runs_folder).problems
    with fresh.read() as source:
        yield source, left_out


def _keys(connection: Connection, table: Table) -> set[Row]:
    return {tuple(row) for row in connection.execute(select(*table.primary_key.columns))}


def _named(lost: set[Row]) -> str:
    """The first few of what is lost, as ``RUN``, ``RUN attempt 1`` or ``RUN attempt 1 epoch 2``."""
    words = ("", " attempt ", " epoch ")
    names = ["".join(f"{word}{part}" for word, part in zip(words, key, strict=False)) for key in sorted(lost)[:3]]
    return ", ".join(names) + (", ..." if len(lost) > len(names) else "")


def _carry_over(target: Connection, old_runs: Mapping[str, Row], old_attempts: Iterable[Mapping[Any, Any]]) -> None:
    """Keep what the earlier content knew of attempts that the directories do not settle."""
    fresh = {(row["run_id"], row["attempt"]): row for row in target.execute(select(attempts)).mappings()}
    fresh_runs = set(target.execute(select(runs.c.run_id)).scalars())
    kept_runs: dict[str, Row] = {}
    kept: list[Mapping[Any, Any]] = []
    for old in old_attempts:
        new = fresh.get((old["run_id"], old["attempt"]))
        if new is None and State(old["state"]).live:
            kept.append(old)
            if old["run_id"] not in fresh_runs:
                kept_runs[old["run_id"]] = old_runs[old["run_id"]]
        elif new is not None and (State(new["state"]).live or new["state"] == State.LOST):
            if old["state"] == State.SUCCEEDED:
                continue  # success is the result's to say, and there is none any more
            written = {name: value for name, value in new.items() if value not in {None, "", "{}"}}
            said = {name: old[name] for name in ("state", "reason", "message", "ended_at")}
            kept.append({**old, **written, **said})
    upsert(target, runs, list(kept_runs.values()))
    upsert(target, attempts, [tuple(row[c.name] for c in attempts.columns) for row in kept])


def _known(connection: Connection, paths: Iterable[Path] | None = None) -> dict[str, Seen]:
    """What was read of these files, or of all."""
    query = select(ingested)
    if paths is not None:
        query = query.where(ingested.c.path.in_([_key(path) for path in paths]))
    return {row.path: Seen(row.size, row.mtime_ns, row.read_bytes) for row in connection.execute(query)}


def _key(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _has_changed(run: RunDir, known: Mapping[str, Seen], unreadable: Callable[[OSError], None]) -> bool:
    try:
        paths = [run.spec, *(path for attempt in run.attempts() for path in files(attempt))]
        return any((now := look(path)) is not None and not now.is_same_file(known.get(_key(path))) for path in paths)
    except OSError as error:
        unreadable(error)
        return False


class _Batch:
    """Some runs, read and written inside one transaction."""

    def __init__(self, connection: Connection, folder: Path, collected: CollectReport) -> None:
        self._connection = connection
        self._folder = folder
        self._collected = collected
        self._known: dict[Path, Seen] = {}
        self._runs: set[str] = set()
        self._attempts: dict[tuple[str, int], dict[str, Any]] = {}
        self._rows: dict[Table, list[Row]] = {table: [] for table in (*CONTENT, ingested)}

    def take_in(self, batch: list[RunDir]) -> None:
        found: dict[RunDir, list[AttemptDir]] = {}
        for run in batch:
            with self._reported(run.path):
                found[run] = run.attempts()
        self._load(found)
        for run, attempt_dirs in found.items():
            with self._reported(run.spec):
                self._read_spec(run, has_attempts=bool(attempt_dirs))
            if run.run_id in self._runs:
                for attempt in attempt_dirs:
                    with self._reported(attempt.path):
                        self._read_attempt(run.run_id, attempt)
        self._settle_tokens()
        self._write()

    def _load(self, found: Mapping[RunDir, list[AttemptDir]]) -> None:
        """What the store has of these runs, now that nobody else can change it."""
        paths = [*(run.spec for run in found), *(path for dirs in found.values() for a in dirs for path in files(a))]
        known = _known(self._connection, paths)
        self._known = {path: known[_key(path)] for path in paths if _key(path) in known}
        run_ids = [run.run_id for run in found]
        self._runs = set(self._connection.execute(select(runs.c.run_id).where(runs.c.run_id.in_(run_ids))).scalars())
        for row in self._connection.execute(select(attempts).where(attempts.c.run_id.in_(run_ids))).mappings():
            kept = {name: json.loads(row[name]) for name in ("shape", "recovery") if row[name] is not None}
            self._attempts[row["run_id"], row["attempt"]] = {**row, **kept}

    def _read_spec(self, run: RunDir, *, has_attempts: bool) -> None:
        now = look(run.spec)
        if now is None:
            if has_attempts and run.run_id not in self._runs:
                raise ValueError("missing, so nobody knows what its attempts are")
        elif not now.is_same_file(self._known.get(run.spec)):
            self._rows[runs] += run_rows([run.read_spec()])
            self._runs.add(run.run_id)
            self._has_seen(run.spec, now)
            self._collected.runs += 1

    def _read_attempt(self, run_id: str, attempt: AttemptDir) -> None:
        reading = read_attempt(run_id, attempt, self._attempts.get((run_id, attempt.number)), self._known)
        if reading is None:
            return
        self._collected.problems += reading.problems
        self._collected.attempts += 1
        self._collected.results += reading.result is not None
        self._collected.epochs += len(reading.epochs)
        self._rows[attempts].append(typed(attempts, reading.values))
        self._rows[results] += [reading.result] if reading.result else []
        self._rows[classes] += reading.classes
        self._rows[ranks] += reading.ranks
        self._rows[epochs] += reading.epochs
        for path, seen in reading.seen.items():
            self._has_seen(path, seen)

    def _has_seen(self, path: Path, seen: Seen) -> None:
        self._rows[ingested].append((_key(path), seen.size, seen.mtime_ns, seen.read_bytes))

    def _settle_tokens(self) -> None:
        """A copied directory brings along the token of another attempt, which stays that attempt's."""
        rows = [dict(zip(attempts.columns.keys(), row, strict=True)) for row in self._rows[attempts]]
        tokens = [row["token"] for row in rows if row["token"] is not None]
        owned = select(attempts.c.token, attempts.c.run_id, attempts.c.attempt).where(attempts.c.token.in_(tokens))
        owners = {token: (run_id, attempt) for token, run_id, attempt in self._connection.execute(owned)}
        for row in rows:
            key = (row["run_id"], row["attempt"])
            owner = owners.setdefault(row["token"], key) if row["token"] is not None else key
            if owner != key:
                row["token"] = None
                what = (
                    f"attempt {key[1]} of run {key[0]} has the token of attempt {owner[1]} of run {owner[0]}: a copy?"
                )
                self._collected.problems.append(IngestProblem(self._folder, what))
        self._rows[attempts] = [tuple(row.values()) for row in rows]

    def _write(self) -> None:
        again = [row[:2] for row in self._rows[results]]
        if again:
            for table in (classes, ranks):
                same = [and_(table.c.run_id == run_id, table.c.attempt == attempt) for run_id, attempt in again]
                self._connection.execute(delete(table).where(or_(*same)))
        for table, rows in self._rows.items():
            upsert(self._connection, table, rows)

    @contextmanager
    def _reported(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RecursionError) as error:
            self._collected.problems.append(ingest_problem(path, error))
