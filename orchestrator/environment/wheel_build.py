"""One build of a wheel in a scratch folder: environment, sources, edits, compilation, smoke test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from orchestrator.environment.wheels import Edit, TargetPython, WheelSpec, check_sdist, download_command
from orchestrator.errors import InputError, OperationError
from workloads.files.json_file import write_bytes

Report = Callable[[str], None]
"""Takes one line of progress."""

_PROGRESS = re.compile(r"\[\s*(\d+)%\]")
_PROGRESS_EVERY_S = 10.0
_OUT_OF_MEMORY = re.compile(r"Killed signal|virtual memory exhausted|out of memory")
_ERROR_LINE = re.compile(r"\berror: |\berror in |CMake Error|\bfatal:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Build:
    """One build in a temporary folder."""

    spec: WheelSpec
    scratch: Path
    log: Path
    report: Report

    @property
    def python(self) -> Path:
        """Interpreter of the build environment."""
        return self.scratch / "environment" / "bin" / "python"

    @property
    def site(self) -> Path:
        """Its site-packages."""
        (site,) = self.python.parent.parent.glob("lib/python*/site-packages")
        return site

    def run(self, sdist: Path | None, store: Path) -> Path:
        """Build and test the wheel, and return its path in the scratch folder."""
        recipe, target = self.spec.recipe, self.spec.target
        environment = self._environment()
        needs = recipe.prepare(target, environment, self.spec.flavour, self.scratch)
        self.log.write_text("", encoding="utf-8")
        environment |= {**self.spec.settings, **needs.environment}
        self._make_environment(environment, needs.packages)
        sources = self._unpack(sdist or self._fetch(store, environment))
        apply_edits(recipe.edits, sources)
        title = f"{recipe.name} {recipe.version} ({self.spec.flavour}) for torch {target.torch}, {target.tag}"
        self.report(f"building {title}: a few minutes; log in {self.log}")
        wheels = self.scratch / "wheel"
        argv = ["wheel", "--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "."]
        # Not while downloading: pip rejects a source archive whose version differs from the requested one.
        versioned = {**environment, recipe.version_variable: self.spec.local_version}
        self._step(f"building {title}", [*pip(str(self.python), target), *argv], versioned, cwd=sources)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            content.extractall(self.site)  # noqa: S202 (we made it)
        smoke_test = [str(self.python), "-c", recipe.smoke_test(self.spec.flavour)]
        self._step("testing the wheel", smoke_test, environment, cwd=self.scratch)
        return wheel

    def _environment(self) -> dict[str, str]:
        """Return the user's environment without the variables that change where packages come from or go."""
        prefix = f"{self.spec.recipe.name.upper()}_"
        dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
        kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(prefix)}
        path = [str(self.python.parent), self.spec.target.scripts, kept.get("PATH", os.defpath)]
        return {**kept, "PIP_USER": "0", "PATH": os.pathsep.join(path)}

    def _make_environment(self, environment: Mapping[str, str], packages: Sequence[str]) -> None:
        """Create an environment that imports the target's packages, so that build requirements are not installed there.

        ``--system-site-packages`` would show the packages of the base Python instead of a virtual environment's own.
        """
        argv = [self.spec.target.python, "-m", "venv", "--without-pip", str(self.python.parent.parent)]
        self._step("creating the build environment", argv, environment)
        lines = [f"import site; site.addsitedir({path!r})\n" for path in self.spec.target.paths]
        (self.site / "target.pth").write_text("".join(lines), encoding="utf-8")
        if packages:
            self.report(f"downloading build requirements: {', '.join(packages)}")
            self._step(
                "installing build requirements",
                [*pip(str(self.python), self.spec.target), "install", *packages],
                environment,
                hint=f"without network, install {' '.join(packages)} into {self.spec.target.python} from files, "
                "or name a folder of wheels in PIP_FIND_LINKS",
            )

    def _fetch(self, store: Path, environment: Mapping[str, str]) -> Path:
        """Return the source archive, downloaded once. pip checks its digest before it runs any code of it (--hash)."""
        recipe = self.spec.recipe
        kept = store / f"{recipe.name}-{recipe.version}.tar.gz"
        with contextlib.suppress(InputError):
            check_sdist(recipe, kept)
            return kept
        self.report(f"downloading the sources of {recipe.name} {recipe.version}")
        pinned = self.scratch / "pinned.txt"
        pinned.write_text(f"{recipe.name}=={recipe.version} --hash=sha256:{recipe.sdist_sha256}\n", encoding="utf-8")
        argv = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--requirement", str(pinned)]
        self._step(
            "downloading the sources",
            [*pip(str(self.python), self.spec.target), *argv, "--dest", str(self.scratch / "fetched")],
            environment,
            hint=f"on a machine with network: {download_command(recipe)}; then name the file with --sdist",
        )
        (fetched,) = (self.scratch / "fetched").iterdir()
        check_sdist(recipe, fetched)
        store.mkdir(exist_ok=True)
        write_bytes(kept, fetched.read_bytes())
        return kept

    def _unpack(self, sdist: Path) -> Path:
        # Extraction filters came with Python 3.11.4 (PEP 706); the archive's digest is checked.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(sdist) as archive:
            archive.extractall(self.scratch / "sources", **safely)  # type: ignore[arg-type]  # noqa: S202
        (sources,) = (self.scratch / "sources").iterdir()
        return sources

    def _step(
        self, what: str, argv: Sequence[str], environment: Mapping[str, str], *, cwd: Path | None = None, hint: str = ""
    ) -> None:
        """Run a command, log its output and report the compiler's progress; raise OperationError when it fails."""
        started, told, share = time.monotonic(), time.monotonic(), 0
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(argv)}\n")
            log.flush()
            process = subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=cwd or self.scratch,
                env=dict(environment),
                start_new_session=True,
            )
            with process, _killed_on_error(process):
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    percent = _PROGRESS.search(line)
                    if percent and int(percent[1]) > share and time.monotonic() - told >= _PROGRESS_EVERY_S:
                        told, share = time.monotonic(), int(percent[1])
                        self.report(f"  {share} % after {told - started:.0f} s")
        if process.returncode != 0:
            output = self.log.read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2]
            if _OUT_OF_MEMORY.search(output):
                hint = "out of memory: MAKEFLAGS=-j1 runs one compiler at a time"
            ended = f"{what}: ended with exit code {process.returncode}"
            raise OperationError(ended, where=str(self.log), why=_extract_errors(output), hint=hint)


