"""Content of an image folder, recorded once and compared cheaply afterwards. Used by ``imagefolder``.

    CACHE/manifest.json   Summary: signature (names, sizes and times), content digest, classes, counts
    CACHE/files           Entry and Facts of every file; read only when the signature no longer matches

CACHE is ``.orchestrate-cache`` in the data set's folder, or a folder of the user's where that cannot be written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from workloads.datasets.shared.file_tasks import Progress, in_threads, locked, sha256
from workloads.datasets.shared.image_data import GRAY_MODES, unreadable
from workloads.errors import DatasetError
from workloads.files.json_file import read_json, write_bytes, write_json
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from PIL import Image

VERSION = 1
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
"""Those of torchvision's ImageFolder; files with other endings, and hidden ones, are ignored."""
CACHE_NAME = ".orchestrate-cache"


class Entry(NamedTuple):
    """An image file as a folder listing shows it."""

    path: str
    """``train/CLASS/NAME`` below the data set's folder."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Listing:
    """All image files of a data set: training before test, then by class and name."""

    folder: Path
    class_folders: tuple[str, ...]
    entries: tuple[Entry, ...]
    num_train: int

    @cached_property
    def signature(self) -> str:
        """Digest of names, sizes and times."""
        lines = (f"{path}\0{size}\0{mtime_ns}\n" for path, size, mtime_ns in self.entries)
        return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


class Facts(NamedTuple):
    """What reading a file found."""

    sha256: str
    width: int
    height: int
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The content of ``manifest.json``."""

    version: int = VERSION
    signature: str
    digest: str
    """Of names, classes and the files' bytes; not of times."""
    table_sha256: str
    """Of the file ``files`` that belongs to this summary."""
    class_names: tuple[str, ...]
    num_train: int
    num_test: int
    channels: int
    image_size: int
    """Pixels per side when all images are square and of one size, else 0."""
    sizes: str
    """For people: ``32 x 32``, or ``75 x 100 to 500 x 375``."""


def scan(folder: Path) -> Listing:
    """List the images. Raises DatasetError for a missing or empty split or class, or a link out of the data set."""
    try:
        classes = {split: _class_folders(folder, split) for split in ("train", "test")}
        for split, other in (("test", "train"), ("train", "test")):
            for name in classes[other]:
                if name not in classes[split]:
                    raise DatasetError(
                        f"class folder missing: {other} has it, {split} does not",
                        where=str(folder / split / name),
                        hint="both splits need the same classes: restore the folder, or remove it from the other split",
                    )
        halves = [[e for name in classes[split] for e in _images(folder, f"{split}/{name}")] for split in classes]
    except OSError as error:
        where = str(error.filename or folder)
        raise DatasetError("cannot list this folder", where=where, why=error.strerror or str(error)) from error
    return Listing(folder, tuple(classes["train"]), (*halves[0], *halves[1]), len(halves[0]))


def _class_folders(folder: Path, split: str) -> list[str]:
    names = []
    where = folder / split
    if where.is_dir():
        with os.scandir(where) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir() and _inside(e, folder)]
    if not names:
        why = "the folder is empty" if where.is_dir() else "no such folder"
        hint = "an image folder has train/CLASS/* and test/CLASS/*"
        raise DatasetError("no class folders here", where=str(where), why=why, hint=hint)
    return sorted(names, key=os.fsencode)  # by bytes: the order of characters depends on the locale's encoding


def _images(folder: Path, below: str) -> list[Entry]:
    found = []
    with os.scandir(folder / below) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                hint = "images lie directly in their class folder: move them up, or move the folder away"
                raise DatasetError("a folder inside a class folder", where=entry.path, hint=hint)
            if os.path.splitext(entry.name)[1].lower() in SUFFIXES and _inside(entry, folder):  # noqa: PTH122 (speed)
                if not entry.is_file():  # opening a named pipe blocks until somebody writes (fifo(7))
                    hint = "put the image itself in its place, or remove it"
                    raise DatasetError("a broken link, or not a regular file", where=entry.path, hint=hint)
                stat = entry.stat()
                found.append(Entry(f"{below}/{entry.name}", stat.st_size, stat.st_mtime_ns))
    if not found:
        hint = f"put its images back ({', '.join(sorted(SUFFIXES))})"
        raise DatasetError("no images in this class folder", where=str(folder / below), hint=hint)
    return sorted(found, key=lambda entry: os.fsencode(entry.path))


def _inside(entry: os.DirEntry[str], folder: Path) -> bool:
    """Return True; raise DatasetError for a link that leads out of the data set."""
    if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(folder.resolve()):
        raise DatasetError(
            "a link that leads out of the data set",
            where=entry.path,
            why=f"it leads to {Path(entry.path).resolve()}",
            hint="put the file itself here: the link's target may change without notice",
        )
    return True


@dataclass(frozen=True)
class Manifest:
    """A summary on disk and its folder."""

    cache: Path
    summary: Summary

    @cached_property
    def table(self) -> dict[Entry, Facts]:
        """Facts of each file at its size and time; empty when missing, damaged or of another summary."""
        with contextlib.suppress(OSError):
            content = (self.cache / "files").read_bytes()
            if hashlib.sha256(content).hexdigest() == self.summary.table_sha256:
                rows = zip(*[iter(os.fsdecode(content).split("\0"))] * 7, strict=False)
                return {Entry(p, int(s), int(t)): Facts(d, int(w), int(h), int(c)) for p, s, t, d, w, h, c in rows}
        return {}

    def changed(self, listing: Listing) -> list[Entry]:
        """Return files that are new or whose size or time differs from the record."""
        return [entry for entry in listing.entries if entry not in self.table]

    def hashes(self, listing: Listing) -> list[str]:
        """Return the content digest of every file as it is now; reads changed ones only. Raises OSError."""
        known = ((entry, self.table.get(entry)) for entry in listing.entries)
        return [facts.sha256 if facts else sha256(listing.folder / entry.path) for entry, facts in known]

    def require_all(self, listing: Listing) -> None:
        """Raise DatasetError when a recorded file is missing."""
        gone = sorted({entry.path for entry in self.table} - {entry.path for entry in listing.entries})
        if gone:
            raise DatasetError(
                f"{len(gone):,} of the data set's {len(self.table):,} images are missing, this one first",
                where=str(listing.folder / gone[0]),
                why="they were there at the first use; did a scratch purge delete them, or was a copy interrupted?",
                hint=f"put them back; if you deleted them on purpose, delete {self.cache} and prepare again",
            )


