"""``imagefolder/NAME``: one folder per class, ``$ORCHESTRATE_DATA/NAME/{train,test}/CLASS/*``.

The name is part of a run's identity. The first use, or ``orchestrate data prepare``, records what every file holds
(``shared/manifest.py``) and decodes all files once (``shared/decoded_images.py``). From then on a changed file changes
the digest, and a missing file is an error that names it: scratch file systems delete old files, and training on the
rest would succeed unnoticed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from workloads.contract import TrainConfig
from workloads.datasets.shared import decoded_images, manifest
from workloads.datasets.shared.file_tasks import Progress, require_root
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.datasets.shared.manifest import Listing, Summary
from workloads.errors import DatasetError, InputError, OrchestrateError
from workloads.lazy import lazy_imports
from workloads.registry import DatasetDeclaration, DatasetShape, Problem

with lazy_imports(__name__):
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

CHEAP_BYTES = 1 << 30
"""Planning reads at most this much of changed files; beyond, ``data prepare`` or the job computes the digest."""


def find_folder(root: Path | None, name: str) -> Path:
    """Return the folder of ``imagefolder/NAME``.

    Raises:
        InputError: NAME is not the plain name of a folder, or leads out of the data root.
        DatasetError: there is no data root, or no such folder in it.
    """
    member = name.partition("/")[2]
    if not member or member.startswith(".") or "/" in member or "\0" in member:
        raise InputError(
            f"{name!r} does not name a folder of the data root",
            hint='write imagefolder/NAME for the folder NAME, such as "imagefolder/cifar10"',
        )
    root = require_root(root, name)
    folder = root / member
    if not os.path.isdir(folder):  # noqa: PTH112 (Path.is_dir raises where access is denied)
        others = _image_folders(root)
        raise DatasetError(
            "no such data set",
            where=str(folder),
            why=f"{root} has {', '.join(others)}" if others else f"{root} has no folder with a train/ in it",
            hint=f"store the images as {folder}/train/CLASS/* and {folder}/test/CLASS/*",
        )
    if not folder.resolve().is_relative_to(root.resolve()):
        raise InputError(
            f"{name} is a link that leads out of the data root",
            where=str(folder),
            why=f"it leads to {folder.resolve()}",
            hint="move the data below the data root, or point ORCHESTRATE_DATA at the folder it really lies in",
        )
    return folder


def _image_folders(root: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in root.iterdir() if (path / "train").is_dir())
    return []


def _shape(root: Path | None, name: str) -> DatasetShape | None:
    try:
        found = manifest.newest(find_folder(root, name))
    except OrchestrateError:
        return None
    if found is None or not found.summary.image_size:
        return None  # not prepared yet, or images of several sizes
    known = {key: getattr(found.summary, key) for key in ("image_size", "channels", "num_train", "num_test")}
    return DatasetShape(classes=len(found.summary.class_names), **known)


def _check(root: Path | None, name: str) -> list[Problem]:
    try:
        listing = manifest.scan(find_folder(root, name))
        if not manifest.current(listing) and (found := manifest.newest(listing.folder)):
            found.require_all(listing)
    except OrchestrateError as error:
        what = f"{error.what} ({error.why})" if error.why else error.what
        return [Problem(where=error.where or name, what=what, fix=error.hint)]
    return [
        Problem(where=str(listing.folder / entry.path), what="empty file", fix="put a whole copy in its place")
        for entry in listing.entries
        if not entry.size
    ]


def _digest(root: Path | None, name: str) -> str:
    try:
        listing = manifest.scan(find_folder(root, name))
        if current := manifest.current(listing):
            return current.digest
        found = manifest.newest(listing.folder)
        if found is None or sum(entry.size for entry in found.changed(listing)) > CHEAP_BYTES:
            return ""
        return manifest.content_digest(listing, found.hashes(listing))
    except (OrchestrateError, OSError):
        return ""


def _prepare(root: Path | None, name: str, progress: Progress) -> None:
    listing = manifest.scan(find_folder(root, name))
    summary = manifest.update(listing, progress)
    if summary.image_size:
        decoded_images.pixels(listing, summary, summary.image_size, progress)
    else:
        progress(f"{name}: images of {summary.sizes} pixels; each run resizes them to its image_size when it starts")
    counts = f"{summary.num_train:,} training and {summary.num_test:,} test images"
    progress(f"{name}: ready, {counts} of {len(summary.class_names)} classes")


def _load(root: Path | None, name: str, config: TrainConfig) -> ImageData:
    listing = manifest.scan(find_folder(root, name))
    summary = manifest.update(listing, _log.info)
    size = _stored_size(listing, summary, config.image_size)
    stored = decoded_images.pixels(listing, summary, size, _log.info)
    return ImageData(
        _split(listing, stored.images, slice(0, summary.num_train)),
        _split(listing, stored.images, slice(summary.num_train, None)),
        summary.class_names,
        stored.mean,
        stored.std,
        summary.digest,
    )


def _stored_size(listing: Listing, summary: Summary, wished: int | None) -> int:
    """Return the pixels per side to decode to: those of the images, unless they differ or the run needs fewer."""
    if summary.image_size:
        return min(summary.image_size, wished or summary.image_size)
    if wished is None:
        raise DatasetError(
            f"images of {summary.sizes} pixels must be resized to one square size",
            where=str(listing.folder),
            hint="set image_size, such as image_size = 224: the shorter side is resized to it and the centre kept",
        )
    return wished


def _split(listing: Listing, images: NDArray[np.uint8], part: slice) -> Split:
    numbers = {name: number for number, name in enumerate(listing.class_folders)}
    entries = listing.entries[part]
    labels = np.array([numbers[entry.path.split("/", 2)[1]] for entry in entries], np.int64)
    return Split(labels, images[part], tuple(listing.folder / entry.path for entry in entries))


DECLARATION = DatasetDeclaration(
    name="imagefolder/*",
    summary="Any folder of images below the data root: NAME/{train,test}/CLASS/*.",
    packages=("pillow",),
    needs_root=True,
    shape=_shape,
    check=_check,
    digest=_digest,
    prepare=_prepare,
    load=_load,
    folder=find_folder,
    members=lambda root: [f"imagefolder/{folder}" for folder in _image_folders(root)] if root else [],
)
