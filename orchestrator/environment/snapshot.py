"""Snapshots of the code of a submission: packages in source trees are copied, installed ones recorded by digest.

What jobs import is found without importing it: ``workloads``, every plug-in, and what their sources import from source
trees. ``workloads.provenance.code_snapshot`` describes the files and checks them in the job. A copy is named by its
content, so a second snapshot of the same code writes nothing.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orchestrator import own_packages
from orchestrator.environment.interpreter import Packages
from orchestrator.errors import InputError, OperationError
from workloads import registry
from workloads.contract import TrainConfig
from workloads.files.json_file import read_json, write_bytes, write_json
from workloads.files.run_dir import snapshots_folder
from workloads.provenance import code_snapshot, software
from workloads.provenance.code_snapshot import METADATA_SUFFIX, Manifest

OURS = "workloads"
MAX_BYTES = 64 << 20
MAX_FILES = 5_000
"""Largest package that is copied; with more files or bytes, data lies in the package."""
LARGE_FILE_BYTES = 8 << 20
"""A larger file is data: the snapshot links to it."""
_CACHES = frozenset({"__pycache__", "node_modules", "venv", "build", "dist"})
_DATA_NAMES = frozenset({"data", "datasets", "runs", "checkpoints", "outputs", "wandb", "mlruns"})
"""Folders of these names are data, unless they contain a Python file."""
_PRUNE_AGE_S = 3600.0
"""A younger snapshot may belong to a submit that has not recorded its runs yet, seconds."""
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([A-Za-z_]\w*)|import[ \t]+([\w., \t]+))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Experiment:
    """The experiment file of a submission, byte for byte, and its ``--set`` options."""

    content: bytes
    sets: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, sets: Iterable[str] = ()) -> Experiment | None:
        """Return None if the file is gone: the plan has everything that matters."""
        try:
            return cls(path.read_bytes(), tuple(sets))
        except OSError:
            return None

    @property
    def text(self) -> bytes:
        return b"".join(f"# --set {text}\n".encode() for text in self.sets) + self.content

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()[:16]


def take(
    runs: Path, packages: Mapping[str, Mapping[str, str]], experiment: Experiment | None = None, *, before: str = ""
) -> str:
    """Take a snapshot of the code, and return its name.

    Args:
        runs: the runs folder, which keeps it.
        packages: interpreter of jobs -> its distributions, with versions.
        experiment: kept with the code.
        before: an earlier snapshot whose experiment is kept, for runs that are submitted again.

    Raises:
        InputError: sources are too large to be copied.
        OperationError: sources cannot be read, or change while they are copied.
    """
    sources, installed = _found()
    folder = snapshots_folder(runs)
    folder.mkdir(parents=True, exist_ok=True)
    entries = _entries(sources)
    with _report_unreadable():
        frozen = _digests(entries, runs)
    code = _name(sorted(frozen.items())) if frozen else ""
    digest = experiment.digest if experiment else ""
    if experiment is None and before:
        with contextlib.suppress(OSError, ValueError):
            digest = Manifest.read(runs, before).experiment
    manifest = Manifest(
        code=code,
        frozen=frozen,
        installed={name: code_snapshot.installed_digest(name) for name in sorted(installed)},
        packages={python: software.measured_versions(versions) for python, versions in sorted(packages.items())},
        experiment=digest,
    )
    if code:
        _keep_code(manifest, entries, runs)
    return _keep_manifest(manifest, runs, experiment, before)


def code_digest(train: TrainConfig, runs: Path) -> str:
    """Return the digest of the sources that execute a run: ours, its plug-ins, and what these import from source trees.

    Raises:
        InputError: a plug-in is too large to be copied.
        OperationError: a source cannot be read.
    """
    packages = registry.foreign_packages(train)
    return _code_digest(packages, runs) if packages else software.code_digest()


@cache
def _code_digest(packages: tuple[str, ...], runs: Path) -> str:
    sources, installed = _closure(packages)
    with _report_unreadable():
        found = _digests(_entries(sources), runs) | {name: code_snapshot.installed_digest(name) for name in installed}
    return _name([software.code_digest(), sorted(found.items())])


@contextlib.contextmanager
def _report_unreadable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what, hint = f"a source cannot be read: {error.strerror or error}", "make it readable for you: jobs import it"
        raise OperationError(what, where=str(error.filename or ""), hint=hint) from error


def retake(runs: Path, before: str, *, local: bool) -> str:
    """Take a snapshot for runs that are submitted again, with the packages that their interpreters have now.

    Runs on this machine (``local``) use this interpreter, others those of their earlier snapshot, if they had one.
    """
    pythons: Iterable[str] = [sys.executable] if local else []
    if not local and before:
        with contextlib.suppress(OSError, ValueError):
            pythons = Manifest.read(runs, before).packages
    packages = {python: Packages.of(python).versions or {} for python in pythons}
    return take(runs, packages, before=before)


def renew(runs: Path, snapshot: str) -> bool:
    """Return whether a snapshot exists for more runs, and protect it from ``clean`` like a new one."""
    if not snapshot:
        return False
    try:
        folder = Manifest.read(runs, snapshot).code_folder(runs)
        for path in filter(None, (folder, code_snapshot.snapshot_folder(runs, snapshot))):
            os.utime(path)
    except (OSError, ValueError):
        return False
    return True


def find_unneeded(runs: Path, needed: Iterable[str]) -> list[Path]:
    """Return the folders of old snapshots other than the needed ones."""
    keep = set(needed)
    for name in list(keep):
        with contextlib.suppress(OSError, ValueError):
            keep.add(f"code-{Manifest.read(runs, name).code}")
    folder = snapshots_folder(runs)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        path for path in paths if path.name not in keep and not path.is_symlink() and path.is_dir() and is_old(path)
    ]


def is_old(path: Path) -> bool:
    """Return whether a snapshot's folder is too old to belong to a submit that is not finished."""
    try:
        return time.time() - path.stat().st_mtime > _PRUNE_AGE_S
    except OSError:
        return False


