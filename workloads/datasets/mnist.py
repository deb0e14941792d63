"""``mnist``: the 70,000 handwritten digits in torchvision's layout, ``$ORCHESTRATE_DATA/MNIST/raw/*-ubyte``.

The four raw IDX files are checked by SHA-256 whenever they are read. Only ``orchestrate data prepare mnist`` downloads.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.contract import TrainConfig
from workloads.datasets.shared.file_tasks import sha256
from workloads.datasets.shared.image_data import ImageData, Split, statistics
from workloads.datasets.shared.published import download, writing
from workloads.errors import DatasetError
from workloads.files.json_file import write_bytes
from workloads.registry import DatasetDeclaration, DatasetShape, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RawFile:
    """One of the four files."""

    name: str
    size_bytes: int
    sha256: str
    archive_md5: str
    """Of ``NAME.gz``, the digest that torchvision knows."""


FILES: tuple[RawFile, ...] = (
    RawFile(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    ),
    RawFile(
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "d53e105ee54ea40749a09fcbcd1e9432",
    ),
    RawFile(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "9fb629c4189551a2d022fa330f9573f3",
    ),
    RawFile(
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
"""Training images and labels, then test images and labels."""

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
"""torchvision's; the second has no TLS, which the digests make up for."""
ARCHIVE_LIMIT_BYTES = 64 << 20
"""More than any of the archives: a mirror's error page or endless stream is cut off here."""
PREPARE = "run `orchestrate data prepare mnist` where there is a network, or copy the four files there by hand"


def raw_folder(root: Path | None) -> Path:
    """Where the files lie. Raises DatasetError without a data root."""
    if root is None:
        raise DatasetError(
            "mnist needs a folder for data sets, and none is set",
            where="ORCHESTRATE_DATA",
            hint="export ORCHESTRATE_DATA=/path/to/data, give --data, or set data in cluster.toml",
        )
    return root / "MNIST" / "raw"


def _shape(_root: Path | None, _name: str) -> DatasetShape:
    return DatasetShape(image_size=28, channels=1, classes=10, num_train=60_000, num_test=10_000)


def _check(root: Path | None, _name: str) -> list[Problem]:
    try:
        folder = raw_folder(root)
    except DatasetError as error:
        return [Problem(where=error.where, what=error.what, fix=error.hint)]
    problems = []
    for file in FILES:
        path = folder / file.name
        try:
            size = path.stat().st_size
        except OSError as error:
            problems.append(Problem(where=str(path), what=f"missing ({error.strerror})", fix=PREPARE))
        else:
            if size != file.size_bytes:
                what = f"{size} bytes, not {file.size_bytes}: truncated or another file"
                problems.append(Problem(where=str(path), what=what, fix=PREPARE))
    return problems


def _digest(root: Path | None, name: str) -> str:
    """What ``load`` will insist on; empty while files are missing."""
    return "" if _check(root, name) else _known_digest()


def _known_digest() -> str:
    return hashlib.sha256("".join(file.sha256 for file in FILES).encode()).hexdigest()


def _prepare(root: Path | None, _name: str, progress: Callable[[str], None]) -> None:
    folder = raw_folder(root)
    if not any(_fault(folder, file) for file in FILES):
        progress(f"mnist: {folder} is whole")
        return
    with writing(folder, "mnist", "MNIST", progress):
        for file in FILES:
            if _fault(folder, file):  # asked again: another process may have done it while this one waited
                _make(folder, file, progress)
    progress(f"mnist: ready in {folder}")


def _fault(folder: Path, file: RawFile) -> str:
    """Why a raw file is not the right one; empty when it is."""
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"{size} bytes, not {file.size_bytes}"
        found = sha256(path)
    except OSError as error:
        return error.strerror or str(error)
    return "" if found == file.sha256 else f"SHA-256 {found}, not {file.sha256}"


def _make(folder: Path, file: RawFile, progress: Callable[[str], None]) -> None:
    """Put one raw file in place, from the archive beside it or from a mirror."""
    import gzip

    archive = f"{file.name}.gz"
    attempts = []
    sources: list[Path | str] = [folder / archive, *(mirror + archive for mirror in MIRRORS)]
    for source in sources:
        progress(f"mnist: {archive} from {source}")
        try:
            packed = _archive(source)
        except OSError as error:
            attempts.append(f"{source}: {error}")
            continue
        found = hashlib.md5(packed, usedforsecurity=False).hexdigest()
        if found != file.archive_md5:
            attempts.append(f"{source}: damaged, MD5 {found} and not {file.archive_md5}")
            continue
        raw = gzip.decompress(packed)
        if hashlib.sha256(raw).hexdigest() != file.sha256:
            attempts.append(f"{source}: unpacks to another file than expected")
            continue
        write_bytes(folder / file.name, raw)
        return
    raise DatasetError(
        f"no good copy of {archive} could be had",
        where=str(folder / file.name),
        why="; ".join(attempts),
        hint="where there is no network, copy the four .gz archives or raw files into that folder and prepare again",
    )


def _archive(source: Path | str) -> bytes:
    """Raises OSError when it cannot be had whole."""
    if isinstance(source, Path):
        return source.read_bytes()
    stream = io.BytesIO()
    trouble = download(source, stream, ARCHIVE_LIMIT_BYTES)
    if trouble:
        raise OSError(trouble)
    return stream.getvalue()


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes: two zeros, type 8, number of axes, each length as a big-endian int32, the bytes.

    Raises:
        DatasetError: not such a file, or shorter or longer than it says; it is named.
    """
    import numpy as np

    content = path.read_bytes()
    if len(content) >= 4 and content[:3] == b"\x00\x00\x08":
        axes = content[3]
        lengths = np.frombuffer(content[4 : 4 + 4 * axes], ">i4").tolist()
        body = np.frombuffer(content, np.uint8)[4 + 4 * axes :]
        if len(lengths) == axes and body.size == int(np.prod(lengths)):
            return body.reshape(lengths)
    raise DatasetError("not a whole IDX file of unsigned bytes", where=str(path), hint=PREPARE)


def _load(root: Path | None, _name: str, _config: TrainConfig) -> ImageData:
    folder = raw_folder(root)
    for file in FILES:
        fault = _fault(folder, file)
        if fault:
            raise DatasetError(
                "missing or damaged file of MNIST", where=str(folder / file.name), why=fault, hint=PREPARE
            )
    images, labels, test_images, test_labels = (read_idx(folder / file.name) for file in FILES)
    train, test = _split(images, labels), _split(test_images, test_labels)
    mean, std = statistics(train.images)
    return ImageData(
        train,
        test,
        class_names=tuple(str(digit) for digit in range(10)),
        channels=1,
        image_size=train.images.shape[-1],
        mean=mean,
        std=std,
        digest=_known_digest(),
    )


def _split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
    import numpy as np

    return Split(labels.astype(np.int64), images[:, None])


DECLARATION = DatasetDeclaration(
    name="mnist",
    summary="70,000 handwritten digits, 28 x 28 gray, in torchvision's layout below the data root.",
    packages=("numpy",),
    needs_root=True,
    folder=lambda root, _name: raw_folder(root),
    shape=_shape,
    check=_check,
    digest=_digest,
    prepare=_prepare,
    load=_load,
)