def apply_edits(edits: Sequence[Edit], sources: Path) -> None:
    """Edit the sources; raise OperationError, file unchanged, where a text to replace does not occur exactly once."""
    for edit in edits:
        path = sources / edit.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = text.count(edit.old)
        if count != 1:
            raise OperationError(
                f"the sources are not those this edit was written for: {edit.old!r} is there {count} times, not once",
                where=edit.file,
                why=f"the edit is needed because {edit.why}",
            )
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


@contextlib.contextmanager
def _killed_on_error(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process and its children when this one is interrupted."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        raise


def pip(python: str, target: TargetPython) -> list[str]:
    """Return pip's command for an interpreter: its own, or ours if it has none, as in environments created by uv.

    Raises:
        OperationError: neither has pip.
    """
    if "pip" in target.packages:
        return [python, "-m", "pip"]
    # Not importlib.util.find_spec: setuptools installs a finder (_distutils_hack) that warns about imported distutils.
    if PathFinder.find_spec("pip") is None:
        raise OperationError(
            "there is no pip to install packages with", where=target.python, hint=f"{target.python} -m ensurepip"
        )
    return [sys.executable, "-m", "pip", "--python", python]


def _extract_errors(log: str) -> str:
    """Return the first error of a log with its next lines, and the end of the log."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    tail = lines[-15:]
    first = next((i for i, line in enumerate(lines) if _ERROR_LINE.search(line)), len(lines))
    early = lines[first : min(first + 6, len(lines) - len(tail))]
    return "\n".join([*early, "...", *tail] if early else tail)
