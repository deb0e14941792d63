"""From run directories to rows: idempotent, incremental, safe for many processes at once and for a kill at any moment.

The directories are the truth, and nothing here writes to them. Which files have changed is found out without a lock.
They are then read and written inside one transaction per batch of runs, together with their stamps: of several commands
at once, one ingests each file, and no older version replaces a newer one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, RowMapping, Table, delete, select, tuple_

from db.attempt_files import UNREADABLE, FileStamp, IngestProblem, ingested_files, read_attempt
from db.connect import Store, open_store
from db.models import CONTENT, JsonObject, attempts, classes, epochs, ingested, ranks, results, runs
from db.rows import Row, count_rows, run_rows, typed, upsert
from workloads.contract import State
from workloads.errors import InputError
from workloads.files.run_dir import AttemptDir, RunDir, run_dirs

RUNS_PER_TRANSACTION = 64
"""Bounds how long other commands wait for the write lock."""


@dataclass(slots=True)
class CollectReport:
    """What one call ingested: the files that were new or had changed."""

    runs: int = 0
    attempts: int = 0
    results: int = 0
    epochs: int = 0
    problems: list[IngestProblem] = field(default_factory=list)


def collect(store: Store, runs_folder: Path) -> CollectReport:
    """Ingest the files below the runs folder that are new or have changed; report those that cannot be read."""
    runs_folder = runs_folder.absolute()
    report = CollectReport()
    with store.read() as connection:
        known = _stamps(connection)

    def unreadable(error: OSError) -> None:
        report.problems.append(IngestProblem.of(Path(error.filename or runs_folder), error))

    changed = (run for run in run_dirs(runs_folder, unreadable) if _has_changed(run, known, unreadable))
    while batch := list(islice(changed, RUNS_PER_TRANSACTION)):
        with store.write() as connection:
            _Batch(connection, runs_folder, report).ingest(batch)
    return report


def rebuild(store: Store, runs_folder: Path, *, drop_missing: bool = False) -> CollectReport:
    """Replace the content by that of the directories, in one transaction: readers see the old content or the new one.

    What only the database knows is kept: intents whose directory is about to be created, and the last observation of
    attempts whose files do not say how they ended.

    Without ``drop_missing``, InputError is raised and nothing changed where runs, attempts, results or epochs would be
    dropped because they have no files.
    """
    with tempfile.TemporaryDirectory() as folder, open_store(str(Path(folder) / "fresh.db")) as fresh:
        collect(fresh, runs_folder)
        with store.write() as target:
            # Again, now that no other command can ingest what the new content does not have.
            problems = collect(fresh, runs_folder).problems
            old_runs = {row.run_id: tuple(row) for row in target.execute(select(runs))}
            old_attempts = target.execute(select(attempts)).mappings().all()
            old_keys = {table: _keys(target, table) for table in _LOSSES}
            for table in (*reversed(CONTENT), ingested):
                target.execute(delete(table))
            with fresh.read() as source:
                for table in (*CONTENT, ingested):
                    for part in source.execute(select(table)).partitions(10_000):
                        upsert(target, table, [tuple(row) for row in part])
            _keep_unsettled(target, old_runs, old_attempts)
            for table, description in () if drop_missing else _LOSSES.items():
                if lost := old_keys[table] - _keys(target, table):
                    causes = "; ".join([_names(lost), *(f"{problem.path}: {problem.what}" for problem in problems[:3])])
                    raise InputError(
                        f"{len(lost)} of {len(old_keys[table])} {description} in {runs_folder}",
                        where=store.database,
                        why=f"they would be lost: {causes}",
                        hint="name the right folder with --runs, or add --drop-missing",
                    )
    # The directories may have changed while the new content was written.
    problems = collect(store, runs_folder).problems
    with store.read() as connection:
        counts = {table.name: count_rows(connection, table) for table in _LOSSES}
    return CollectReport(**counts, problems=problems)


_LOSSES: dict[Table, str] = {
    runs: "runs in the database have no readable directory",
    attempts: "attempts in the database have no readable files",
    results: "results in the database have no readable file",
    epochs: "epochs in the database are in no readable file",
}
"""What a rebuild drops only with leave, in words; the largest loss first."""


def _keys(connection: Connection, table: Table) -> set[Row]:
    return {tuple(row) for row in connection.execute(select(*table.primary_key.columns))}


def _names(lost: set[Row]) -> str:
    """Return the first few keys as ``RUN``, ``RUN attempt 1`` or ``RUN attempt 1 epoch 2``."""
    words = ("", " attempt ", " epoch ")
    names = ["".join(f"{word}{part}" for word, part in zip(words, key, strict=False)) for key in sorted(lost)[:3]]
    return ", ".join(names) + (", ..." if len(lost) > len(names) else "")


_UNSETTLED = {state.value for state in State if state.live or state is State.LOST}


def _keep_unsettled(target: Connection, old_runs: Mapping[str, Row], old_attempts: Iterable[RowMapping]) -> None:
    """Keep what the earlier content knew of attempts whose files do not say how they ended."""
    fresh = {(row["run_id"], row["attempt"]): row for row in target.execute(select(attempts)).mappings()}
    fresh_runs = {run_id for (run_id,) in _keys(target, runs)}
    kept_runs: dict[str, Row] = {}
    kept: list[Row] = []
    for old in old_attempts:
        new = fresh.get((old["run_id"], old["attempt"]))
        values: dict[str, Any] = {}
        if new is None and State(old["state"]).live:
            values = {**old}
            if old["run_id"] not in fresh_runs:
                kept_runs[old["run_id"]] = old_runs[old["run_id"]]
        # Only a result makes a success, and its file does not exist any more.
        elif new is not None and new["state"] in _UNSETTLED and old["state"] != State.SUCCEEDED:
            written = {name: value for name, value in new.items() if value not in {None, "", "{}"}}
            observed = {name: old[name] for name in ("state", "reason", "message", "ended_at")}
            values = {**old, **written, **observed}
        if values:
            kept.append(tuple(values[c.name] for c in attempts.columns))
    upsert(target, runs, list(kept_runs.values()))
    upsert(target, attempts, kept)


def _stamps(connection: Connection, paths: Iterable[Path] | None = None) -> dict[str, FileStamp]:
    """Return the stamps of these files as they were last read, or of all."""
    query = select(ingested)
    if paths is not None:
        query = query.where(ingested.c.path.in_([_key(path) for path in paths]))
    return {row.path: FileStamp(row.size, row.mtime_ns, row.read_bytes) for row in connection.execute(query)}


def _key(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _has_changed(run: RunDir, known: Mapping[str, FileStamp], unreadable: Callable[[OSError], None]) -> bool:
    try:
        paths = [run.spec, *(path for attempt in run.attempts() for path in ingested_files(attempt))]
        return any((now := FileStamp.of(p)) is not None and not now.is_same_file(known.get(_key(p))) for p in paths)
    except OSError as error:
        unreadable(error)
        return False


class _Batch:
    """Some runs, read and written inside one transaction."""

    def __init__(self, connection: Connection, folder: Path, report: CollectReport) -> None:
        self._connection, self._folder, self._report = connection, folder, report
        self._stamps: dict[Path, FileStamp] = {}
        self._runs: set[str] = set()
        self._attempts: dict[tuple[str, int], dict[str, Any]] = {}
        self._rows: dict[Table, list[Row]] = {table: [] for table in (*CONTENT, ingested)}

    def ingest(self, batch: Sequence[RunDir]) -> None:
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
        self._drop_copied_tokens()
        self._write()

    def _load(self, found: Mapping[RunDir, list[AttemptDir]]) -> None:
        """Load what the store has of these runs, now that no other command can change it."""
        folders = [attempt for dirs in found.values() for attempt in dirs]
        paths = [*(run.spec for run in found), *(path for a in folders for path in ingested_files(a))]
        known = _stamps(self._connection, paths)
        self._stamps = {path: known[_key(path)] for path in paths if _key(path) in known}
        run_ids = [run.run_id for run in found]
        self._runs = set(self._connection.execute(select(runs.c.run_id).where(runs.c.run_id.in_(run_ids))).scalars())
        objects = [c.name for c in attempts.columns if isinstance(c.type, JsonObject)]
        for row in self._connection.execute(select(attempts).where(attempts.c.run_id.in_(run_ids))).mappings():
            parsed = {name: json.loads(row[name]) for name in objects if row[name] is not None}
            self._attempts[row["run_id"], row["attempt"]] = {**row, **parsed}

    def _read_spec(self, run: RunDir, *, has_attempts: bool) -> None:
        now = FileStamp.of(run.spec)
        if now is None:
            if has_attempts and run.run_id not in self._runs:
                raise ValueError("missing, so its attempts belong to no known run")
        elif not now.is_same_file(self._stamps.get(run.spec)):
            self._rows[runs] += run_rows([run.read_spec()])
            self._runs.add(run.run_id)
            self._add_stamp(run.spec, now)
            self._report.runs += 1

    def _read_attempt(self, run_id: str, attempt: AttemptDir) -> None:
        reading = read_attempt(run_id, attempt, self._attempts.get((run_id, attempt.number)), self._stamps)
        if reading is None:
            return
        self._report.problems += reading.problems
        self._report.attempts += 1
        self._report.results += len(reading.rows[results])
        self._report.epochs += len(reading.rows[epochs])
        self._rows[attempts].append(typed(attempts, reading.values))
        for table, rows in reading.rows.items():
            self._rows[table] += rows
        for path, stamp in reading.stamps.items():
            self._add_stamp(path, stamp)

    def _add_stamp(self, path: Path, stamp: FileStamp) -> None:
        self._rows[ingested].append((_key(path), stamp.size, stamp.mtime_ns, stamp.read_bytes))

    def _drop_copied_tokens(self) -> None:
        """Leave each token to the attempt that had it first: a copied directory brings along another one's."""
        rows = [dict(zip(attempts.columns.keys(), row, strict=True)) for row in self._rows[attempts]]
        tokens = [row["token"] for row in rows if row["token"] is not None]
        query = select(attempts.c.token, attempts.c.run_id, attempts.c.attempt).where(attempts.c.token.in_(tokens))
        owners = {token: (run_id, attempt) for token, run_id, attempt in self._connection.execute(query)}
        for row in rows:
            key = (row["run_id"], row["attempt"])
            owner = owners.setdefault(row["token"], key) if row["token"] is not None else key
            if owner != key:
                row["token"] = None
                which, whose = (f"attempt {attempt} of run {run_id}" for run_id, attempt in (key, owner))
                what = f"{which} has the token of {whose}: a copy?"
                self._report.problems.append(IngestProblem(self._folder, what))
        self._rows[attempts] = [tuple(row.values()) for row in rows]

    def _write(self) -> None:
        if measured := [row[:2] for row in self._rows[results]]:
            for table in (classes, ranks):
                # A result that was replaced may have fewer classes or ranks.
                self._connection.execute(delete(table).where(tuple_(table.c.run_id, table.c.attempt).in_(measured)))
        for table, rows in self._rows.items():
            upsert(self._connection, table, rows)

    @contextmanager
    def _reported(self, path: Path) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            self._report.problems.append(IngestProblem.of(path, error))
