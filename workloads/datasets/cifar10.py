"""``cifar10``: 60,000 photographs of ten classes in torchvision's layout, ``$ORCHESTRATE_DATA/cifar-10-batches-py/``.

The files are pickles of Python 2. Each load checks the MD5 that torchvision knows and reads with an unpickler that
builds arrays, lists, texts and numbers and calls nothing else. Only ``orchestrate data prepare cifar10`` downloads.
"""

from __future__ import annotations

import importlib
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

FOLDER = "cifar-10-batches-py"
ARCHIVE = PublishedFile(
    "cifar-10-python.tar.gz",
    "c58f30108f718f92721af3b95e74349a",
    "md5",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    max_bytes=256 << 20,
)
SIDE_PX, CHANNELS = 32, 3
PIXELS_PER_BATCH = 10_000 * CHANNELS * SIDE_PX**2


MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
BATCH_FILES = tuple(PublishedFile(name, md5, "md5", min_bytes=PIXELS_PER_BATCH + 1) for name, md5 in MD5.items())
"""Five for training, then that for testing."""


def _install(folder: Path, _damaged: Sequence[PublishedFile], progress: Progress) -> None:
    """Unpack the files we know and no other; each is checked before it appears under its name."""
    archive = folder.parent / ARCHIVE.name
    fetch(ARCHIVE, archive, progress)
    with tarfile.open(archive, "r:gz") as members:
        for file in BATCHES.files:
            member = members.extractfile(f"{FOLDER}/{file.name}")
            assert member is not None, "an archive with that MD5 holds the file"
            file.write(folder, member.read(), archive)


BATCHES = PublishedFolder(
    "CIFAR-10",
    FOLDER,
    (*BATCH_FILES, PublishedFile("batches.meta", "5ff9c542aee3614f3951f8cda6e48888", "md5", min_bytes=1)),
    _install,
    fix="run `orchestrate data prepare cifar10` where there is a network, or unpack torchvision's archive there",
)


class _Unpickler(pickle.Unpickler):
    """Builds arrays of numpy's own types and raises on every other class or function that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            # numpy 2 renamed numpy.core to numpy._core (NEP 52).
            core = "numpy._core" if hasattr(np, "_core") else "numpy.core"
            return importlib.import_module(f"{core}.multiarray")._reconstruct
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 pickles bytes for protocol 2
            return importlib.import_module("_codecs").encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a batch or the list of class names. Raises DatasetError where it is damaged or holds more than data."""
    try:
        with open(path, "rb") as stream:
            content = _Unpickler(stream, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        raise DatasetError("not a pickle of plain data", where=str(path), why=str(error), hint=BATCHES.fix) from error
    if not isinstance(content, dict):
        raise DatasetError("not a batch of CIFAR-10", where=str(path), hint=BATCHES.fix)
    return content


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = read_pickle(path)
    pixels, labels = np.asarray(content.get("data")), np.asarray(content.get("labels"))
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), CHANNELS * SIDE_PX**2):
        why = f"data is {pixels.dtype} {pixels.shape}"
        raise DatasetError("not a batch of CIFAR-10", where=str(path), why=why, hint=BATCHES.fix)
    return pixels.reshape(-1, CHANNELS, SIDE_PX, SIDE_PX), labels.astype(np.int64)


def _load(root: Path | None, name: str, _config: TrainConfig) -> ImageData:
    folder = BATCHES.verified(root, name)
    *training, test, names = (folder / file.name for file in BATCHES.files)
    images, labels = zip(*map(_read_batch, training), strict=True)
    test_images, test_labels = _read_batch(test)
    return ImageData.of(
        Split(np.concatenate(labels), np.concatenate(images)),
        Split(test_labels, test_images),
        class_names=tuple(map(str, read_pickle(names)["label_names"])),
        digest=BATCHES.published_digest(),
    )


DECLARATION = DatasetDeclaration(
    name="cifar10",
    summary="60,000 photographs, 32 x 32 RGB, ten classes, in torchvision's layout below the data root.",
    packages=("numpy",),
    needs_root=True,
    folder=BATCHES.path,
    shape=lambda _root, _name: DatasetShape(
        image_size=SIDE_PX, channels=CHANNELS, classes=10, num_train=50_000, num_test=10_000
    ),
    check=BATCHES.check,
    digest=BATCHES.digest,
    prepare=BATCHES.prepare,
    load=_load,
)
