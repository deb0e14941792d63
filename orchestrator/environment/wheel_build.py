"""One build of a wheel in a scratch folder: environment, sources, edits, compiler, trial."""

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

from orchestrator.environment.wheels import Edit, TargetPython, WheelSpec, check_sdist, fetch_by_hand
from orchestrator.errors import InputError, OperationError
from workloads.files.json_file import write_bytes

Report = Callable[[str], None]
"""Where progress goes, one sentence a time."""

_PROGRESS = re.compile(r"\[\s*(\d+)%\]")
_PROGRESS_EVERY_S = 10.0
_OUT_OF_MEMORY = re.compile(r"Killed signal|virtual memory exhausted|out of memory")
_ERROR_LINE = re.compile(r"\berror: |\berror in |CMake Error|\bfatal:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Build:
    """One build, in a scratch folder that goes away."""

    order: WheelSpec
    scratch: Path
    log: Path
    report: Report

    @property
    def python(self) -> Path:
        """The throw-away environment's."""
        return self.scratch / "environment" / "bin" / "python"

    @property
    def site(self) -> Path:
        """Where its packages go."""
        (site,) = self.python.parent.parent.glob("lib/python*/site-packages")
        return site

    def run(self, sdist: Path | None, store: Path) -> Path:
        """Build and try the wheel; its path in the scratch folder."""
        recipe, target = self.order.recipe, self.order.target
        environment = self._environment()
        needs = recipe.prepare(target, environment, self.order.flavour, self.scratch)
        self.log.write_text("", encoding="utf-8")
        environment |= {**self.order.settings, **needs.environment}
        self._make_environment(environment, needs.packages)
        sources = self._unpack(sdist or self._fetch(store, environment))
        apply_edits(recipe.edits, sources)
        title = f"{recipe.name} {recipe.version} ({self.order.flavour}) for torch {target.torch}, {target.tag}"
        self.report(f"building {title}: a few minutes; log in {self.log}")
        wheels = self.scratch / "wheel"
        argv = ["wheel", "--verbose", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "."]
        # Not while fetching: pip compares the version it fetched with the one it asked for.
        versioned = {**environment, recipe.version_variable: self.order.local_version}
        self._step(f"building {title}", [*self._pip(), *argv], versioned, cwd=sources)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            content.extractall(self.site)  # noqa: S202 (we made it)
        trial = [str(self.python), "-c", recipe.trial(self.order.flavour)]
        self._step("trying the wheel", trial, environment, cwd=self.scratch)
        return wheel

    def _environment(self) -> dict[str, str]:
        """The user's variables without those that change where packages come from or go."""
        prefix = f"{self.order.recipe.name.upper()}_"
        dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
        kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(prefix)}
        path = [str(self.python.parent), self.order.target.scripts, kept.get("PATH", os.defpath)]
        return {**kept, "PIP_USER": "0", "PATH": os.pathsep.join(path)}

    def _pip(self) -> list[str]:
        return pip(str(self.python), self.order.target)

    def _make_environment(self, environment: Mapping[str, str], packages: Sequence[str]) -> None:
        """An environment that sees all that the target sees, so that what the build adds lands here and not there.

        ``--system-site-packages`` would show the packages of the Python below a virtual environment, not its own.
        """
        argv = [self.order.target.python, "-m", "venv", "--without-pip", str(self.python.parent.parent)]
        self._step("making an environment to build in", argv, environment)
        lines = [f"import site; site.addsitedir({path!r})\n" for path in self.order.target.paths]
        (self.site / "target.pth").write_text("".join(lines), encoding="utf-8")
        if packages:
            self.report(f"fetching what the build needs: {', '.join(packages)}")
            self._step(
                "installing what the build needs",
                [*self._pip(), "install", *packages],
                environment,
                hint=f"without network, install {' '.join(packages)} into {self.order.target.python} from files, "
                "or name a folder of wheels in PIP_FIND_LINKS",
            )

    def _fetch(self, store: Path, environment: Mapping[str, str]) -> Path:
        """The source archive, fetched once. pip compares the digest before it runs anything of the archive."""
        recipe = self.order.recipe
        kept = store / f"{recipe.name}-{recipe.version}.tar.gz"
        with contextlib.suppress(InputError):
            check_sdist(recipe, kept)
            return kept
        self.report(f"fetching the sources of {recipe.name} {recipe.version}")
        pinned = self.scratch / "pinned.txt"
        pinned.write_text(f"{recipe.name}=={recipe.version} --hash=sha256:{recipe.sdist_sha256}\n", encoding="utf-8")
        argv = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--requirement", str(pinned)]
        self._step(
            "fetching the sources",
            [*self._pip(), *argv, "--dest", str(self.scratch / "fetched")],
            environment,
            hint=f"on a machine with network: {fetch_by_hand(recipe)}; then name the file with --sdist",
        )
        (fetched,) = (self.scratch / "fetched").iterdir()
        check_sdist(recipe, fetched)
        store.mkdir(exist_ok=True)
        write_bytes(kept, fetched.read_bytes())
        return kept

    def _unpack(self, sdist: Path) -> Path:
        # Python 3.11.0 to 3.11.3 have no filters; the archive's digest was checked.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(sdist) as archive:
            archive.extractall(self.scratch / "sources", **safely)  # type: ignore[arg-type]  # noqa: S202
        (sources,) = (self.scratch / "sources").iterdir()
        return sources

    def _step(
        self, what: str, argv: Sequence[str], environment: Mapping[str, str], *, cwd: Path | None = None, hint: str = ""
    ) -> None:
        """Run a command into the log, telling how far the compiler is; raise OperationError when it fails."""
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
            with process, _ended_with_us(process):
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
                hint = "memory was short: MAKEFLAGS=-j1 runs one compiler at a time"
            ended = f"{what}: ended with exit code {process.returncode}"
            raise OperationError(ended, where=str(self.log), why=_gist(output), hint=hint)


def apply_edits(edits: Sequence[Edit], sources: Path) -> None:
    """Change the unpacked sources.

    Raises:
        OperationError: a place to change is not there exactly once; nothing of that file was changed.
    """
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
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process and all it started when we are interrupted."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        raise


def pip(python: str, target: TargetPython) -> list[str]:
    """pip for an interpreter: the target's own, or ours where it has none (environments made by uv).

    Raises:
        OperationError: neither has one.
    """
    if "pip" in target.packages:
        return [python, "-m", "pip"]
    # Not importlib.util.find_spec: setuptools hooks itself in there, and complains about what others imported.
    if PathFinder.find_spec("pip") is None:
        raise OperationError(
            "there is no pip to install with", where=target.python, hint=f"{target.python} -m ensurepip"
        )
    return [sys.executable, "-m", "pip", "--python", python]


def _gist(log: str) -> str:
    """The first error of a log with what follows it, and the log's end."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    tail = lines[-15:]
    first = next((i for i, line in enumerate(lines) if _ERROR_LINE.search(line)), len(lines))
    early = lines[first : min(first + 6, len(lines) - len(tail))]
    return "\n".join([*early, "...", *tail] if early else tail)
