"""What was submitted is what runs: the code of a submission, as a job finds it and checks it within seconds.

    RUNS/snapshots/<id>/manifest.json    the code of one submission (Manifest); the name is the content's digest
    RUNS/snapshots/<id>/experiment.toml  the experiment as it was then
    RUNS/snapshots/code-<digest>/        packages from source trees, copied; first on the path of jobs

Packages that lie in source trees (an editable install, a folder of PYTHONPATH) are copied, because people edit them
while a job waits. What is installed is not: its digest or version is noted, and a job that finds another one fails by
name. ``orchestrator.environment.snapshot`` writes all this. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from workloads import registry
from workloads.contract import RunSpec
from workloads.errors import CodeChangedError
from workloads.files.json_file import read_json
from workloads.files.run_dir import snapshots_folder
from workloads.provenance import software

METADATA_SUFFIX = ".dist-info"
_CODE_SUFFIXES = (".py", ".so")
"""What of an installed package counts: bytecode, tests' data and licences come and go."""
_NEVER = frozenset({"__pycache__"})
_AGAIN = "orchestrate submit sends it again with what is there now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The code of one submission."""

    code: str = ""
    """Digest that names the folder of copies; empty when nothing had to be copied."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Entry of that folder (a package, a module's file, a distribution's metadata) -> digest."""
    installed: Mapping[str, str] = field(default_factory=dict)
    """Importable name of an installed package that belongs to the code -> digest of its sources."""
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Interpreter of jobs -> the measured packages it has, with versions."""
    experiment: str = ""
    """Digest of the experiment's file and of what replaced keys in it; empty when it is not known."""

    @classmethod
    def read(cls, runs: Path, snapshot: str) -> Self:
        """Raises FileNotFoundError, or ValueError for a file that is no manifest of this version."""
        path = snapshot_folder(runs, snapshot) / "manifest.json"
        try:
            return cls(**read_json(path))
        except TypeError as error:
            raise ValueError(f"{path}: not a manifest of this version: {error}") from error

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def code_folder(self, runs: Path) -> Path | None:
        """The folder that comes first on the path of jobs; None when nothing was copied."""
        return snapshots_folder(runs) / f"code-{self.code}" if self.code else None


def snapshot_folder(runs: Path, snapshot: str) -> Path:
    """The folder of a submission's snapshot."""
    return snapshots_folder(runs) / snapshot


def pythonpath(runs: Path, snapshot: str, before: str) -> str:
    """A value of PYTHONPATH under which Python finds the copies before anything else.

    Where they are gone it is as it was: the job finds that out, and says so.

    Args:
        before: what the variable is without them.
    """
    folder = None
    if snapshot:
        with contextlib.suppress(OSError, ValueError):
            folder = Manifest.read(runs, snapshot).code_folder(runs)
    return os.pathsep.join(filter(None, (str(folder) if folder else "", before)))


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file below a folder by its relative name, in order; links are files here."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not _NEVER & set(relative.parts) and (path.is_symlink() or not path.is_dir()):
            yield relative.as_posix(), path


def digest(path: Path, suffixes: tuple[str, ...] = ()) -> str:
    """Digest of a file, or of all files below a folder; of a link, where it leads to.

    Args:
        path: what to look at.
        suffixes: only files with these endings.

    Raises:
        OSError: it cannot be read.
    """
    found = hashlib.sha256()
    for name, file in files(path) if path.is_dir() else [("", path)]:
        if not suffixes or name.endswith(suffixes) or not name:
            content = b"-> " + os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            found.update(os.fsencode(f"{name}\0{len(content)}\0"))
            found.update(content)
    return found.hexdigest()[:16]


def installed_digest(name: str) -> str:
    """Digest of a package as this interpreter would import it; empty when it would not find it."""
    found = hashlib.sha256()
    locations = origins(name)
    for location in locations:
        found.update(digest(location, _CODE_SUFFIXES).encode())
    return found.hexdigest()[:16] if locations else ""


def run_code_digest(spec: RunSpec) -> str:
    """In the job: digest of the sources that carry a run out. With plug-ins it is what was submitted, which
    :func:`check` has found here: a copy is laid out otherwise than its source, and has another digest."""
    if spec.snapshot and spec.code_digest and registry.foreign_packages(spec.train):
        return spec.code_digest
    return software.code_digest()


def origins(name: str) -> list[Path]:
    """Folders, or the one file, from which a top-level name would be imported; nothing is imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return []
    return [] if spec is None else _locations(spec)


def _locations(spec: importlib.machinery.ModuleSpec) -> list[Path]:
    # Links are followed, also those by which an installer put a source tree into site-packages.
    if spec.submodule_search_locations is not None:
        return [Path(os.path.realpath(path)) for path in spec.submodule_search_locations if Path(path).is_dir()]
    return [Path(os.path.realpath(spec.origin))] if spec.has_location and spec.origin else []


def check(runs: Path, snapshot: str, *, thorough: bool) -> dict[str, Any]:
    """Compare what this job would import with what was submitted; what to keep of it with the result.

    Args:
        runs: the runs folder.
        snapshot: its name; empty for a run that nobody submitted, of which nothing is known.
        thorough: also read every file; one rank of a node does that for all.

    Raises:
        CodeChangedError: it is something else, or the snapshot is gone.
    """
    if not snapshot:
        return {}
    try:
        manifest = Manifest.read(runs, snapshot)
    except (OSError, ValueError) as error:
        raise CodeChangedError(
            "the code that was submitted is gone",
            where=str(snapshot_folder(runs, snapshot)),
            why=str(error),
            hint=_AGAIN,
        ) from error
    _check_frozen(manifest, manifest.code_folder(runs), thorough=thorough)
    if thorough:
        _check_installed(manifest)
        _check_packages(manifest)
    told = {"snapshot": {"id": snapshot, "frozen": dict(manifest.frozen), "installed": dict(manifest.installed)}}
    git = _git(runs, snapshot)
    return told | ({"git": git} if git else {})


def imported_outside(runs: Path, snapshot: str) -> list[str]:
    """Modules that were imported from source trees and are not in the snapshot, as computed names may bring about."""
    if not snapshot:
        return []
    ours = snapshots_folder(runs)
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Below the top there are modules that compilers write, such as torch's, into folders of their own.
        if "." not in name and name != "__main__" and isinstance(file, str):
            # Distributions keep a part of the standard library, sitecustomize, elsewhere behind a link.
            if Path(file).parent == Path(os.__file__).parent:
                continue
            origin = Path(os.path.realpath(file))
            if in_source_tree(origin) and not origin.is_relative_to(os.path.realpath(ours)):
                found.append(name)
    return sorted(found)


_INSTALLED_PARTS = frozenset({"site-packages", "dist-packages"})
_INTERPRETERS = tuple({str(Path(os.path.realpath(os.__file__)).parent), os.path.realpath(sys.base_prefix) + "/lib"})


def in_source_tree(location: Path) -> bool:
    """Whether a module's place, links followed, is one that people edit: no installer put it there."""
    if _INSTALLED_PARTS & set(location.parts):
        return False
    return not any(location.is_relative_to(folder) for folder in _INTERPRETERS)


def _check_frozen(manifest: Manifest, folder: Path | None, *, thorough: bool) -> None:
    if folder is None:
        return
    real = Path(os.path.realpath(folder))
    for entry, submitted in manifest.frozen.items():
        copy = real / entry
        try:
            same = not thorough or digest(copy) == submitted
        except OSError as error:
            raise CodeChangedError(
                f"the submitted code of {entry} cannot be read", where=str(copy), why=str(error), hint=_AGAIN
            ) from error
        if not same:
            raise CodeChangedError(
                f"the submitted code of {entry} was changed or damaged",
                where=str(copy),
                why="these copies belong to jobs and are not meant for editing",
                hint=_AGAIN,
            )
        name = Path(entry).stem
        if not entry.endswith(METADATA_SUFFIX) and copy not in (found := origins(name)):
            raise CodeChangedError(
                f"{name} would be imported from {found[0] if found else 'nowhere'}, not from the submitted copy",
                where=str(copy),
                why=f"PYTHONPATH is {os.environ.get('PYTHONPATH', '')!r} in this job",
                hint="let no prologue, launcher or container replace PYTHONPATH; they may append to it",
            )


def _check_installed(manifest: Manifest) -> None:
    for name, submitted in manifest.installed.items():
        now = installed_digest(name)
        # A plug-in that is only where people submit is not imported here; a run that is one of it says so itself.
        if now and now != submitted:
            raise CodeChangedError(
                f"the installed package {name} is not the one that was submitted",
                where=str(origins(name)[0]),
                why=f"digest {now}, submitted {submitted or 'without it'}",
                hint=f"install again what was there then and orchestrate retry, or {_AGAIN}",
            )


def _check_packages(manifest: Manifest) -> None:
    known = manifest.packages
    # A wrapper may run another path than the one that was asked; where there is one only, it is meant.
    submitted = known.get(sys.executable) or (next(iter(known.values())) if len(known) == 1 else None)
    if not submitted:
        return
    now = software.measured_versions(software.installed_packages())
    changed = [
        f"{name} {submitted.get(name, 'not there')} then, {now.get(name, 'not there')} now"
        for name in sorted(submitted.keys() | now.keys())
        if submitted.get(name) != now.get(name)
    ]
    if changed:
        raise CodeChangedError(
            "the installed packages are not those that were submitted",
            where=sys.executable,
            why="; ".join(changed),
            hint=f"install those versions again and orchestrate retry, or {_AGAIN}",
        )


def _git(runs: Path, snapshot: str) -> dict[str, Any] | None:
    try:
        data = read_json(snapshot_folder(runs, snapshot) / "git.json")
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
