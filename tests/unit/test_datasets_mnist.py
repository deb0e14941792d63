"""MNIST on tiny files of the same format with matching checksums; no network."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from workloads.contract import Hardware, TrainConfig
from workloads.datasets import mnist
from workloads.datasets.mnist import DECLARATION, archive, raw_file, read_idx
from workloads.datasets.shared.published import PublishedFile
from workloads.errors import DatasetError

CONFIG = TrainConfig(model="cnn", dataset="mnist", strategy="eager", hardware=Hardware("cpu", 1), cpus=1)
NOWHERE = ("http://127.0.0.1:9/",)
"""A port where nobody listens."""


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape) + array.tobytes()


def contents() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": random.integers(0, 256, (21, 28, 28), np.uint8),
        "train-labels-idx1-ubyte": (np.arange(21) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": random.integers(0, 256, (7, 28, 28), np.uint8),
        "t10k-labels-idx1-ubyte": (np.arange(7) % 10).astype(np.uint8),
    }
    return {name: idx(array) for name, array in arrays.items()}


def archives() -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(raw, mtime=0) for name, raw in contents().items()}


FILES = tuple(raw_file(name, len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in contents().items())
MD5 = {name: hashlib.md5(archives()[f"{name}.gz"]).hexdigest() for name in contents()}


def archives_at(*mirrors: str) -> dict[str, PublishedFile]:
    return {name: archive(name, md5, mirrors) for name, md5 in MD5.items()}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist.RAW, "files", FILES)
    monkeypatch.setattr(mnist, "ARCHIVES", archives_at(*NOWHERE))


def create_files(root: Path, files: dict[str, bytes]) -> Path:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_raw_files_become_arrays(tmp_path: Path) -> None:
    create_files(tmp_path, contents())
    data = DECLARATION.load(tmp_path, "mnist", CONFIG)
    assert data.train.images.shape == (21, 1, 28, 28)
    assert (data.test.images[3, 0] == read_idx(tmp_path / "MNIST/raw/t10k-images-idx3-ubyte")[3]).all()
    assert data.train.labels.tolist() == [n % 10 for n in range(21)]
    assert data.train.labels.dtype == np.int64
    assert data.digest == DECLARATION.digest(tmp_path, "mnist") != ""
    assert DECLARATION.check(tmp_path, "mnist") == []


def test_without_a_data_root_the_problem_names_the_variable() -> None:
    (problem,) = DECLARATION.check(None, "mnist")
    assert problem.where == "ORCHESTRATE_DATA"
    assert DECLARATION.digest(None, "mnist") == ""
    with pytest.raises(
        DatasetError, match=r"ORCHESTRATE_DATA=/path/to/data, give --data, or set data in cluster\.toml"
    ):
        DECLARATION.load(None, "mnist", CONFIG)


@pytest.mark.parametrize("name", [file.name for file in FILES])
def test_check_and_load_name_a_missing_file(tmp_path: Path, name: str) -> None:
    (create_files(tmp_path, contents()) / name).unlink()
    (problem,) = DECLARATION.check(tmp_path, "mnist")
    assert problem.where.endswith(name)
    assert "orchestrate data prepare mnist" in problem.fix
    assert DECLARATION.digest(tmp_path, "mnist") == ""
    with pytest.raises(DatasetError, match=rf"{name}.*missing or damaged"):
        DECLARATION.load(tmp_path, "mnist", CONFIG)


def test_check_and_load_name_a_truncated_file(tmp_path: Path) -> None:
    path = create_files(tmp_path, contents()) / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-5])
    (problem,) = DECLARATION.check(tmp_path, "mnist")
    assert problem.where == str(path)
    assert "truncated or another file" in problem.what
    with pytest.raises(DatasetError, match=r"train-images-idx3-ubyte(.|\n)*bytes, not"):
        DECLARATION.load(tmp_path, "mnist", CONFIG)


def test_a_flipped_byte_is_noticed_when_loading(tmp_path: Path) -> None:
    path = create_files(tmp_path, contents()) / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x09")
    with pytest.raises(DatasetError, match=r"t10k-labels-idx1-ubyte(.|\n)*SHA-256"):
        DECLARATION.load(tmp_path, "mnist", CONFIG)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x08",
        idx(np.zeros((3, 4), np.uint8))[:-1],
        b"\x00\x00\x0d\x01" + bytes(8),
        b"<html>no such page</html>",
    ],
    ids=["empty", "cut head", "cut body", "floats", "foreign"],
)
def test_the_error_names_a_file_that_is_not_idx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"labels-idx1-ubyte: not a whole IDX file"):
        read_idx(path)


def test_archives_in_place_are_unpacked_offline(tmp_path: Path) -> None:
    folder = create_files(tmp_path, archives())
    DECLARATION.prepare(tmp_path, "mnist", print)
    assert {name: (folder / name).read_bytes() for name in contents()} == contents()


def test_preparing_again_touches_nothing(tmp_path: Path) -> None:
    folder = create_files(tmp_path, contents())
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    said: list[str] = []
    DECLARATION.prepare(tmp_path, "mnist", said.append)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert said == [f"mnist: {folder} is whole"]


def test_only_the_damaged_file_is_replaced(tmp_path: Path) -> None:
    folder = create_files(tmp_path, {**contents(), **archives()})
    (folder / "train-labels-idx1-ubyte").write_bytes(b"")
    said: list[str] = []
    DECLARATION.prepare(tmp_path, "mnist", said.append)
    assert [line for line in said if " from " in line] == [
        f"train-labels-idx1-ubyte from {folder / 'train-labels-idx1-ubyte.gz'}"
    ]
    DECLARATION.load(tmp_path, "mnist", CONFIG)


def test_offline_and_without_archives_the_error_lists_every_attempt(tmp_path: Path) -> None:
    """A damaged archive and a mirror that does not answer: both reasons, what to do, and no half file."""
    folder = create_files(tmp_path, {"train-images-idx3-ubyte.gz": b"half an archive"})
    with pytest.raises(DatasetError) as raised:
        DECLARATION.prepare(tmp_path, "mnist", print)
    message = str(raised.value)
    assert "no good copy of train-images-idx3-ubyte.gz" in message
    assert "train-images-idx3-ubyte.gz: MD5" in message
    assert "http://127.0.0.1:9/" in message
    assert "where there is no network, put the file there by hand" in message
    assert {path.name for path in folder.iterdir()} == {"train-images-idx3-ubyte.gz", ".prepare.lock"}


@contextlib.contextmanager
def mirror(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_the_next_mirror_is_tried_after_wrong_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mirror answers with wrong files, the second with right ones (real HTTP on this machine)."""
    for name, files in {"bad": dict.fromkeys(archives(), b"<html>maintenance</html>"), "good": archives()}.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
    with mirror(tmp_path / "bad") as bad, mirror(tmp_path / "good") as good:
        monkeypatch.setattr(mnist, "ARCHIVES", archives_at(bad, good))
        DECLARATION.prepare(tmp_path / "data", "mnist", print)
    assert DECLARATION.check(tmp_path / "data", "mnist") == []
    assert {p.name for p in (tmp_path / "data/MNIST/raw").iterdir()} == {*contents(), ".prepare.lock"}
    DECLARATION.load(tmp_path / "data", "mnist", CONFIG)


