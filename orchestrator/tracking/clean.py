"""What may go from a runs folder by rule, and its going: checkpoints, logs, leftovers, old snapshots. Never a result.

What a run is known by stays: specs, submissions, results, exits, events. A run that waits or runs is passed over, and
so is one that still writes although it was given up. Nothing is followed out of the runs folder by a symbolic link.

Things go in two steps. While the database's write lock keeps every submit from starting a run, they are renamed into
one folder, at once; then that folder is removed. Killed in between, the next ``clean`` removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.slurm.records import ArrayFolder
from orchestrator.environment import snapshot
from workloads.contract import State
from workloads.files.json_file import read_json
from workloads.files.packed_specs import unpack_specs
from workloads.files.run_dir import AttemptDir, RunDir, jobs_folder, run_dirs

if TYPE_CHECKING:
    from db.connect import Store
    from db.queries import RunRecord

TRASH = ".trash"
BATCH = 200
"""Renames under one write lock: a submit that waits for it shall not notice."""
LEFTOVER_AGE_S = 3600.0
"""A temporary file is of somebody who was killed when it is older."""
_STILL_WRITES_S = 5.0
_ENDING_S = 10.0
"""So long after its result a run's processes may still be on their way out, unless somebody saw them end."""
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")
"""Temporary files of ``workloads.files.json_file.write_bytes`` and ``workloads.engines.checkpoint.save``."""


class KeepCheckpoints(StrEnum):
    """Which checkpoints of the chosen runs stay."""

    LAST = "last"
    """Of every run."""
    BEST = "best"
    """Of the most accurate one of those that differ in seed and repeat only."""
    NONE = "none"


class ItemKind(StrEnum):
    """What an item is."""

    CHECKPOINT = "checkpoint"
    LOG = "log"
    LEFTOVER = "leftover"
    """Of a process that was killed: half-written files, damaged checkpoints, what an interrupted clean left."""
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPolicy:
    """What goes."""

    checkpoints: KeepCheckpoints = KeepCheckpoints.LAST
    logs: bool = False
    states: frozenset[State] = frozenset({State.SUCCEEDED})
    """Runs in other states keep everything."""
    older_than_s: float = 0.0
    """Since their newest attempt ended."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file or folder that goes as a whole."""

    kind: ItemKind
    run_id: str
    """Empty for what belongs to no run."""
    path: Path
    size_bytes: int


@dataclass(slots=True)
class CleanReport:
    """What a set of rules finds."""

    items: list[Item] = field(default_factory=list)
    left: list[tuple[Path, str]] = field(default_factory=list)
    """What would go and stays, and why."""
    num_live: int = 0
    """Runs that wait or run."""


def find(runs: Path, records: Mapping[str, RunRecord], needed: Collection[str], rules: CleanPolicy) -> CleanReport:
    """Look for what may go; changes nothing.

    Args:
        runs: the runs folder.
        records: every run, as the store has it now.
        needed: snapshots that runs which wait or run will import.
        rules: what goes.
    """
    found = CleanReport(num_live=sum(record.state.live for record in records.values()))
    chosen = []
    for run in run_dirs(runs):
        record = records.get(run.run_id)
        if record is None or record.state not in rules.states or record.state.live:
            continue
        if why := _why_not(run):
            found.left.append((run.path, why))
        elif _age_s(run) >= rules.older_than_s:
            chosen.append(run)
    best = _best(chosen) if rules.checkpoints is KeepCheckpoints.BEST else set()
    for run in chosen:
        keep = rules.checkpoints is KeepCheckpoints.LAST or run.run_id in best
        _add(found, run.run_id, _of_checkpoints(run, keep=keep))
        _add(found, run.run_id, _leftovers(run))
        if rules.logs:
            _add(found, run.run_id, _logs(runs, run))
    _add(found, "", ((ItemKind.SNAPSHOT, path) for path in snapshot.unneeded(runs, needed)))
    _add(found, "", ((ItemKind.LEFTOVER, path) for path in sorted((runs / TRASH).glob("*"))))
    return found


def remove(store: Store, runs: Path, items: Collection[Item]) -> CleanReport:
    """Let items go; what went, and what stayed after all.

    A run that somebody sent again since it was looked at keeps everything.
    """
    from db.submissions import live_attempts

    done = CleanReport()
    folder = runs / TRASH / uuid.uuid4().hex
    folder.mkdir(parents=True)
    ordered = sorted(items, key=lambda item: item.path)
    for start in range(0, len(ordered), BATCH):
        with store.write():
            going_on = {record.run_id for record in live_attempts(store)}
            for number, item in enumerate(ordered[start : start + BATCH], start):
                if item.run_id in going_on:
                    done.left.append((item.path, "the run was sent again meanwhile"))
                    continue
                if item.kind is ItemKind.SNAPSHOT and not snapshot.is_old(item.path):
                    done.left.append((item.path, "a submit took it again meanwhile"))
                    continue
                try:
                    item.path.rename(folder / str(number))
                    done.items.append(item)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    done.left.append((item.path, error.strerror or str(error)))
    shutil.rmtree(folder, onerror=lambda _call, path, error: done.left.append((Path(path), str(error[1]))))
    with contextlib.suppress(OSError):
        (runs / TRASH).rmdir()
    _drop_empty(runs, done.items)
    return done


