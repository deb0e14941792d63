"""What an image folder holds, noted once and compared cheaply afterwards. Used by ``imagefolder``.

    CACHE/manifest.json   Summary: signature (names, sizes and times), content digest, classes, counts
    CACHE/files           Facts of every file; read only when the signature no longer matches

CACHE is ``.orchestrate-cache`` in the data set's folder, or a folder of the user's where that cannot be written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from workloads.datasets.shared.file_tasks import held, in_threads, sha256
from workloads.datasets.shared.image_data import GRAY_MODES, unreadable
from workloads.errors import DatasetError
from workloads.files.json_file import read_json, write_bytes, write_json

VERSION = 1
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
"""torchvision's; files with other endings, and hidden ones, are passed over."""
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
    """What one file was when it was read."""

    size: int
    mtime_ns: int
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
    """Pixels a side when all images are square and of one size, else 0."""
    sizes: str
    """For people: ``32 x 32``, or ``75 x 100 to 500 x 375``."""


def scan(folder: Path) -> Listing:
    """List the images.

    Raises:
        DatasetError: a split or class folder is missing or empty, or a link leads out of the data root; it is named.
    """
    try:
        classes = {split: _class_folders(folder, split) for split in ("train", "test")}
        for split, other in (("test", "train"), ("train", "test")):
            for name in classes[other]:
                if name not in classes[split]:
                    raise DatasetError(
                        f"class folder missing: {other} has it, {split} has not",
                        where=str(folder / split / name),
                        hint="both splits need the same classes: restore the folder, or remove it from the other split",
                    )
        halves = [[e for name in classes[split] for e in _images(folder, f"{split}/{name}")] for split in classes]
    except OSError as error:
        raise DatasetError(
            "cannot list this folder", where=str(error.filename or folder), why=error.strerror or str(error)
        ) from error
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
                hint = "images lie directly in their class folder: move them up, or the folder away"
                raise DatasetError("a folder inside a class folder", where=entry.path, hint=hint)
            if os.path.splitext(entry.name)[1].lower() in SUFFIXES and _inside(entry, folder):  # noqa: PTH122 (speed)
                if not entry.is_file():  # opening a pipe would wait for ever
                    hint = "put the image itself in its place, or remove it"
                    raise DatasetError("a link to nothing, or no file at all", where=entry.path, hint=hint)
                stat = entry.stat()
                found.append(Entry(f"{below}/{entry.name}", stat.st_size, stat.st_mtime_ns))
    if not found:
        hint = f"put its images back ({', '.join(sorted(SUFFIXES))})"
        raise DatasetError("no images in this class folder", where=str(folder / below), hint=hint)
    return sorted(found, key=lambda entry: os.fsencode(entry.path))


def _inside(entry: os.DirEntry[str], folder: Path) -> bool:
    """True, or an error for a link that leads out of the data set."""
    if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(folder.resolve()):
        raise DatasetError(
            "a link that leads out of the data set",
            where=entry.path,
            why=f"it leads to {Path(entry.path).resolve()}",
            hint="put the file itself here: what it leads to may change without notice",
        )
    return True


@dataclass(frozen=True)
class Manifest:
    """A summary on disk and the folder it lies in."""

    cache: Path
    summary: Summary

    @cached_property
    def table(self) -> dict[str, Facts]:
        """Facts by path; empty when the file is missing, damaged or of another summary."""
        try:
            content = (self.cache / "files").read_bytes()
        except OSError:
            return {}
        if hashlib.sha256(content).hexdigest() != self.summary.table_sha256:
            return {}
        cells = os.fsdecode(content).split("\0")
        rows = zip(*[iter(cells)] * 7, strict=False)
        return {p: Facts(int(s), int(m), digest, int(w), int(h), int(c)) for p, s, m, digest, w, h, c in rows}

    def changed(self, listing: Listing) -> list[Entry]:
        """Files that are new, or of another size or time than noted."""
        return [entry for entry in listing.entries if self._unchanged(entry) is None]

    def _unchanged(self, entry: Entry) -> Facts | None:
        facts = self.table.get(entry.path)
        return facts if facts is not None and facts[:2] == entry[1:] else None

    def hashes(self, listing: Listing) -> list[str]:
        """Content digest of every file as it is now; reads changed ones only. Raises OSError."""
        known = (self._unchanged(entry) for entry in listing.entries)
        return [
            facts.sha256 if facts is not None else sha256(listing.folder / entry.path)
            for entry, facts in zip(listing.entries, known, strict=True)
        ]

    def insist_on_all(self, listing: Listing) -> None:
        """Raises DatasetError when a noted file is gone."""
        gone = sorted(self.table.keys() - {entry.path for entry in listing.entries})
        if gone:
            raise DatasetError(
                f"{len(gone):,} of the data set's {len(self.table):,} images are gone, this one first",
                where=str(listing.folder / gone[0]),
                why="they were there when the data set was first read; a scratch purge, or an interrupted copy?",
                hint=f"put them back; if they are meant to be gone, delete {self.cache} and prepare again",
            )

    def facts(self, listing: Listing, progress: Callable[[str], None]) -> list[Facts]:
        """Facts of every file; reads changed ones only.

        Raises:
            DatasetError: a file is no image; it is named.
        """
        changed = self.changed(listing)
        progress(f"reading {len(changed):,} of {len(listing.entries):,} images in {listing.folder}")
        size_bytes = sum(entry.size for entry in changed)
        found = in_threads(lambda e: _read(listing.folder, e), changed, progress, "read", size_bytes=size_bytes)
        read = dict(zip(changed, found, strict=True))
        return [read.get(entry) or self.table[entry.path] for entry in listing.entries]