# --- what a job imports ---


def _found() -> tuple[dict[str, list[Path]], set[str]]:
    """Return name -> places of what is copied (packages, modules, metadata), and the names of installed packages."""
    points = registry.entry_points()
    sources, installed = _closure([OURS, *(point.module.partition(".")[0] for point in points)])
    if OURS in installed and OURS in dict(own_packages.shadowing()):
        # Jobs do not import orchestrator, so they would find another project's package first.
        installed.remove(OURS)
        sources[OURS] = code_snapshot.origins(OURS)
    for point in points:
        # The entry points of a copied module go with it, for jobs whose interpreter does not have them.
        metadata = getattr(point.dist, "_path", None)
        if isinstance(metadata, Path) and metadata.name.endswith(METADATA_SUFFIX) and metadata.is_dir():
            text = (metadata / "entry_points.txt").read_text(encoding="utf-8")
            if any(re.search(rf"=\s*{re.escape(name)}\b", text) for name in sources):
                sources[metadata.name] = [metadata]
    return sources, installed


def _closure(names: Iterable[str]) -> tuple[dict[str, list[Path]], set[str]]:
    """Return name -> places of packages in source trees, with what they import from there, and the installed ones."""
    sources: dict[str, list[Path]] = {}
    installed: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in sources or name in installed:
            continue
        if places := _source_places(name):
            sources[name] = places
            # Ours imports nothing else from source trees (tests/unit/test_imports.py).
            todo += [] if name == OURS else sorted(_imported(places))
        else:
            installed.add(name)
    return sources, installed


def _source_places(name: str) -> list[Path]:
    return [place for place in code_snapshot.origins(name) if code_snapshot.in_source_tree(place)]


def _imported(places: Iterable[Path]) -> set[str]:
    """Return the top-level names in source trees that a package's sources import."""
    found: set[str] = set()
    is_source = cache(lambda name: bool(_source_places(name)))
    for path in (path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])):
        content = path.read_bytes() if path.is_file() else b""
        matched = [name for module, several in _IMPORT.findall(content) for name in (module or several).split(b",")]
        names = {re.split(rb"[.\s]", name.strip())[0].decode() for name in matched} - {"", OURS}
        wanted = {name for name in names - sys.stdlib_module_names - found if is_source(name)}
        # The pattern matches prose too; parsing every file would take seconds for a large package.
        found |= wanted & _parse_imports(content, wanted) if wanted else set()
    return found


def _parse_imports(content: bytes, otherwise: set[str]) -> set[str]:
    """Return the top-level names that a source imports; ``otherwise`` where it is not valid Python."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        return otherwise
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


# --- what is copied of it ---


def _entries(sources: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Return name in the snapshot -> its places; a namespace package has several (PEP 420)."""
    return {
        (name + place.suffix if place.is_file() else name): [p for p in places if p.is_file() == place.is_file()]
        for name, places in sorted(sources.items())
        for place in places
    }