def needed_snapshots(store: Store, runs: Path) -> set[str]:
    """Snapshots of attempts that wait or run, or that an interrupted submit will send."""
    from db.submissions import live_attempts

    found = set()
    for record in live_attempts(store):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.add(str(read_json(RunDir.of(runs, record.run_id).spec).get("snapshot", "")))
    found |= {str(record.about.get("snapshot", "")) for record in ArrayFolder(runs).open()}
    for outbox in (runs / "queue" / "outbox").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found |= {spec.snapshot for spec in unpack_specs(outbox.read_bytes())}
    return found - {""}


def _add(found: CleanReport, run_id: str, places: Iterator[tuple[ItemKind, Path]]) -> None:
    for kind, path in places:
        if path.is_symlink():
            found.left.append((path, "a symbolic link: what it leads to may be somebody else's"))
        else:
            found.items.append(Item(kind, run_id, path, size_bytes(path)))


def size_bytes(path: Path) -> int:
    """Of a file, or of all below a folder; links count as themselves."""
    total = 0
    with contextlib.suppress(OSError):
        total = path.lstat().st_size if not path.is_dir() or path.is_symlink() else 0
        if path.is_dir() and not path.is_symlink():
            with os.scandir(path) as entries:
                total = sum(size_bytes(Path(entry.path)) for entry in entries)
    return total


def _why_not(run: RunDir) -> str:
    """Why a run is left alone whatever the store says; nothing when it may lose something."""
    for path in (run.path.parent, run.path, run.path / "attempts"):
        if path.is_symlink():
            return f"{path.name} is a symbolic link: what it leads to may be somebody else's"
    attempts = run.attempts()
    ended = _ended_at(attempts[-1]) if attempts else None
    if ended is None:
        return "nothing says that its newest attempt has ended"
    if not attempts[-1].exit.exists() and time.time() - ended < _ENDING_S:
        return "it has only just ended"
    with contextlib.suppress(OSError):
        signs = [path.stat().st_mtime for path in attempts[-1].path.glob("progress.*.json")]
        if not attempts[-1].result.exists() and signs and max(signs) > ended + _STILL_WRITES_S:
            return "it still writes, although it was given up"
    return ""


def _ended_at(attempt: AttemptDir) -> float | None:
    times = []
    for path in (attempt.result, attempt.exit):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times) if times else None


def _age_s(run: RunDir) -> float:
    return time.time() - (_ended_at(run.attempts()[-1]) or time.time())


def _best(chosen: Collection[RunDir]) -> set[str]:
    """Of runs that differ in seed and repeat only, the one with the highest accuracy; the first where none has one."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for run in chosen:
        try:
            train = read_json(run.spec)["train"]
            accuracy = run.attempts()[-1].read_result().test_accuracy
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue
        key = json.dumps({k: v for k, v in train.items() if k not in {"seed", "repeat"}}, sort_keys=True)
        groups.setdefault(key, []).append((-(accuracy if accuracy is not None else -1.0), run.run_id))
    return {min(group)[1] for group in groups.values()}


def _of_checkpoints(run: RunDir, *, keep: bool) -> Iterator[tuple[ItemKind, Path]]:
    folder = run.checkpoint.parent
    if folder.is_symlink() or (not keep and folder.is_dir()):
        yield ItemKind.CHECKPOINT, folder
    elif folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".damaged") or _is_leftover(path):
                yield ItemKind.LEFTOVER, path


def _leftovers(run: RunDir) -> Iterator[tuple[ItemKind, Path]]:
    for folder in (run.path, *(attempt.path for attempt in run.attempts())):
        yield from ((ItemKind.LEFTOVER, path) for path in sorted(folder.iterdir()) if _is_leftover(path))


def _is_leftover(path: Path) -> bool:
    with contextlib.suppress(OSError):
        old = time.time() - path.lstat().st_mtime > LEFTOVER_AGE_S
        return old and bool(_TEMPORARY.fullmatch(path.name))
    return False


def _logs(runs: Path, run: RunDir) -> Iterator[tuple[ItemKind, Path]]:
    """What ranks printed, and submitit's pickles; a claim to the start of an attempt stays."""
    for attempt in run.attempts():
        for pattern in ("job/*.out", "job/*.err", "job/*.pkl", "job/*.sh", "hang.*.txt"):
            yield from ((ItemKind.LOG, path) for path in sorted(attempt.path.glob(pattern)))
        job_id = _job_id(attempt)
        if job_id and not (jobs_folder(runs)).is_symlink():
            array = jobs_folder(runs) / job_id.partition("_")[0]
            yield from ((ItemKind.LOG, path) for path in sorted(array.glob(f"{job_id}_*")) if not array.is_symlink())
            script = jobs_folder(runs) / f"slurm-{job_id}.out"
            if script.exists():
                yield ItemKind.LOG, script


def _job_id(attempt: AttemptDir) -> str:
    """Number of a Slurm task; empty for others, and for what is none."""
    try:
        job_id = str(read_json(attempt.submission).get("job_id"))
    except (OSError, ValueError, AttributeError):
        return ""
    return job_id if re.fullmatch(r"\d+_\d+", job_id) else ""


def _drop_empty(runs: Path, items: Collection[Item]) -> None:
    """Folders of Slurm arrays of which nothing is left."""
    for folder in {item.path.parent for item in items if item.kind is ItemKind.LOG}:
        if folder.parent == jobs_folder(runs):
            with contextlib.suppress(OSError):
                folder.rmdir()