def _read(folder: Path, entry: Entry) -> Facts:
    from PIL import Image

    path = folder / entry.path
    try:
        digest = sha256(path)
        with Image.open(path) as picture:
            channels = 1 if picture.mode in GRAY_MODES else 3
            return Facts(entry.size, entry.mtime_ns, digest, *picture.size, channels)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise unreadable(path, error) from error


def content_digest(listing: Listing, hashes: list[str]) -> str:
    """Digest of the whole data set."""
    lines = (f"{entry.path}\0{digest}\n" for entry, digest in zip(listing.entries, hashes, strict=True))
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def cache_folders(folder: Path) -> list[Path]:
    """Where a data set's caches may lie: with the data, or with the user."""
    folders = [folder / CACHE_NAME]
    with contextlib.suppress(RuntimeError):  # no home folder
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders.append(home / "orchestrate" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16])
    return folders


@contextlib.contextmanager
def building(folder: Path, progress: Callable[[str], None]) -> Iterator[Path]:
    """The first cache folder that can be written, locked.

    Raises:
        DatasetError: none can, another process does not let go, or writing failed.
    """
    with contextlib.ExitStack() as stack:
        failures = []
        for cache in cache_folders(folder):
            try:
                cache.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(cache / "lock", progress))
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
    hint = "make room there, or name a folder you can write with XDG_CACHE_HOME"
    return DatasetError("cannot keep the data set's cache", where=str(where), why=why.strip(), hint=hint)


def newest(folder: Path, signature: str = "") -> Manifest | None:
    """The manifest with this signature; else the one beside the data; else the user's; None before the first use."""
    found = [m for cache in cache_folders(folder) if (m := _manifest(cache)) is not None]
    return next((m for m in found if m.summary.signature == signature), found[0] if found else None)


def _manifest(cache: Path) -> Manifest | None:
    try:
        data = read_json(cache / "manifest.json")
        summary = Summary(**{**data, "class_names": tuple(data["class_names"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # never made, damaged, or of another version: made anew
    return Manifest(cache, summary) if summary.version == VERSION else None


def up_to_date(listing: Listing, progress: Callable[[str], None]) -> Summary:
    """The summary of the data set as it is now, made or renewed where needed.

    Raises:
        DatasetError: images are gone or unreadable, or there is nowhere to keep the manifest.
    """
    found = newest(listing.folder, listing.signature)
    if found is not None and found.summary.signature == listing.signature:
        return found.summary
    with building(listing.folder, progress) as cache:
        found = newest(listing.folder, listing.signature)
        if found is not None and found.summary.signature == listing.signature:
            return found.summary  # another process was faster
        before = found or Manifest(cache, _NOTHING)
        before.insist_on_all(listing)
        facts = before.facts(listing, progress)
        summary = _summary(listing, facts)
        rows = (
            f"{entry.path}\0" + "".join(f"{fact}\0" for fact in row)
            for entry, row in zip(listing.entries, facts, strict=True)
        )
        table = os.fsencode("".join(rows))
        summary = dataclasses.replace(summary, table_sha256=hashlib.sha256(table).hexdigest())
        write_bytes(cache / "files", table)
        write_json(cache / "manifest.json", dataclasses.asdict(summary))
        return summary


_NOTHING = Summary(
    signature="",
    digest="",
    table_sha256="",
    class_names=(),
    num_train=0,
    num_test=0,
    channels=0,
    image_size=0,
    sizes="",
)


def _summary(listing: Listing, facts: list[Facts]) -> Summary:
    sizes = sorted({(row.width, row.height) for row in facts}, key=lambda size: size[0] * size[1])
    small, large = (f"{width} x {height}" for width, height in (sizes[0], sizes[-1]))
    return Summary(
        signature=listing.signature,
        digest=content_digest(listing, [row.sha256 for row in facts]),
        table_sha256="",
        # A name that is not UTF-8 must still reach JSON files and tables.
        class_names=tuple(os.fsencode(name).decode("utf-8", "backslashreplace") for name in listing.class_folders),
        num_train=listing.num_train,
        num_test=len(facts) - listing.num_train,
        channels=max(row.channels for row in facts),
        image_size=sizes[0][0] if len(sizes) == 1 and sizes[0][0] == sizes[0][1] else 0,
        sizes=small if len(sizes) == 1 else f"{small} to {large}",
    )
