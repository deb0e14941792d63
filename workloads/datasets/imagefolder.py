"""``imagefolder/NAME``: a folder a class, ``$ORCHESTRATE_DATA/NAME/{train,test}/CLASS/*``.

The name is identity. The first use, or ``orchestrate data prepare``, notes what every file holds (``manifest``) and
decodes all of them once (``decoded``). From then on a changed file makes the data set another one, and a file that is
gone is an error that names it: scratch file systems delete old files, and half a data set trains without complaint.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.datasets.shared import decoded_images, manifest
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.datasets.shared.manifest import Listing, Summary
from workloads.errors import DatasetError, InputError, OrchestrateError
from workloads.registry import DatasetDeclaration, DatasetShape, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

CHEAP_BYTES = 1 << 30
"""Planning reads changed files up to this; beyond, the digest is left to ``data prepare`` or the job."""


def located(root: Path | None, name: str) -> Path:
    """The folder of ``imagefolder/NAME``.

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
    if root is None:
        raise DatasetError(
            f"{name} needs a folder for data sets, and none is set",
            where="ORCHESTRATE_DATA",
            hint="export ORCHESTRATE_DATA=/path/to/data, give --data, or set data in cluster.toml",
        )
    folder = root / member
    if not os.path.isdir(folder):  # noqa: PTH112 (Path.is_dir raises where access is denied)
        others = _data_sets(root)
        raise DatasetError(
            "no such data set",
            where=str(folder),
            why=f"{root} has {', '.join(others)}" if others else f"{root} has no folder with a train/ in it",
            hint=f"lay the images out as {folder}/train/CLASS/* and {folder}/test/CLASS/*",
        )
    if not folder.resolve().is_relative_to(root.resolve()):
        raise InputError(
            f"{name} is a link that leads out of the data root",
            where=str(folder),
            why=f"it leads to {folder.resolve()}",
            hint="move the data below the data root, or point ORCHESTRATE_DATA at the folder it really lies in",
        )
    return folder


def _data_sets(root: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(path.name for path in root.iterdir() if (path / "train").is_dir())
    return []


def _members(root: Path | None) -> list[str]:
    return [f"imagefolder/{folder}" for folder in _data_sets(root)] if root is not None else []


def _shape(root: Path | None, name: str) -> DatasetShape | None:
    try:
        found = manifest.newest(located(root, name))
    except OrchestrateError:
        return None
    if found is None or not found.summary.image_size:
        return None  # never looked into, or images of differing sizes
    summary = found.summary
    return DatasetShape(
        image_size=summary.image_size,
        channels=summary.channels,
        classes=len(summary.class_names),
        num_train=summary.num_train,
        num_test=summary.num_test,
    )


def _check(root: Path | None, name: str) -> list[Problem]:
    try:
        listing = manifest.scan(located(root, name))
        found = manifest.newest(listing.folder)
        if found is not None and found.summary.signature != listing.signature:
            found.insist_on_all(listing)
    except OrchestrateError as error:
        return [Problem(where=error.where or name, what=_sentence(error), fix=error.hint)]
    return [
        Problem(where=str(listing.folder / entry.path), what="empty file", fix="put a whole copy in its place")
        for entry in listing.entries
        if not entry.size
    ]


def _sentence(error: OrchestrateError) -> str:
    return f"{error.what} ({error.why})" if error.why else error.what


def _digest(root: Path | None, name: str) -> str:
    try:
        listing = manifest.scan(located(root, name))
        found = manifest.newest(listing.folder)
        if found is None:
            return ""
        if found.summary.signature == listing.signature:
            return found.summary.digest
        changed = found.changed(listing)
        if sum(entry.size for entry in changed) > CHEAP_BYTES:
            return ""
        return manifest.content_digest(listing, found.hashes(listing))
    except (OrchestrateError, OSError):
        return ""


def _prepare(root: Path | None, name: str, progress: Callable[[str], None]) -> None:
    listing = manifest.scan(located(root, name))
    summary = manifest.up_to_date(listing, progress)
    if summary.image_size:
        decoded_images.pixels(listing, summary, summary.image_size, progress)
    else:
        progress(f"{name}: images of {summary.sizes} pixels; a run brings them to its image_size when it starts")
    counts = f"{summary.num_train:,} training and {summary.num_test:,} test images"
    progress(f"{name}: ready, {counts} of {len(summary.class_names)} classes")


def _load(root: Path | None, name: str, config: TrainConfig) -> ImageData:
    listing = manifest.scan(located(root, name))
    summary = manifest.up_to_date(listing, _log.info)
    size = _stored_size(listing, summary, config.image_size)
    stored = decoded_images.pixels(listing, summary, size, _log.info)
    return ImageData(
        _split(listing, stored.images, slice(0, summary.num_train)),
        _split(listing, stored.images, slice(summary.num_train, None)),
        class_names=summary.class_names,
        channels=summary.channels,
        image_size=size,
        mean=stored.mean,
        std=stored.std,
        digest=summary.digest,
    )


def _stored_size(listing: Listing, summary: Summary, wished: int | None) -> int:
    """Pixels a side to decode to: the images' own, unless they differ or a smaller size is all that is wanted."""
    if summary.image_size:
        return min(summary.image_size, wished or summary.image_size)
    if wished is None:
        raise DatasetError(
            f"images of {summary.sizes} pixels must be brought to one square size",
            where=str(listing.folder),
            hint="set image_size, such as image_size = 224: the shorter side is resized to it and the centre kept",
        )
    return wished


def _split(listing: Listing, images: NDArray[np.uint8], part: slice) -> Split:
    import numpy as np

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
    folder=located,
    members=_members,
)
