"""Images of a folder, decoded once into one uint8 file that jobs map into memory. Used by ``imagefolder``.

    CACHE/pixels-CxS.npy    (images, C, S, S): training before test, in the order of the listing
    CACHE/pixels-CxS.json   digest of the data set, the file's size and digest, statistics of the training images

A file that differs from its description, or belongs to an earlier state of the data set, is replaced.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from workloads.datasets.shared.file_tasks import LOCK_WAIT_S, Progress, in_threads, sha256
from workloads.datasets.shared.image_data import decode, statistics
from workloads.datasets.shared.manifest import Entry, Listing, Summary, cache_folders, writable_cache
from workloads.files.json_file import read_json, write_json
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import numpy as np
    from numpy.typing import NDArray

VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """All images of a data set."""

    images: NDArray[np.uint8]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def pixels(listing: Listing, summary: Summary, size: int, progress: Progress) -> Pixels:
    """Return all images at ``size`` pixels per side, from a verified cache or decoded now.

    Raises:
        DatasetError: an image cannot be read, or no folder can hold the cache.
    """
    name = f"pixels-{summary.channels}x{size}.npy"
    for cache in cache_folders(listing.folder):
        if found := _cached(cache / name, summary):
            return found
    with writable_cache(listing.folder, progress) as cache:
        path = cache / name
        if found := _cached(path, summary):  # another process may have written it meanwhile
            return found
        _remove_leftovers(path)
        _decode_all(listing, summary, size, path, progress)
        images = _mapped(path)
        mean, std = statistics(images[: summary.num_train])
        about = {"version": VERSION, "content": summary.digest, "size_bytes": path.stat().st_size}
        write_json(path.with_suffix(".json"), {**about, "sha256": sha256(path), "mean": mean, "std": std})
        return Pixels(images, mean, std)


def _cached(path: Path, summary: Summary) -> Pixels | None:
    """Return the images of a cache if it is whole and belongs to this data set."""
    try:
        known = read_json(path.with_suffix(".json"))
        expected = (known["version"], known["content"], known["size_bytes"])
        if expected != (VERSION, summary.digest, path.stat().st_size) or sha256(path) != known["sha256"]:
            return None
        return Pixels(_mapped(path), tuple(known["mean"]), tuple(known["std"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remove_leftovers(path: Path) -> None:
    """Delete half-written files of killed processes; without locks a young one may still be written."""
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LOCK_WAIT_S:
                left.unlink()


def _mapped(path: Path) -> NDArray[np.uint8]:
    # Mode "c", copy on write: ranks of a node share the pages, and torch.from_numpy warns of read-only arrays.
    images: NDArray[np.uint8] = np.load(path, mmap_mode="c", allow_pickle=False)
    return images


def _decode_all(listing: Listing, summary: Summary, size: int, path: Path, progress: Progress) -> None:
    def pixels_of(entry: Entry) -> NDArray[np.uint8]:
        return np.asarray(decode(listing.folder / entry.path, channels=summary.channels, size=size))

    progress(f"decoding {len(listing.entries):,} images in {listing.folder}")
    size_bytes = sum(entry.size for entry in listing.entries)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            shape = (len(listing.entries), summary.channels, size, size)
            np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for image in in_threads(pixels_of, listing.entries, progress, "decoded", size_bytes=size_bytes):
                # write(2) reports a full disk; storing into a mapped file would end the process by SIGBUS (mmap(2)).
                stream.write(image.tobytes() if image.ndim == 2 else image.transpose(2, 0, 1).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
