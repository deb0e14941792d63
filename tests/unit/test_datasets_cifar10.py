"""CIFAR-10 on tiny files as Python 2 pickled them, with matching checksums; no network."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import pickle
import struct
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workloads.contract import Hardware, TrainConfig
from workloads.datasets import cifar10
from workloads.datasets.cifar10 import DECLARATION, FOLDER, read_pickle
from workloads.datasets.shared.published import PublishedFile
from workloads.errors import DatasetError

CONFIG = TrainConfig(model="cnn", dataset="cifar10", strategy="eager", hardware=Hardware("cpu", 1), cpus=1)
COUNT = 4
"""Images a file."""
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def _text(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value


def _array(pixels: bytes) -> bytes:
    """An array of bytes, as numpy of Python 2 pickled it."""
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _text(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + _text(b"u1") + b"K\x00K\x01\x87R(K\x03" + _text(b"|")
    kind += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"K" + bytes([COUNT]) + b"M\x00\x0c\x86"
    return made + b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"


def _list(items: list[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def _pickled(**values: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(_text(k.encode()) + v for k, v in values.items()) + b"u."


def _pixels(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, COUNT * 3072, np.uint8).tobytes()


BATCHES = [file.name for file in cifar10.BATCH_FILES]
LABELS = {name: [(i + n) % 10 for n in range(COUNT)] for i, name in enumerate(BATCHES)}


def contents() -> dict[str, bytes]:
    files = {}
    for number, name in enumerate(BATCHES):
        labels = _list([b"K" + bytes([label]) for label in LABELS[name]])
        files[name] = _pickled(batch_label=_text(b"a batch"), labels=labels, data=_array(_pixels(number)))
    files["batches.meta"] = _pickled(label_names=_list([_text(name.encode()) for name in CLASSES]))
    return files


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(
        PublishedFile(name, hashlib.md5(content).hexdigest(), "md5", min_bytes=1)
        for name, content in contents().items()
    )
    monkeypatch.setattr(cifar10.BATCHES, "files", files)


def create_files(root: Path) -> Path:
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for name, content in contents().items():
        (folder / name).write_bytes(content)
    return folder


def archive() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        for name, content in {**contents(), "readme.html": b"<html>"}.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def known(monkeypatch: pytest.MonkeyPatch, packed: bytes, *urls: str) -> None:
    digest = hashlib.md5(packed).hexdigest()
    urls = urls or ("http://127.0.0.1:9/x",)
    monkeypatch.setattr(cifar10, "ARCHIVE", PublishedFile(cifar10.ARCHIVE.name, digest, "md5", urls))


def test_images_are_the_bytes_that_the_pickles_hold(tmp_path: Path) -> None:
    """Red, green and blue plane of each, in the order of the files; labels and names likewise."""
    create_files(tmp_path)
    data = DECLARATION.load(tmp_path, "cifar10", CONFIG)
    assert data.train.images.shape == (5 * COUNT, 3, 32, 32)
    assert data.train.images.tobytes() == b"".join(_pixels(number) for number in range(5))
    assert data.test.images.tobytes() == _pixels(5)
    assert data.train.labels.tolist() == [label for name in BATCHES[:5] for label in LABELS[name]]
    assert data.test.labels.tolist() == LABELS["test_batch"] and data.test.labels.dtype == np.int64
    assert data.class_names == tuple(CLASSES)
    assert data.digest == DECLARATION.digest(tmp_path, "cifar10") != ""
    assert DECLARATION.check(tmp_path, "cifar10") == []
    red = np.asarray(data.train.pil(0))[..., 0]
    assert red.tobytes() == _pixels(0)[:1024]


@pytest.mark.torch
def test_torchvision_reads_the_same(tmp_path: Path) -> None:
    """Its own class, over the same files; only the checksums are those of the real ones."""
    torchvision = pytest.importorskip("torchvision")
    create_files(tmp_path)
    original: Any = torchvision.datasets.CIFAR10

    lists = {
        "train_list": [[file.name, file.digest] for file in cifar10.BATCHES.files[:5]],
        "test_list": [[file.name, file.digest] for file in cifar10.BATCHES.files[5:6]],
        "meta": {**original.meta, "md5": cifar10.BATCHES.files[6].digest},
    }
    tiny = type("Tiny", (original,), lists)

    data = DECLARATION.load(tmp_path, "cifar10", CONFIG)
    for split, train in ((data.train, True), (data.test, False)):
        theirs = tiny(str(tmp_path), train=train)
        assert np.array_equal(theirs.data.transpose(0, 3, 1, 2), split.images)
        assert theirs.targets == split.labels.tolist()
        assert tuple(theirs.classes) == data.class_names


@pytest.mark.torch
def test_the_checksums_are_those_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    theirs: Any = pytest.importorskip("torchvision").datasets.CIFAR10
    meta = [theirs.meta["filename"], theirs.meta["md5"]]
    listed = [[file.name, file.digest] for file in cifar10.BATCHES.files]
    assert listed == [*map(list, theirs.train_list), *map(list, theirs.test_list), meta]
    assert {file.algorithm for file in cifar10.BATCHES.files} == {"md5"}
    archive = cifar10.ARCHIVE
    assert (theirs.url, theirs.filename, theirs.tgz_md5) == (archive.urls[0], archive.name, archive.digest)
    assert theirs.base_folder == FOLDER


def test_without_a_data_root_the_problem_names_the_variable() -> None:
    (problem,) = DECLARATION.check(None, "cifar10")
    assert problem.where == "ORCHESTRATE_DATA" and DECLARATION.digest(None, "cifar10") == ""


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_check_and_load_name_missing_short_and_changed_files(tmp_path: Path, name: str) -> None:
    path = create_files(tmp_path) / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x00")
    with pytest.raises(DatasetError, match=rf"{name}: missing or damaged file of CIFAR-10\n  why: MD5"):
        DECLARATION.load(tmp_path, "cifar10", CONFIG)
    path.write_bytes(b"")
    (problem,) = DECLARATION.check(tmp_path, "cifar10")
    assert problem.where == str(path) and "truncated or another file" in problem.what
    path.unlink()
    (problem,) = DECLARATION.check(tmp_path, "cifar10")
    assert problem.where == str(path) and "orchestrate data prepare cifar10" in problem.fix
    with pytest.raises(DatasetError, match=f"{name}: missing or damaged"):
        DECLARATION.load(tmp_path, "cifar10", CONFIG)


class _Call:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_a_pickle_that_calls_a_function_raises_before_the_call(tmp_path: Path) -> None:
    harmful = pickle.dumps({"data": _Call(tmp_path / "touched")}, protocol=2)
    (tmp_path / "data_batch_1").write_bytes(harmful)
    with pytest.raises(DatasetError, match="not a pickle of plain data\n  why: it asks for"):
        read_pickle(tmp_path / "data_batch_1")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02}(U\x04da", b"<html>", pickle.dumps([1, 2])])
def test_the_error_names_a_file_that_is_no_batch(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DatasetError, match="data_batch_1: not a"):
        read_pickle(tmp_path / "data_batch_1")


def test_pickles_of_current_python_are_read_too(tmp_path: Path) -> None:
    images = np.arange(12, dtype=np.uint8).reshape(2, 6)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": images}, protocol=2))
    assert np.array_equal(read_pickle(tmp_path / "data_batch_1")["data"], images)


def test_an_archive_in_place_is_unpacked_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the files we know; a second time nothing is touched."""
    packed = archive()
    known(monkeypatch, packed)
    (tmp_path / cifar10.ARCHIVE.name).write_bytes(packed)
    DECLARATION.prepare(tmp_path, "cifar10", print)
    assert {p.name for p in (tmp_path / FOLDER).iterdir()} == {*contents(), ".prepare.lock"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / FOLDER).iterdir()}
    said: list[str] = []
    DECLARATION.prepare(tmp_path, "cifar10", said.append)
    assert said == [f"cifar10: {tmp_path / FOLDER} is whole"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / FOLDER).iterdir()} == before


def test_the_archive_is_downloaded_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real HTTP on this machine: the next address is tried after a wrong file, and the error lists each attempt."""
    packed = archive()
    served = tmp_path / "served"
    served.mkdir()
    (served / "good").write_bytes(packed)
    (served / "bad").write_bytes(b"<html>maintenance</html>")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(served))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        at = f"http://127.0.0.1:{server.server_port}"
        try:
            known(monkeypatch, packed, f"{at}/bad", f"{at}/missing")
            with pytest.raises(DatasetError, match=r"no good copy of cifar-10-python.tar.gz(.|\n)*MD5(.|\n)*404"):
                DECLARATION.prepare(tmp_path / "data", "cifar10", print)
            assert {p.name for p in (tmp_path / "data").iterdir()} == {FOLDER}
            known(monkeypatch, packed, f"{at}/bad", f"{at}/good")
            DECLARATION.prepare(tmp_path / "data", "cifar10", print)
        finally:
            server.shutdown()
            thread.join()
    DECLARATION.load(tmp_path / "data", "cifar10", CONFIG)
    assert {p.name for p in (tmp_path / "data").iterdir()} == {FOLDER, cifar10.ARCHIVE.name}