PREPARER = """
import json, sys, time
from pathlib import Path
from workloads.datasets import mnist
mnist.RAW.files = tuple(mnist.raw_file(*row[:3]) for row in json.loads(sys.argv[2]))
mnist.ARCHIVES = {row[0]: mnist.archive(row[0], row[3], ()) for row in json.loads(sys.argv[2])}
print("started", flush=True)
sys.stdin.read()
mnist.DECLARATION.prepare(Path(sys.argv[1]), "mnist", lambda text: print(text, flush=True))
"""


def test_processes_that_prepare_at_once_do_the_work_once(tmp_path: Path) -> None:
    """Three real processes start together: all succeed, each archive is unpacked by one of them, nothing is left."""
    folder = create_files(tmp_path, archives())
    rows = json.dumps([[f.name, f.min_bytes, f.digest, MD5[f.name]] for f in FILES])
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", PREPARER, str(tmp_path), rows]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        outputs = [process.communicate(timeout=30) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    unpacked = [line for out, _ in outputs for line in out.splitlines() if " from " in line]
    assert len(unpacked) == len(set(unpacked)) == 4
    assert {path.name for path in folder.iterdir()} == {*contents(), *archives(), ".prepare.lock"}
    DECLARATION.load(tmp_path, "mnist", CONFIG)


@pytest.mark.optional
@pytest.mark.skipif(
    not (Path(os.environ.get("ORCHESTRATE_DATA", "/nowhere")) / "MNIST/raw/train-images-idx3-ubyte").exists(),
    reason="ORCHESTRATE_DATA holds no MNIST",
)
def test_real_mnist_has_the_known_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    data = DECLARATION.load(Path(os.environ["ORCHESTRATE_DATA"]), "mnist", CONFIG)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert (data.mean[0], data.std[0]) == pytest.approx((0.1307, 0.3081), abs=1e-4)
