"""Freezing what a submission runs: packages from source trees are copied, what is installed is noted.

What a job imports is found without importing it: ``workloads``, every plug-in, and from there whatever their sources
name in import statements, as far as it lies in source trees. See ``workloads.provenance.code_snapshot`` for what is
on disk and for the check in the job. Copies are named by their content, so taking the same code again writes nothing.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING

from orchestrator import own_packages
from orchestrator.environment.interpreter import Packages
from orchestrator.errors import InputError, OperationError
from workloads import registry
from workloads.contract import TrainConfig
from workloads.files.json_file import write_bytes, write_json
from workloads.files.run_dir import snapshots_folder
from workloads.provenance import code_snapshot, software
from workloads.provenance.code_snapshot import METADATA_SUFFIX, Manifest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OURS = "workloads"
MAX_BYTES = 64 << 20
MAX_FILES = 5_000
"""Sources of more than that are no sources, and every submission would copy them to the runs folder."""
LARGE_FILE_BYTES = 8 << 20
"""A larger file beside the sources is data: the copy links to it."""
_CACHES = frozenset({"__pycache__", "node_modules", "venv", "build", "dist"})
_DATA_NAMES = frozenset({"data", "datasets", "runs", "checkpoints", "outputs", "wandb", "mlruns"})
"""Folders of these names hold data, unless a Python file lies in them."""
_PRUNE_AGE_S = 3600.0
"""A younger snapshot may belong to a submit that has not recorded its runs yet."""
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([A-Za-z_]\w*)|import[ \t]+([\w., \t]+))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Experiment:
    """The experiment file of a submission, byte for byte, and what replaced keys in it."""

    content: bytes
    sets: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, sets: Iterable[str] = ()) -> Experiment | None:
        """None when it is gone meanwhile: the plan holds all that counts."""
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
    """Freeze the code as it is now; the name of the snapshot.

    Args:
        runs: the runs folder, where it is kept.
        packages: interpreter of jobs -> distributions that it has, with versions.
        experiment: what is submitted; kept beside the code.
        before: a snapshot whose experiment is kept, for runs that are sent again.

    Raises:
        InputError: sources are too large to be copied.
        OperationError: they change all the time, or cannot be read.
    """
    sources, installed = _found()
    folder = snapshots_folder(runs)
    folder.mkdir(parents=True, exist_ok=True)
    entries = _entries(sources)
    with _readable():
        frozen_now = _digests(entries, runs)
    code = _name(sorted(frozen_now.items())) if frozen_now else ""
    manifest = Manifest(
        code=code,
        frozen=frozen_now,
        installed={name: code_snapshot.installed_digest(name) for name in sorted(installed)},
        packages={python: software.measured_versions(versions) for python, versions in sorted(packages.items())},
        experiment=experiment.digest if experiment else _experiment_of(runs, before),
    )
    if code:
        _keep_code(manifest, entries, runs)
    return _keep_manifest(manifest, runs, experiment, before)


def code_digest(train: TrainConfig, runs: Path) -> str:
    """Digest of all sources that carry out a run as they are now: ours, and the plug-ins that it uses, with what those
    import from source trees.

    Raises:
        InputError: a plug-in is too large to be copied.
        OperationError: a source cannot be read.
    """
    packages = registry.foreign_packages(train)
    return _code_digest(packages, runs) if packages else software.code_digest()


@cache
def _code_digest(packages: tuple[str, ...], runs: Path) -> str:
    sources, installed = _closure(packages)
    with _readable():
        found = _digests(_entries(sources), runs) | {name: code_snapshot.installed_digest(name) for name in installed}
    return hashlib.sha256(json.dumps([software.code_digest(), sorted(found.items())]).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperationError(
            f"a source cannot be read: {error.strerror or error}",
            where=str(error.filename or ""),
            hint="what jobs import must be readable when it is submitted",
        ) from error


def retake(runs: Path, before: str, *, local: bool) -> str:
    """Freeze the code as it is now for runs that were sent before, with what their interpreters have now.

    Args:
        runs: the runs folder.
        before: the snapshot they had; empty when they had none.
        local: whether they run on this machine, with this interpreter.
    """
    pythons: Iterable[str] = [sys.executable] if local else []
    if not local and before:
        with contextlib.suppress(OSError, ValueError):
            pythons = Manifest.read(runs, before).packages
    packages = {python: Packages.of(python).versions or {} for python in pythons}
    return take(runs, packages, before=before)


def renew(runs: Path, snapshot: str) -> bool:
    """Whether a snapshot is there, so that more runs may be sent with it; then it is as young as a new one."""
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
    """Folders of snapshots that none of these names; what is young is left alone."""
    keep = set(needed)
    for name in list(keep):
        with contextlib.suppress(OSError, ValueError):
            keep.add(f"code-{Manifest.read(runs, name).code}")
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(snapshots_folder(runs)) as entries:
        for entry in entries:
            if entry.name in keep or entry.is_symlink() or not entry.is_dir():
                continue
            if is_old(Path(entry.path)):
                found.append(Path(entry.path))
    return sorted(found)


def is_old(path: Path) -> bool:
    """Whether a folder of a snapshot was not taken, or taken again, for so long that no submit is at it."""
    try:
        return time.time() - path.stat().st_mtime > _PRUNE_AGE_S
    except OSError:
        return False


# --- what a job imports ---


def _found() -> tuple[dict[str, list[Path]], set[str]]:
    """Places by importable name (or by a distribution's metadata) in source trees, and names of installed packages."""
    points = registry.entry_points()
    sources, installed = _closure([OURS, *(point.module.partition(".")[0] for point in points)])
    if OURS in installed and OURS in dict(own_packages.shadowing()):
        # Jobs do not import orchestrator, so they find another project's package first, unless a copy precedes it.
        installed.remove(OURS)
        sources[OURS] = code_snapshot.origins(OURS)
    for metadata in filter(None, map(_metadata, points)):
        if _goes_with(metadata, sources):
            sources[metadata.name] = [metadata]
    return sources, installed


def _closure(names: Iterable[str]) -> tuple[dict[str, list[Path]], set[str]]:
    """These packages, and what sources of theirs import from source trees."""
    sources: dict[str, list[Path]] = {}
    installed: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in sources or name in installed:
            continue
        places = [place for place in code_snapshot.origins(name) if code_snapshot.in_source_tree(place)]
        if places:
            sources[name] = places
            # Our own package imports nothing else from source trees: a test holds it to that.
            todo += [] if name == OURS else sorted(_imported(places))
        else:
            installed.add(name)
    return sources, installed


def _metadata(point: EntryPoint) -> Path | None:
    """The folder that makes a plug-in known, for jobs whose interpreter may not know it."""
    path = getattr(point.dist, "_path", None)
    return path if isinstance(path, Path) and path.name.endswith(METADATA_SUFFIX) and path.is_dir() else None


def _goes_with(metadata: Path, sources: Mapping[str, list[Path]]) -> bool:
    """Whether a distribution's metadata names a module that is copied."""
    text = (metadata / "entry_points.txt").read_text(encoding="utf-8")
    return any(re.search(rf"=\s*{re.escape(name)}\b", text) for name in sources)


def _imported(places: Iterable[Path]) -> set[str]:
    """Top-level names in source trees that the sources of a package import somewhere."""
    named: dict[str, list[bytes]] = {}
    for place in places:
        for path in place.rglob("*.py") if place.is_dir() else [place]:
            content = path.read_bytes() if path.is_file() else b""
            for module, several in _IMPORT.findall(content):
                for word in [module] if module else several.split(b","):
                    named.setdefault(word.split(b".")[0].split()[0].decode() if word.split() else "", []).append(
                        content
                    )
    found = set()
    for name in named.keys() - sys.stdlib_module_names - {"", OURS}:
        outside = [place for place in code_snapshot.origins(name) if code_snapshot.in_source_tree(place)]
        # A line of prose may begin with "import" or "from" too, and a folder of that name may be anything.
        if outside and any(_really_imports(content, name) for content in named[name]):
            found.add(name)
    return found


def _really_imports(content: bytes, name: str) -> bool:
    import ast

    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == name for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == name:
            return True
    return False


# --- what is copied of it ---


def _entries(sources: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Name below the folder of copies -> where it comes from; several places make up a namespace package."""
    return {
        (name + place.suffix if place.is_file() else name): [p for p in places if p.is_file() == place.is_file()]
        for name, places in sorted(sources.items())
        for place in places
    }


@dataclass(slots=True)
class _Budget:
    """What may still be copied."""

    root: Path
    num_files: int = 0
    num_bytes: int = 0

    def spend(self, size: int) -> None:
        self.num_files += 1
        self.num_bytes += size
        if self.num_files > MAX_FILES or self.num_bytes > MAX_BYTES:
            raise InputError(
                "the sources that jobs import from here are too large to be frozen",
                where=str(self.root),
                why=f"more than {MAX_FILES:,} files or {MAX_BYTES >> 20} MiB, and every submission keeps a copy",
                hint="move data out of the package, or install it without -e: what is installed is checked, not copied",
            )


def _content(places: Iterable[Path], runs: Path) -> Iterator[tuple[str, Path, bool]]:
    """Relative name, file and whether the copy only links to it, of what belongs to an entry; in order."""
    for place in places:
        budget = _Budget(place)
        if place.is_file():
            yield "", place, False
            continue
        todo = [place]
        while todo:
            folder = todo.pop()
            with os.scandir(folder) as scan:
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
                    budget.spend(0 if linked else size)
                    yield name, path, linked


def _is_data(entry: os.DirEntry[str]) -> bool:
    """Whether a folder holds data: by its name, or because it lies elsewhere; never one with Python in it."""
    if not entry.is_symlink() and entry.name not in _DATA_NAMES:
        return False
    with os.scandir(entry.path) as below:
        return not any(other.name.endswith(".py") for other in below)


def _digests(entries: Mapping[str, list[Path]], runs: Path) -> dict[str, str]:
    """What ``code_snapshot.digest`` will say of each copy."""
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
    """Copy, unless a whole copy is there; a damaged one is replaced.

    Raises:
        OperationError: a source changed while it was copied.
    """
    folder = manifest.code_folder(runs)
    assert folder is not None
    if folder.is_dir():
        with contextlib.suppress(OSError):
            if all(code_snapshot.digest(folder / name) == digest for name, digest in manifest.frozen.items()):
                os.utime(folder)
                return
        _set_aside(folder)
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
                "the sources changed while they were frozen",
                where=", ".join(str(place) for places in entries.values() for place in places),
                hint="submit again when they are at rest",
            )
        with contextlib.suppress(OSError):  # another submit was faster
            copy.rename(folder)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _set_aside(folder: Path) -> None:
    """A job may be reading it, and what it reads is wrong: it goes away at once, whole."""
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".damaged."))
    with contextlib.suppress(OSError):
        folder.rename(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)


def _keep_manifest(manifest: Manifest, runs: Path, experiment: Experiment | None, before: str) -> str:
    name = _name(manifest.to_json())
    place = code_snapshot.snapshot_folder(runs, name)
    if not renew(runs, name):
        place.mkdir(exist_ok=True)
        if experiment is not None:
            write_bytes(place / "experiment.toml", experiment.text)
        elif before and manifest.experiment:
            with contextlib.suppress(OSError):
                shutil.copyfile(
                    code_snapshot.snapshot_folder(runs, before) / "experiment.toml", place / "experiment.toml"
                )
        write_json(place / "manifest.json", manifest.to_json())
    _keep_commit(place)
    return name


def _keep_commit(place: Path) -> None:
    """Note the commit that the code is of: once, and again as long as it is of none."""
    path = place / "git.json"
    with contextlib.suppress(OSError, ValueError):
        if not json.loads(path.read_text(encoding="utf-8"))["dirty"]:
            return
    if commit := software.git():
        write_json(path, commit, durable=False)


def _experiment_of(runs: Path, snapshot: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        return Manifest.read(runs, snapshot).experiment if snapshot else ""
    return ""


def _name(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
