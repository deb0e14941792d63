"""Wheels that were built, kept by all that decides what they are; built at most once, whoever asks at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.environment.wheel_build import Build, Report, pip
from orchestrator.environment.wheels import TargetPython, WheelSpec, check_sdist
from orchestrator.errors import CommandError, OperationError
from workloads.files.json_file import write_bytes


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel in the cache."""

    path: Path
    built: bool
    """Whether this call built it."""


def cache_folder(named: Path | None) -> Path:
    """Where wheels are kept: below the named folder, or below the user's cache."""
    if named is None:
        # The XDG specification: unset, empty and relative all mean the default.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        named = (base if base.is_absolute() else Path.home() / ".cache") / "orchestrate"
    return named.expanduser().absolute() / "wheels"


def cached(order: WheelSpec, cache: Path) -> Path | None:
    """The wheel, if a whole one is in the cache."""
    whole = [p for p in (cache / order.key).glob("*.whl") if zipfile.is_zipfile(p)]
    return whole[0] if whole else None


def get_wheel(order: WheelSpec, cache: Path, *, sdist: Path | None, report: Report, wait_s: float = 1800) -> Wheel:
    """Find the wheel in the cache, or build it there. Two calls at once build it once.

    Args:
        sdist: the package's source archive, for machines without network; None: fetched by pip once, then kept.
        wait_s: how long to wait for another process that is building the same wheel.

    Raises:
        InputError: ``sdist`` is not the file that the recipe is for.
        OperationError: a tool or package is missing, the build failed, or another build did not end in time.
    """
    found = cached(order, cache)
    if found:
        return Wheel(found, built=False)
    if sdist is not None:
        check_sdist(order.recipe, sdist)
    folder = cache / order.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{order.key}.lock", wait_s, report):
            found = cached(order, cache)  # another process may have built it meanwhile
            if found:
                return Wheel(found, built=False)
            with tempfile.TemporaryDirectory(prefix="orchestrate-wheel-", ignore_cleanup_errors=True) as scratch:
                built = Build(order, Path(scratch), folder / "build.log", report).run(sdist, cache / "sources")
                write_bytes(folder / built.name, built.read_bytes())
                return Wheel(folder / built.name, built=True)
    except OSError as error:
        raise OperationError(
            "the wheel could not be made: a file could not be written or read",
            where=str(error.filename or cache),
            why=error.strerror or str(error),
            hint="--cache or ORCHESTRATE_CACHE names another cache, TMPDIR another folder to build in",
        ) from error


def install(wheel: Path, target: TargetPython) -> None:
    """Install a wheel and what it depends on into the target; nothing to do when this very build is there.

    Raises:
        CommandError: pip refused.
    """
    argv = [*pip(target.python, target), "install", str(wheel)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandError(
            argv, done.returncode, done.stdout, done.stderr, hint="the wheel is kept; install it by hand"
        )


@contextlib.contextmanager
def _locked(path: Path, wait_s: float, report: Report) -> Iterator[None]:
    """Hold a lock file, waiting a bounded time; it frees itself when its holder ends, however that is.

    Where the file system has no locks we go on without: two builds cost time, and the cache is written by rename.
    """
    deadline = time.monotonic() + wait_s
    told = False
    with path.open("a+", encoding="utf-8") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stream.seek(0)
                holder = stream.read().strip() or "another process"
                if time.monotonic() >= deadline:
                    raise OperationError(
                        f"{holder} has been building the same wheel for more than {wait_s:.0f} s",
                        where=str(path),
                        hint="end it, or wait for it and repeat the command",
                    ) from None
                if not told:
                    report(f"waiting for {holder}, which is building the same wheel")
                    told = True
                time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
            except OSError as error:
                report(f"{path.parent} cannot lock files ({error.strerror}); going on without a lock")
                break
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield
