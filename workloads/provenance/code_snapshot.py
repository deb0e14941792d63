"""The code of a submission, and the job's check that it runs exactly that code.

    RUNS/snapshots/<id>/manifest.json    the code of one submission (Manifest); the id is the digest of the content
    RUNS/snapshots/<id>/experiment.toml  the experiment as submitted
    RUNS/snapshots/code-<digest>/        copies of packages from source trees; first on the path of jobs

Packages in source trees (an editable install, a folder of PYTHONPATH) are copied, because people edit them while a job
is pending. Installed packages are not copied: the manifest has their digest or version, and a job that finds another
one fails. ``orchestrator.environment.snapshot`` writes all this. Standard library only.
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
from workloads.files.json_file import read_json, read_object_or_empty
from workloads.files.run_dir import snapshots_folder
from workloads.provenance import software

METADATA_SUFFIX = ".dist-info"
_CODE_SUFFIXES = (".py", ".so")
"""Files of an installed package that its digest covers: no bytecode, test data or licences."""
_RESUBMIT = "run orchestrate submit to use the current code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The code of one submission."""

    code: str = ""
    """Digest that names the folder of copies; empty when nothing had to be copied."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Entry of that folder (a package, a module file, a distribution's metadata) -> digest."""
    installed: Mapping[str, str] = field(default_factory=dict)
    """Import name of an installed package that the run needs -> digest of its sources."""
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Interpreter of jobs -> versions of the packages that may change a measurement."""
    experiment: str = ""
    """Digest of the experiment file and of ``--set``; empty when unknown."""

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
        """Return the folder that comes first on the path of jobs; None when nothing was copied."""
        return snapshots_folder(runs) / f"code-{self.code}" if self.code else None


def snapshot_folder(runs: Path, snapshot: str) -> Path:
    """Return the folder of a submission's snapshot."""
    return snapshots_folder(runs) / snapshot


def pythonpath(runs: Path, snapshot: str, before: str) -> str:
    """Return a PYTHONPATH with the copies before ``before``; without missing copies, which the job's check reports."""
    folder = None
    if snapshot:
        with contextlib.suppress(OSError, ValueError):
            folder = Manifest.read(runs, snapshot).code_folder(runs)
    return os.pathsep.join(filter(None, (str(folder or ""), before)))


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file below a folder with its relative name, in order; a link counts as a file."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if "__pycache__" not in relative.parts and (path.is_symlink() or not path.is_dir()):
            yield relative.as_posix(), path


def digest(path: Path, suffixes: tuple[str, ...] = ()) -> str:
    """Return the digest of a file, or of the files below a folder with these suffixes; of a link, that of its target.

    Raises OSError where a file cannot be read.
    """
    found = hashlib.sha256()
    for name, file in files(path) if path.is_dir() else [("", path)]:
        if not suffixes or name.endswith(suffixes) or not name:
            content = b"-> " + os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            found.update(os.fsencode(f"{name}\0{len(content)}\0"))
            found.update(content)
    return found.hexdigest()[:16]


def installed_digest(name: str) -> str:
    """Return the digest of a package as this interpreter would import it; empty when it is not installed."""
    digests = [digest(location, _CODE_SUFFIXES) for location in origins(name)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else ""


def run_code_digest(spec: RunSpec) -> str:
    """Return, in the job, the digest of the run's code."""
    if spec.snapshot and spec.code_digest and registry.foreign_packages(spec.train):
        return spec.code_digest  # verified by check(); copies of plug-ins have other paths and so another digest
    return software.code_digest()


def origins(name: str) -> list[Path]:
    """Return the folders, or the one file, from which a top-level name would be imported; imports nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return []
    found = [spec.origin] if spec and spec.has_location and spec.origin else []
    if spec and spec.submodule_search_locations is not None:
        found = [path for path in spec.submodule_search_locations if Path(path).is_dir()]
    return [Path(os.path.realpath(path)) for path in found]  # some installers link a source tree into site-packages


def check(runs: Path, snapshot: str, *, thorough: bool) -> dict[str, Any]:
    """Compare the code that this job would import with the submitted code; return its provenance for the result.

    Args:
        runs: the runs folder.
        snapshot: id of the snapshot; empty for a run that was not submitted, which has none.
        thorough: also read every file; one rank per node does that for all.

    Raises:
        CodeChangedError: the code differs, or the snapshot is missing.
    """
    if not snapshot:
        return {}
    try:
        manifest = Manifest.read(runs, snapshot)
    except (OSError, ValueError) as error:
        where = str(snapshot_folder(runs, snapshot))
        raise CodeChangedError("the submitted code is missing", where=where, why=str(error), hint=_RESUBMIT) from error
    _check_frozen(manifest, manifest.code_folder(runs), thorough=thorough)
    if thorough:
        _check_installed(manifest)
        _check_packages(manifest)
    code = {"snapshot": {"id": snapshot, "frozen": dict(manifest.frozen), "installed": dict(manifest.installed)}}
    git = read_object_or_empty(snapshot_folder(runs, snapshot) / "git.json")
    return code | ({"git": git} if git else {})


def imported_outside(runs: Path, snapshot: str) -> list[str]:
    """Return imported modules from source trees that the snapshot lacks, such as those imported by a computed name."""
    if not snapshot:
        return []
    ours = snapshots_folder(runs)
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Submodules may be generated: torch's compiler writes some into folders of its own.
        if "." not in name and name != "__main__" and isinstance(file, str):
            if Path(file).parent == Path(os.__file__).parent:
                continue  # Debian links parts of the standard library, such as sitecustomize, to other folders
            origin = Path(os.path.realpath(file))
            if in_source_tree(origin) and not origin.is_relative_to(os.path.realpath(ours)):
                found.append(name)
    return sorted(found)


_INTERPRETERS = tuple({str(Path(os.path.realpath(os.__file__)).parent), os.path.realpath(sys.base_prefix) + "/lib"})


def in_source_tree(location: Path) -> bool:
    """Whether people may edit a module at this resolved location, since no installer put it there."""
    is_installed = bool({"site-packages", "dist-packages"} & set(location.parts))
    return not is_installed and not any(location.is_relative_to(folder) for folder in _INTERPRETERS)


def _check_frozen(manifest: Manifest, folder: Path | None, *, thorough: bool) -> None:
    if folder is None:
        return
    real = Path(os.path.realpath(folder))
    for entry, submitted in manifest.frozen.items():
        copy = real / entry
        try:
            changed = thorough and digest(copy) != submitted
        except OSError as error:
            what = f"the submitted code of {entry} cannot be read"
            raise CodeChangedError(what, where=str(copy), why=str(error), hint=_RESUBMIT) from error
        if changed:
            what, why = "was changed or damaged", "these copies belong to jobs; nobody may edit them"
            raise CodeChangedError(f"the submitted code of {entry} {what}", where=str(copy), why=why, hint=_RESUBMIT)
        name = Path(entry).stem
        if not entry.endswith(METADATA_SUFFIX) and copy not in (found := origins(name)):
            raise CodeChangedError(
                f"Python would import {name} from {found[0] if found else 'nowhere'}, not from the submitted copy",
                where=str(copy),
                why=f"PYTHONPATH is {os.environ.get('PYTHONPATH', '')!r} in this job",
                hint="let no prologue, launcher or container replace PYTHONPATH; they may append to it",
            )


def _check_installed(manifest: Manifest) -> None:
    for name, submitted in manifest.installed.items():
        now = installed_digest(name)
        # A plug-in may be installed only on the login node. A run that needs it fails on its own.
        if now and now != submitted:
            raise CodeChangedError(
                f"the installed package {name} differs from the submitted one",
                where=str(origins(name)[0]),
                why=f"digest {now}, submitted {submitted or 'without it'}",
                hint=f"install the submitted version again and orchestrate retry, or {_RESUBMIT}",
            )


def _check_packages(manifest: Manifest) -> None:
    known = manifest.packages
    # A wrapper script may start another interpreter than the configured path; with one interpreter it must be that.
    submitted = known.get(sys.executable) or (next(iter(known.values())) if len(known) == 1 else None)
    if not submitted:
        return
    now = software.measured_versions(software.installed_packages())
    changed = [
        f"{name} {submitted.get(name, 'missing')} then, {now.get(name, 'missing')} now"
        for name in sorted(submitted.keys() | now.keys())
        if submitted.get(name) != now.get(name)
    ]
    if changed:
        raise CodeChangedError(
            "the installed packages differ from those at submission",
            where=sys.executable,
            why="; ".join(changed),
            hint=f"install those versions again and orchestrate retry, or {_RESUBMIT}",
        )