def _read(path: Path) -> Facts:
    try:
        digest = sha256(path)
        with Image.open(path) as picture:
            return Facts(digest, *picture.size, 1 if picture.mode in GRAY_MODES else 3)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise unreadable(path, error) from error


def content_digest(listing: Listing, hashes: list[str]) -> str:
    """Return the digest of the whole data set."""
    lines = (f"{entry.path}\0{digest}\n" for entry, digest in zip(listing.entries, hashes, strict=True))
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def cache_folders(folder: Path) -> list[Path]:
    """Return the folders that may hold a data set's cache: beside the data, and below the user's cache folder."""
    folders = [folder / CACHE_NAME]
    with contextlib.suppress(RuntimeError):  # no home folder
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders.append(home / "orchestrate" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16])
    return folders


@contextlib.contextmanager
def writable_cache(folder: Path, progress: Progress) -> Iterator[Path]:
    """Yield the first cache folder that can be written, locked. Raises DatasetError: none can, or a write failed."""
    with contextlib.ExitStack() as stack:
        failures = []
        for cache in cache_folders(folder):
            try:
                cache.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(cache / "lock", progress))
            except OSError as error:
                failures.append(f"{cache}: {error.strerror or error}")
                continue
            try:
                yield cache
            except OSError as error:
                raise _unwritable(cache, f"{errno.errorcode.get(error.errno or 0, '')} {error.strerror}") from error
            return
        raise _unwritable(folder, "; ".join(failures))


def _unwritable(where: Path, why: str) -> DatasetError:
    hint = "free space there, or set XDG_CACHE_HOME to a folder you can write"
    return DatasetError("cannot write the data set's cache", where=str(where), why=why.strip(), hint=hint)


def _manifests(folder: Path) -> Iterator[Manifest]:
    for cache in cache_folders(folder):
        # Absent, damaged or of another version: replaced at the next use.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            data = read_json(cache / "manifest.json")
            summary = Summary(**{**data, "class_names": tuple(data["class_names"])})
            if summary.version == VERSION:
                yield Manifest(cache, summary)


def newest(folder: Path) -> Manifest | None:
    """Return the manifest beside the data, else the user's; None before any use."""
    return next(_manifests(folder), None)


def current(listing: Listing) -> Summary | None:
    """Return the summary of the data set as it is now; None where none has been recorded."""
    return next((m.summary for m in _manifests(listing.folder) if m.summary.signature == listing.signature), None)


def update(listing: Listing, progress: Progress) -> Summary:
    """Return the summary of the data set as it is now; write a new manifest where the old one no longer matches.

    Raises:
        DatasetError: images are missing or unreadable, or no folder can hold the manifest.
    """
    if found := current(listing):
        return found
    with writable_cache(listing.folder, progress) as cache:
        if found := current(listing):  # another process wrote it meanwhile
            return found
        facts = _facts(newest(listing.folder), listing, progress)
        rows = zip(listing.entries, facts, strict=True)
        table = os.fsencode("".join(f"{cell}\0" for entry, row in rows for cell in (*entry, *row)))
        summary = _summary(listing, facts, hashlib.sha256(table).hexdigest())
        write_bytes(cache / "files", table)
        write_json(cache / "manifest.json", dataclasses.asdict(summary))
        return summary


def _facts(known: Manifest | None, listing: Listing, progress: Progress) -> list[Facts]:
    """Return the facts of every file; reads changed ones only. Raises DatasetError for a missing file, or no image."""
    if known:
        known.require_all(listing)
    changed = known.changed(listing) if known else listing.entries
    progress(f"reading {len(changed):,} of {len(listing.entries):,} images in {listing.folder}")
    size_bytes = sum(entry.size for entry in changed)
    found = in_threads(lambda e: _read(listing.folder / e.path), changed, progress, "read", size_bytes=size_bytes)
    read = dict(zip(changed, found, strict=True))
    table = known.table if known else {}
    return [read.get(entry) or table[entry] for entry in listing.entries]


def _summary(listing: Listing, facts: list[Facts], table_sha256: str) -> Summary:
    sizes = sorted({(row.width, row.height) for row in facts}, key=lambda size: size[0] * size[1])
    small, large = (f"{width} x {height}" for width, height in (sizes[0], sizes[-1]))
    return Summary(
        signature=listing.signature,
        digest=content_digest(listing, [row.sha256 for row in facts]),
        table_sha256=table_sha256,
        # A name that is not UTF-8 must still reach JSON files and tables.
        class_names=tuple(os.fsencode(name).decode("utf-8", "backslashreplace") for name in listing.class_folders),
        num_train=listing.num_train,
        num_test=len(facts) - listing.num_train,
        channels=max(row.channels for row in facts),
        image_size=sizes[0][0] if len(sizes) == 1 and sizes[0][0] == sizes[0][1] else 0,
        sizes=small if len(sizes) == 1 else f"{small} to {large}",
    )
