"""The cache of built wheels. Two processes that need the same wheel build it once."""

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
    """Return the folder of wheels: below the named one, or below the user's cache."""
    if named is None:
        # XDG Base Directory Specification: unset, empty and relative all mean the default.
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        named = (base if base.is_absolute() else Path.home() / ".cache") / "orchestrate"
    return named.expanduser().absolute() / "wheels"


def cached(spec: WheelSpec, cache: Path) -> Path | None:
    """Return the wheel if an undamaged one is in the cache."""
    return next((p for p in (cache / spec.key).glob("*.whl") if zipfile.is_zipfile(p)), None)


def get_wheel(spec: WheelSpec, cache: Path, *, sdist: Path | None, report: Report, wait_s: float = 1800) -> Wheel:
    """Return the wheel from the cache, built there if it is missing.

    Without the source archive ``sdist``, download it once. Wait ``wait_s`` seconds for another process that builds the
    same wheel.

    Raises:
        InputError: ``sdist`` is not the file that the recipe is for.
        OperationError: a tool or package is missing, the build failed, or another process did not finish it in time.
    """
    if found := cached(spec, cache):
        return Wheel(found, built=False)
    if sdist is not None:
        check_sdist(spec.recipe, sdist)
    folder = cache / spec.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{spec.key}.lock", wait_s, report):
            if found := cached(spec, cache):  # another process may have built it meanwhile
                return Wheel(found, built=False)
            with tempfile.TemporaryDirectory(prefix="orchestrate-wheel-", ignore_cleanup_errors=True) as scratch:
                built = Build(spec, Path(scratch), folder / "build.log", report).run(sdist, cache / "sources")
                write_bytes(folder / built.name, built.read_bytes())
                return Wheel(folder / built.name, built=True)
    except OSError as error:
        raise OperationError(
            "the wheel could not be built: a file could not be written or read",
            where=str(error.filename or cache),
            why=error.strerror or str(error),
            hint="--cache or ORCHESTRATE_CACHE names another cache, TMPDIR another folder to build in",
        ) from error


def install(wheel: Path, target: TargetPython) -> None:
    """Install a wheel and its dependencies into the target, unless this very build is installed.

    Raises:
        CommandError: pip failed.
    """
    argv = [*pip(target.python, target), "install", str(wheel)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        hint = "the wheel is kept; install it by hand"
        raise CommandError(argv, done.returncode, done.stdout, done.stderr, hint=hint)


@contextlib.contextmanager
def _locked(path: Path, wait_s: float, report: Report) -> Iterator[None]:
    """Hold a lock file, after waiting for a limited time. The kernel frees it when its holder ends (flock(2)).

    On a file system without locks, go on: a second build costs time only, as wheels are written by rename.
    """
    deadline = time.monotonic() + wait_s
    reported = False
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
                        hint="end it, or repeat the command when it has finished",
                    ) from None
                if not reported:
                    report(f"waiting for {holder}, which is building the same wheel")
                    reported = True
                time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
            except OSError as error:
                report(f"{path.parent} cannot lock files ({error.strerror}); continuing without a lock")
                break
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        stream.flush()
        yield
