"""Delete what a cleaning policy allows: checkpoints, logs, leftovers, old snapshots. Never a result.

The files that record a run stay: specs, submissions, results, exits, events. Live runs keep everything, and so do runs
that still write although they were given up. Symbolic links are not followed.

Deletion has two steps. Under the database's write lock, which keeps every submit from starting a run, files are renamed
into one folder; without the lock that folder is deleted. If it is killed in between, the next ``clean`` deletes it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.exit_status import last_change
from orchestrator.backends.slurm.records import ArrayFolder
from orchestrator.environment import snapshot
from workloads.contract import State
from workloads.files.json_file import read_json, read_object_or_empty
from workloads.files.packed_specs import unpack_specs
from workloads.files.run_dir import AttemptDir, RunDir, jobs_folder, run_dirs
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import submissions

if TYPE_CHECKING:
    from db.connect import Store
    from db.queries import RunRecord

TRASH = ".trash"
BATCH = 200
"""Renames under one write lock, few enough that a waiting submit is not delayed noticeably."""
LEFTOVER_AGE_S = 3600.0
"""An older temporary file belongs to a killed process."""
_STILL_WRITES_S = 5.0
_ENDING_S = 10.0
"""How long after its result a run's processes may still be ending, if there is no exit.json."""
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8,16}")
"""Temporary files of ``workloads.files.json_file.write_bytes`` and ``workloads.engines.checkpoint.save``."""

_SYMLINK = "a symbolic link, whose target may belong to somebody else"


class KeepCheckpoints(StrEnum):
    """Which checkpoints of the selected runs stay."""

    LAST = "last"
    """That of every run."""
    BEST = "best"
    """That of the most accurate of the runs that differ only in seed and repeat."""
    NONE = "none"


class ItemKind(StrEnum):
    """Kind of a file or folder to delete."""

    CHECKPOINT = "checkpoint"
    LOG = "log"
    LEFTOVER = "leftover"
    """Of a killed process: unfinished files, damaged checkpoints, what an interrupted clean left."""
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPolicy:
    """What to delete."""

    checkpoints: KeepCheckpoints = KeepCheckpoints.LAST
    logs: bool = False
    states: frozenset[State] = frozenset({State.SUCCEEDED})
    """Runs in other states keep everything."""
    older_than_s: float = 0.0
    """Since their newest attempt ended."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file or folder to delete as a whole."""

    kind: ItemKind
    run_id: str
    """Empty if it belongs to no run."""
    path: Path
    size_bytes: int


@dataclass(slots=True)
class CleanReport:
    """What a policy finds, or what was deleted."""

    items: list[Item] = field(default_factory=list)
    kept: list[tuple[Path, str]] = field(default_factory=list)
    """What the policy includes but must stay, and why."""
    num_live: int = 0
    """Live runs, which keep everything."""

    def add(self, kind: ItemKind, run_id: str, paths: Iterable[Path]) -> None:
        for path in paths:
            if path.is_symlink():
                self.kept.append((path, _SYMLINK))
            else:
                self.items.append(Item(kind, run_id, path, size_bytes(path)))


def find(runs: Path, records: Mapping[str, RunRecord], needed: Collection[str], policy: CleanPolicy) -> CleanReport:
    """Find what a policy allows to delete. ``needed``: snapshots that live runs import."""
    found = CleanReport(num_live=sum(record.state.live for record in records.values()))
    selected = []
    for run in run_dirs(runs):
        record = records.get(run.run_id)
        if record is None or record.state not in policy.states or record.state.live:
            continue
        if why := _why_kept(run):
            found.kept.append((run.path, why))
        elif time.time() - (_ended_at(run.attempts()[-1]) or time.time()) >= policy.older_than_s:
            selected.append(run)
    best = _best(selected) if policy.checkpoints is KeepCheckpoints.BEST else set()
    for run in selected:
        checkpoints = run.checkpoint.parent
        keep = policy.checkpoints is KeepCheckpoints.LAST or run.run_id in best
        if checkpoints.is_symlink() or (not keep and checkpoints.is_dir()):
            found.add(ItemKind.CHECKPOINT, run.run_id, [checkpoints])
        else:
            found.add(ItemKind.LEFTOVER, run.run_id, _leftovers(checkpoints))
        for folder in (run.path, *(attempt.path for attempt in run.attempts())):
            found.add(ItemKind.LEFTOVER, run.run_id, _leftovers(folder))
        if policy.logs:
            found.add(ItemKind.LOG, run.run_id, _logs(runs, run))
    found.add(ItemKind.SNAPSHOT, "", snapshot.find_unneeded(runs, needed))
    found.add(ItemKind.LEFTOVER, "", sorted((runs / TRASH).glob("*")))
    return found


def remove(store: Store, runs: Path, items: Collection[Item]) -> CleanReport:
    """Delete items, except of runs submitted again since :func:`find`; return what was deleted, what stayed and why."""
    done = CleanReport()
    folder = runs / TRASH / uuid.uuid4().hex
    folder.mkdir(parents=True)
    ordered = sorted(items, key=lambda item: item.path)
    for start in range(0, len(ordered), BATCH):
        with store.write():
            live = {record.run_id for record in submissions.live_attempts(store)}
            for number, item in enumerate(ordered[start : start + BATCH], start):
                if item.run_id in live:
                    done.kept.append((item.path, "the run was submitted again meanwhile"))
                    continue
                if item.kind is ItemKind.SNAPSHOT and not snapshot.is_old(item.path):
                    done.kept.append((item.path, "a submit uses it again"))
                    continue
                try:
                    item.path.rename(folder / str(number))
                    done.items.append(item)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    done.kept.append((item.path, error.strerror or str(error)))
    shutil.rmtree(folder, onerror=lambda _call, path, error: done.kept.append((Path(path), str(error[1]))))
    log_folders = {item.path.parent for item in done.items if item.kind is ItemKind.LOG}
    for empty in (runs / TRASH, *(path for path in log_folders if path.parent == jobs_folder(runs))):
        with contextlib.suppress(OSError):
            empty.rmdir()
    return done


def needed_snapshots(store: Store, runs: Path) -> set[str]:
    """Return the snapshots of live attempts, and of those that an interrupted submit left to submit."""
    specs = (RunDir.of(runs, record.run_id).spec for record in submissions.live_attempts(store))
    found = {str(read_object_or_empty(spec).get("snapshot", "")) for spec in specs}
    found |= {str(record.about.get("snapshot", "")) for record in ArrayFolder(runs).read()}
    for outbox in (runs / "queue" / "outbox").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found |= {spec.snapshot for spec in unpack_specs(outbox.read_bytes())}
    return found - {""}


def size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a folder; a link counts as itself."""
    with contextlib.suppress(OSError):
        return sum(p.lstat().st_size for p in (path, *path.rglob("*")) if p.is_symlink() or not p.is_dir())
    return 0


def _why_kept(run: RunDir) -> str:
    """Return why a run keeps everything whatever the store says; empty if it does not."""
    for path in (run.path.parent, run.path, run.path / "attempts"):
        if path.is_symlink():
            return f"{path.name} is {_SYMLINK}"
    attempts = run.attempts()
    ended = _ended_at(attempts[-1]) if attempts else None
    if ended is None:
        return "its newest attempt has no result.json or exit.json"
    if not attempts[-1].exit.exists() and time.time() - ended < _ENDING_S:
        return "it ended only seconds ago"
    written_at = last_change(attempts[-1].path.glob("progress.*.json")) or 0.0
    if not attempts[-1].result.exists() and written_at > ended + _STILL_WRITES_S:
        return "it was given up but still writes"
    return ""


def _ended_at(attempt: AttemptDir) -> float | None:
    return last_change((attempt.result, attempt.exit))


def _best(selected: Collection[RunDir]) -> set[str]:
    """Return the most accurate of the runs that differ only in seed and repeat, or the first one without accuracies."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for run in selected:
        try:
            train = read_json(run.spec)["train"]
            accuracy = run.attempts()[-1].read_result().test_accuracy
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue
        key = json.dumps({k: v for k, v in train.items() if k not in {"seed", "repeat"}}, sort_keys=True)
        groups.setdefault(key, []).append((-(accuracy if accuracy is not None else -1.0), run.run_id))
    return {min(group)[1] for group in groups.values()}


def _leftovers(folder: Path) -> Iterator[Path]:
    """Yield files of killed processes: damaged checkpoints, and temporary files that are old."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            is_old = time.time() - path.lstat().st_mtime > LEFTOVER_AGE_S
            if path.name.endswith(".damaged") or (is_old and _TEMPORARY.fullmatch(path.name)):
                yield path


def _logs(runs: Path, run: RunDir) -> Iterator[Path]:
    """Yield logs of ranks and submitit's pickles; files that claim the start of an attempt stay."""
    jobs = jobs_folder(runs)
    for attempt in run.attempts():
        for pattern in ("job/*.out", "job/*.err", "job/*.pkl", "job/*.sh", "hang.*.txt"):
            yield from sorted(attempt.path.glob(pattern))
        job_id = str(read_object_or_empty(attempt.submission).get("job_id"))
        if re.fullmatch(r"\d+_\d+", job_id) and not jobs.is_symlink():
            array = jobs / job_id.partition("_")[0]
            yield from () if array.is_symlink() else sorted(array.glob(f"{job_id}_*"))
            yield from (path for path in [jobs / f"slurm-{job_id}.out"] if path.exists())