def _content(places: Iterable[Path], runs: Path) -> Iterator[tuple[str, Path, bool]]:
    """Yield relative name, file, and whether the snapshot links to it; raise InputError for too large a package."""
    for place in places:
        if place.is_file():
            yield "", place, False
            continue
        num_files = num_bytes = 0
        todo = [place]
        while todo:
            with os.scandir(todo.pop()) as scan:
                below = sorted(scan, key=lambda entry: entry.name)
            for entry in below:
                path = Path(entry.path)
                name = path.relative_to(place).as_posix()
                if entry.name.startswith(".") or entry.name in _CACHES or entry.name.endswith((".pyc", ".egg-info")):
                    continue
                if entry.is_dir():
                    if os.path.realpath(path) == str(runs):
                        continue
                    if _is_data(entry):
                        yield name, path, True
                    else:
                        todo.append(path)
                elif entry.is_file():
                    size = entry.stat().st_size
                    linked = size > LARGE_FILE_BYTES and path.suffix not in {".py", ".so"}
                    num_files, num_bytes = num_files + 1, num_bytes + (0 if linked else size)
                    if num_files > MAX_FILES or num_bytes > MAX_BYTES:
                        raise InputError(
                            "the sources that jobs import from here are too large to be copied",
                            where=str(place),
                            why=f"more than {MAX_FILES:,} files or {MAX_BYTES >> 20} MiB, and every submit copies them",
                            hint="move data out of the package, or install it without -e: then it is not copied",
                        )
                    yield name, path, linked


def _is_data(entry: os.DirEntry[str]) -> bool:
    """Return whether a folder is data: by its name or as a symbolic link, and without a Python file."""
    if not entry.is_symlink() and entry.name not in _DATA_NAMES:
        return False
    with os.scandir(entry.path) as below:
        return not any(other.name.endswith(".py") for other in below)


def _digests(entries: Mapping[str, list[Path]], runs: Path) -> dict[str, str]:
    """Return the digest that ``code_snapshot.digest`` will give for each copy."""
    found = {}
    for name, places in entries.items():
        content: dict[str, bytes] = {}
        for relative, path, linked in _content(places, runs):
            content.setdefault(relative, b"-> " + os.fsencode(path.resolve()) if linked else path.read_bytes())
        digest = hashlib.sha256()
        for relative in sorted(content, key=lambda text: Path(text).parts):
            digest.update(os.fsencode(f"{relative}\0{len(content[relative])}\0"))
            digest.update(content[relative])
        found[name] = digest.hexdigest()[:16]
    return found


def _keep_code(manifest: Manifest, entries: Mapping[str, list[Path]], runs: Path) -> None:
    """Copy the sources unless an undamaged copy exists; raise OperationError for one that changes meanwhile."""
    folder = manifest.code_folder(runs)
    assert folder is not None
    if folder.is_dir():
        with contextlib.suppress(OSError):
            if all(code_snapshot.digest(folder / name) == digest for name, digest in manifest.frozen.items()):
                os.utime(folder)
                return
        # Moved away at once: a job that reads a damaged copy file by file must not mix it with the new one.
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".damaged."))
        with contextlib.suppress(OSError):
            folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)
    copy = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".code."))
    try:
        copy.chmod(0o755)
        for name, places in entries.items():
            for relative, path, linked in _content(places, runs):
                target = copy / name / relative if relative else copy / name
                if target.exists() or target.is_symlink():
                    continue  # an earlier place of a namespace package has it
                target.parent.mkdir(parents=True, exist_ok=True)
                if linked:
                    target.symlink_to(path.resolve())
                else:
                    shutil.copyfile(path, target)
                    target.chmod(0o444)
        if any(code_snapshot.digest(copy / name) != digest for name, digest in manifest.frozen.items()):
            raise OperationError(
                "the sources changed while they were copied",
                where=", ".join(str(place) for places in entries.values() for place in places),
                hint="retry when the files have stopped changing",
            )
        with contextlib.suppress(OSError):  # another submit was faster
            copy.rename(folder)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _keep_manifest(manifest: Manifest, runs: Path, experiment: Experiment | None, before: str) -> str:
    name = _name(manifest.to_json())
    place = code_snapshot.snapshot_folder(runs, name)
    if not renew(runs, name):
        place.mkdir(exist_ok=True)
        if experiment is not None:
            write_bytes(place / "experiment.toml", experiment.text)
        elif before and manifest.experiment:
            earlier = code_snapshot.snapshot_folder(runs, before)
            with contextlib.suppress(OSError):
                shutil.copyfile(earlier / "experiment.toml", place / "experiment.toml")
        write_json(place / "manifest.json", manifest.to_json())
    # The Git commit is recorded again as long as the recorded state had uncommitted changes.
    dirty = True
    with contextlib.suppress(OSError, ValueError):
        dirty = read_json(place / "git.json")["dirty"]
    if dirty and (commit := software.git()):
        write_json(place / "git.json", commit, durable=False)
    return name


def _name(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
