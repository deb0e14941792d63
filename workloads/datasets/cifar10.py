"""``cifar10``: 60,000 photographs of ten classes in torchvision's layout, ``$ORCHESTRATE_DATA/cifar-10-batches-py/``.

The files are pickles of Python 2. Whatever is read has the MD5 that torchvision knows, and is read by an unpickler that
makes arrays, lists, texts and numbers and calls nothing else. Only ``orchestrate data prepare cifar10`` downloads.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from workloads.contract import TrainConfig
from workloads.datasets.shared.image_data import ImageData, Split, statistics
from workloads.datasets.shared.published import Published, fetch, writing
from workloads.errors import DatasetError
from workloads.files.json_file import write_bytes
from workloads.registry import DatasetDeclaration, DatasetShape, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FOLDER = "cifar-10-batches-py"
ARCHIVE = Published(
    "cifar-10-python.tar.gz",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    "md5",
    "c58f30108f718f92721af3b95e74349a",
    limit_bytes=256 << 20,
)
TRAINING = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
"""Each file's MD5."""
TEST = {"test_batch": "40351d587109b95175f43aff81a1287e"}
NAMES = {"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"}
SIDE_PX, CHANNELS = 32, 3
IMAGES_A_FILE = 10_000
PREPARE = "run `orchestrate data prepare cifar10` where there is a network, or unpack torchvision's archive there"


def _files() -> dict[str, str]:
    return TRAINING | TEST | NAMES


def _folder(root: Path | None) -> Path:
    if root is None:
        raise DatasetError(
            "cifar10 needs a folder for data sets, and none is set",
            where="ORCHESTRATE_DATA",
            hint="export ORCHESTRATE_DATA=/path/to/data, give --data, or set data in cluster.toml",
        )
    return root / FOLDER


def _shape(_root: Path | None, _name: str) -> DatasetShape:
    return DatasetShape(image_size=SIDE_PX, channels=CHANNELS, classes=10, num_train=50_000, num_test=10_000)


def _check(root: Path | None, _name: str) -> list[Problem]:
    try:
        folder = _folder(root)
    except DatasetError as error:
        return [Problem(where=error.where, what=error.what, fix=error.hint)]
    problems = []
    for name in _files():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            problems.append(Problem(where=str(path), what=f"missing ({error.strerror})", fix=PREPARE))
        else:
            pixels = 0 if name in NAMES else IMAGES_A_FILE * CHANNELS * SIDE_PX**2
            if size <= pixels:
                what = f"{size} bytes, fewer than its pixels: truncated or another file"
                problems.append(Problem(where=str(path), what=what, fix=PREPARE))
    return problems


def _digest(root: Path | None, name: str) -> str:
    """What ``load`` will insist on; empty while files are missing."""
    return "" if _check(root, name) else _known_digest()


def _known_digest() -> str:
    return hashlib.sha256("".join(_files().values()).encode()).hexdigest()


def _faults(folder: Path) -> dict[str, str]:
    """File -> why it is not the right one."""
    found = {name: Published(name, (), "md5", md5, 0).fault(folder / name) for name, md5 in _files().items()}
    return {name: fault for name, fault in found.items() if fault}


def _prepare(root: Path | None, _name: str, progress: Callable[[str], None]) -> None:
    folder = _folder(root)
    if not _faults(folder):
        progress(f"cifar10: {folder} is whole")
        return
    with writing(folder, "cifar10", "CIFAR-10", progress):
        if _faults(folder):  # asked again: another process may have done it while this one waited
            archive = folder.parent / ARCHIVE.name
            if ARCHIVE.fault(archive):
                fetch(ARCHIVE, archive, progress)
            _unpack(archive, folder)
    progress(f"cifar10: ready in {folder}")


def _unpack(archive: Path, folder: Path) -> None:
    """The files we know and no other, each checked before it appears under its name."""
    with tarfile.open(archive, "r:gz") as packed:
        for name, md5 in _files().items():
            member = packed.extractfile(f"{FOLDER}/{name}")
            assert member is not None, "an archive of that MD5 holds it as a file"
            content = member.read()
            found = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if found != md5:
                raise DatasetError(
                    f"{name} in the archive is another file than expected",
                    where=str(archive),
                    why=f"MD5 {found}, not {md5}",
                )
            write_bytes(folder / name, content)


class _Unpickler(pickle.Unpickler):
    """Reads arrays of numpy's own types; a pickle that asks for anything else is refused before it gets it."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy as np

        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            core = "numpy._core" if hasattr(np, "_core") else "numpy.core"
            return importlib.import_module(f"{core}.multiarray")._reconstruct
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return importlib.import_module("_codecs").encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")


def read_pickle(stream: IO[bytes], where: Path) -> dict[str, Any]:
    """A batch or the list of names, keys as texts.

    Raises:
        DatasetError: it is damaged, or holds more than data.
    """
    try:
        content = _Unpickler(stream, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        raise DatasetError("not a pickle of plain data", where=str(where), why=str(error), hint=PREPARE) from error
    if not isinstance(content, dict):
        raise DatasetError("not a batch of CIFAR-10", where=str(where), hint=PREPARE)
    return content


def _batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    import numpy as np

    with open(path, "rb") as stream:
        content = read_pickle(stream, path)
    pixels, labels = np.asarray(content.get("data")), np.asarray(content.get("labels"))
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), CHANNELS * SIDE_PX**2):
        raise DatasetError(
            "not a batch of CIFAR-10", where=str(path), why=f"data is {pixels.dtype} {pixels.shape}", hint=PREPARE
        )
    return pixels.reshape(-1, CHANNELS, SIDE_PX, SIDE_PX), labels.astype(np.int64)


def _split(folder: Path, names: dict[str, str]) -> Split:
    import numpy as np

    images, labels = zip(*(_batch(folder / name) for name in names), strict=True)
    return Split(np.concatenate(labels), np.concatenate(images))


def _load(root: Path | None, _name: str, _config: TrainConfig) -> ImageData:
    folder = _folder(root)
    for name, fault in _faults(folder).items():
        raise DatasetError("missing or damaged file of CIFAR-10", where=str(folder / name), why=fault, hint=PREPARE)
    train, test = _split(folder, TRAINING), _split(folder, TEST)
    (names,) = NAMES
    with open(folder / names, "rb") as stream:
        class_names = tuple(map(str, read_pickle(stream, folder / names)["label_names"]))
    mean, std = statistics(train.images)
    return ImageData(
        train,
        test,
        class_names=class_names,
        channels=CHANNELS,
        image_size=SIDE_PX,
        mean=mean,
        std=std,
        digest=_known_digest(),
    )


DECLARATION = DatasetDeclaration(
    name="cifar10",
    summary="60,000 photographs, 32 x 32 RGB, ten classes, in torchvision's layout below the data root.",
    packages=("numpy",),
    needs_root=True,
    shape=_shape,
    check=_check,
    digest=_digest,
    prepare=_prepare,
    load=_load,
)
