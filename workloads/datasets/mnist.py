"""``mnist``: 70,000 handwritten digits in torchvision's layout, ``$ORCHESTRATE_DATA/MNIST/raw/*-ubyte``.

Each load checks the four raw IDX files by SHA-256. Only ``orchestrate data prepare mnist`` downloads.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

from workloads.contract import TrainConfig
from workloads.datasets.shared.file_tasks import Progress
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.datasets.shared.published import PublishedFile, PublishedFolder, fetch
from workloads.errors import DatasetError
from workloads.lazy import lazy_imports
from workloads.registry import DatasetDeclaration, DatasetShape

with lazy_imports(__name__):
    import numpy as np
    from numpy.typing import NDArray

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
"""torchvision's; the second has no TLS, so the digests protect the content."""


def raw_file(name: str, size_bytes: int, sha256: str) -> PublishedFile:
    """Describe one of the four unpacked files."""
    return PublishedFile(name, sha256, min_bytes=size_bytes, max_bytes=size_bytes)


def archive(name: str, md5: str, mirrors: Sequence[str] = MIRRORS) -> PublishedFile:
    """Describe ``NAME.gz``, with the digest that torchvision knows."""
    urls = [f"{mirror}{name}.gz" for mirror in mirrors]
    return PublishedFile(f"{name}.gz", md5, "md5", urls, max_bytes=64 << 20)


ARCHIVES = {
    "train-images-idx3-ubyte": archive("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "train-labels-idx1-ubyte": archive("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
    "t10k-images-idx3-ubyte": archive("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
    "t10k-labels-idx1-ubyte": archive("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
}


def _install(folder: Path, files: Sequence[PublishedFile], progress: Progress) -> None:
    for file in files:
        published = ARCHIVES[file.name]
        path = folder / published.name
        provided = not published.fault(path)
        fetch(published, path, progress)
        progress(f"{file.name} from {path}")
        file.write(folder, gzip.decompress(path.read_bytes()), path)
        if not provided:
            path.unlink()


RAW = PublishedFolder(
    "MNIST",
    "MNIST/raw",
    (
        raw_file(
            "train-images-idx3-ubyte", 47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        raw_file("train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        raw_file(
            "t10k-images-idx3-ubyte", 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        raw_file("t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    _install,
    fix="run `orchestrate data prepare mnist` where there is a network, or copy the four files there by hand",
)
"""Training images and labels, then test images and labels."""


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes: two zeros, type 8, number of axes, each length as a big-endian int32, bytes.

    Raises DatasetError that names the file when it is another one, or its length differs from its header.
    """
    content = path.read_bytes()
    if len(content) >= 4 and content[:3] == b"\x00\x00\x08":
        axes = content[3]
        lengths = np.frombuffer(content[4 : 4 + 4 * axes], ">i4").tolist()
        body = np.frombuffer(content, np.uint8)[4 + 4 * axes :]
        if len(lengths) == axes and body.size == int(np.prod(lengths)):
            return body.reshape(lengths)
    raise DatasetError("not a whole IDX file of unsigned bytes", where=str(path), hint=RAW.fix)


def _load(root: Path | None, name: str, _config: TrainConfig) -> ImageData:
    folder = RAW.verified(root, name)
    images, labels, test_images, test_labels = (read_idx(folder / file.name) for file in RAW.files)
    return ImageData.of(
        Split(labels.astype(np.int64), images[:, None]),
        Split(test_labels.astype(np.int64), test_images[:, None]),
        class_names=tuple("0123456789"),
        digest=RAW.published_digest(),
    )


DECLARATION = DatasetDeclaration(
    name="mnist",
    summary="70,000 handwritten digits, 28 x 28 gray, in torchvision's layout below the data root.",
    packages=("numpy",),
    needs_root=True,
    folder=RAW.path,
    shape=lambda _root, _name: DatasetShape(image_size=28, channels=1, classes=10, num_train=60_000, num_test=10_000),
    check=RAW.check,
    digest=RAW.digest,
    prepare=RAW.prepare,
    load=_load,
)
