"""``kill -9`` at any moment: before each change to a file or the store, before and after each Slurm call.

Python's audit events tell of every change to a file, whoever makes it and wherever it lies, just before it is made.
Nothing changes between two of them, so the moment before a change is the one after the change before it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from tests.slurm.lab import CLIENTS
from tests.slurm.study import Done, Study

_CHANGED = {
    "os.link": 1,
    "os.mkdir": 0,
    "os.remove": 0,
    "os.rename": 1,
    "os.rmdir": 0,
    "os.symlink": 1,
    "os.truncate": 0,
}
"""Audit event -> which of its arguments is the path that is created, deleted or changed."""
_COMMANDS = {*CLIENTS, "sacct"}
_ANY = re.compile(r"\A[0-9a-f]{2}\Z|[0-9a-f]{8,}|\b\d+")
_TEMPORARY = re.compile(r"\A(\..+\.)[^.]+\Z")
T = TypeVar("T")

TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
ACCEPTED = f'$real "$@" >/dev/null\necho "{TIMED_OUT}" >&2; exit 1'
"""An ``sbatch`` that is accepted and then reports a time-out."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment: the ``number``-th time, from 1, that this happens to a file with this name."""

    what: str
    where: str = ""
    number: int = 1

    def __str__(self) -> str:
        return f"{self.what} {self.where}".strip() + f", no. {self.number}"


class Points:
    """Counts the moments of the process that calls :meth:`install`, and kills it at one of them."""

    def __init__(self, kill_at: Point | None = None, report: Callable[[Point], None] = lambda _point: None) -> None:
        self._kill_at = kill_at
        self._report = report
        self._passed: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._folder = ""

    def install(self) -> None:
        """Start counting; files outside of the current folder, the study's, do not count."""
        from sqlalchemy.engine.default import DefaultDialect

        self._folder = os.getcwd()
        commit, run = DefaultDialect.do_commit, subprocess.run

        def do_commit(dialect: DefaultDialect, connection: Any) -> None:
            self._reach("before commit")
            commit(dialect, connection)
            self._reach("after commit")

        def run_and_report(argv: Sequence[str], **kwargs: Any) -> Any:
            done = run(argv, **kwargs)
            if (name := Path(argv[0]).name) in _COMMANDS:
                self._reach(f"after {name}")
            return done

        DefaultDialect.do_commit = do_commit  # type: ignore[method-assign, assignment]
        subprocess.run = run_and_report  # type: ignore[assignment]
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._opens(*arguments)
        elif event == "subprocess.Popen":
            if (name := Path(os.fsdecode(arguments[1][0])).name) in _COMMANDS:
                self._reach(f"before {name}")
        elif event in _CHANGED:
            path = arguments[_CHANGED[event]]
            # mkdir of an existing folder, or of one without a parent, creates nothing.
            makes = event != "os.mkdir" or (not os.path.lexists(path) and os.path.isdir(os.path.dirname(path) or "."))
            if makes and (where := self._where(path)):
                self._reach(f"before {event.removeprefix('os.')}", where)

    def _opens(self, path: Any, _mode: str | None, flags: int) -> None:
        if flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_DIRECTORY and (where := self._where(path)):
            self._reach("before open", where)
            if flags & os.O_CREAT and not os.path.lexists(path):
                self._reach("nothing written yet", where, lambda: os.open(path, flags, 0o644))

    def _where(self, path: Any) -> str:
        """Return the file as a kind of file, below the study's folder; empty elsewhere."""
        if isinstance(path, int):
            return ""
        text = os.path.relpath(os.path.join(self._folder, os.fsdecode(path)), self._folder)
        if text == "." or text.startswith(".."):
            return ""
        *folders, name = text.split("/")
        name = "*.py" if name.endswith(".py") else _TEMPORARY.sub(r"\1*", _ANY.sub("*", name))
        kinds = [_ANY.sub("*", folder) for folder in folders]
        return "/".join([*kinds[:2], *(["..."] if len(kinds) > 2 else []), name])

    def _reach(self, what: str, where: str = "", first: Callable[[], object] = lambda: None) -> None:
        with self._lock:
            self._passed[what, where] += 1
            point = Point(what, where, self._passed[what, where])
        self._report(point)
        if point == self._kill_at:
            self._kill_at = None
            first()
            os.kill(os.getpid(), signal.SIGKILL)


def all_points(study: Study) -> list[Point]:
    """Return the moments of an uninterrupted submit, in order."""
    with tempfile.TemporaryFile("w+", buffering=1) as notes:

        def watch() -> None:
            Points(report=lambda point: print(point.what, point.where, point.number, sep="\t", file=notes)).install()

        study.run("submit", before=watch)
        return _read(notes)


def _read(notes: IO[str]) -> list[Point]:
    notes.seek(0)
    rows = (line.rstrip("\n").split("\t") for line in notes)
    return [Point(what, where, int(number)) for what, where, number in rows]


def spread(points: Sequence[Point], most: int) -> list[Point]:
    """Return so many of them, in order: equal shares for all kinds of moments, then for all files."""
    chosen = set(_shares(points, most, (lambda point: point.what, lambda point: point.where)))
    return [point for point in points if point in chosen]


def _shares(points: Sequence[Point], most: int, keys: Sequence[Callable[[Point], str]]) -> list[Point]:
    if most >= len(points):
        return list(points)
    if not keys:
        return _evenly(points, most)
    by_key: dict[str, list[Point]] = {}
    for point in points:
        by_key.setdefault(keys[0](point), []).append(point)
    groups = list(by_key.values())
    if most < len(groups):
        groups = _evenly(groups, most)
    chosen: list[Point] = []
    # The small groups first: the others get the rest of their share.
    for place, group in enumerate(sorted(groups, key=len)):
        share = (most - len(chosen)) // (len(groups) - place)
        chosen += _shares(group, share, keys[1:])
    return chosen


def _evenly(items: Sequence[T], most: int) -> list[T]:
    return [items[(2 * place + 1) * len(items) // (2 * most)] for place in range(most)]


def submit_killed(study: Study, point: Point) -> Done:
    """Run ``orchestrate submit`` and kill it there."""
    return study.run("submit", expect=None, before=Points(point).install)


def fake_sbatch(folder: Path, body: str) -> Path:
    """Return a folder for PATH whose ``sbatch`` has the real one as ``$real`` and the number of its call as ``$n``."""
    folder.mkdir()
    program = folder / "sbatch"
    head = f"#!/bin/bash\nreal={shutil.which('sbatch')}\necho call >>{folder}/calls\nn=$(wc -l <{folder}/calls)\n"
    program.write_text(head + body)
    program.chmod(0o755)
    return folder
