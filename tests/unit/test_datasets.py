"""Embedded and generated data sets, and what all data sets share: statistics, lock, threads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from workloads import datasets, models, registry
from workloads.contract import Hardware, TrainConfig
from workloads.datasets import digits, synthetic
from workloads.datasets.shared import file_tasks
from workloads.datasets.shared.image_data import Split, statistics
from workloads.errors import DatasetError


def config(dataset: str, **fields: object) -> TrainConfig:
    return TrainConfig(model="cnn", dataset=dataset, strategy="eager", hardware=Hardware("cpu", 1), cpus=1, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("package", "found"), [(datasets, registry.datasets()), (models, registry.models())])
def test_each_file_is_found_by_its_name_or_family(package: ModuleType, found: dict[str, Any]) -> None:
    """Adding a data set or model is one file; shared parts are in folders."""
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")} - {"__init__"}
    assert {name.partition("/")[0] for name in found} >= files
    family = next(name for name in found if name.endswith("/*"))
    assert registry.find(found, family.replace("*", "member")) is found[family]


def test_declarations_load_neither_a_framework_nor_an_array_library() -> None:
    """``plan`` reads every declaration; numpy alone would cost it 80 ms."""
    code = (
        "import sys, workloads.registry as r\n"
        "for d in r.datasets().values():\n"
        "    if not d.needs_root: d.shape(None, d.name), d.digest(None, d.name), d.check(None, d.name)\n"
        "print([m for m in ('numpy', 'PIL', 'torch', 'sklearn', 'torchvision', 'urllib.request') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.torch
def test_digits_are_split_once_and_evenly() -> None:
    """1,437 + 360 real images, every class within one image of its share, and the split covers each image once."""
    data = digits.DECLARATION.load(None, "digits", config("digits"))
    shape = digits.DECLARATION.shape(None, "digits")
    assert shape is not None
    assert (len(data.train), len(data.test)) == (shape.num_train, shape.num_test) == (1437, 360)
    assert data.train.images.shape[1:] == (1, 8, 8)
    assert data.train.images.dtype == np.uint8
    assert data.train.images.max() == 255
    from sklearn.datasets import load_digits

    counts = np.bincount(load_digits().target)
    assert np.abs(np.bincount(data.test.labels) - counts / 5).max() < 1
    assert (np.bincount(data.test.labels) + np.bincount(data.train.labels) == counts).all()
    assert data.digest == digits.DECLARATION.digest(None, "digits")


@pytest.mark.torch
def test_changed_digits_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "SHA256", "0" * 64)
    with pytest.raises(DatasetError, match="not the 1,797 images that earlier results were measured on"):
        digits.DECLARATION.load(None, "digits", config("digits"))


def test_synthetic_images_follow_the_seed_and_the_wished_size() -> None:
    small = synthetic.DECLARATION.load(None, "synthetic", config("synthetic"))
    again = synthetic.DECLARATION.load(None, "synthetic", config("synthetic"))
    other = synthetic.DECLARATION.load(None, "synthetic", config("synthetic", seed=1))
    large = synthetic.DECLARATION.load(None, "synthetic", config("synthetic", image_size=56))
    assert small.train.images.shape == (2048, 3, 32, 32)
    assert large.test.images.shape == (512, 3, 56, 56)
    assert (small.train.images == again.train.images).all()
    assert (small.train.images != other.train.images).any()


def test_synthetic_images_match_their_digest() -> None:
    """Other images of a seed need another ``DIGEST``, so that earlier results are known to be of others."""
    data = synthetic.DECLARATION.load(None, "synthetic", config("synthetic"))
    content = hashlib.sha256(data.train.images.tobytes() + data.test.images.tobytes()).hexdigest()
    assert (synthetic.DIGEST, content[:16]) == ("synthetic-2", "913ad9812419c6fe")


def test_synthetic_classes_can_be_learned() -> None:
    """The nearest class mean of the training images names over 95 % of the test images: accuracy means something."""
    data = synthetic.DECLARATION.load(None, "synthetic", config("synthetic"))
    train = data.train.images.reshape(len(data.train), -1).astype(np.float32)
    test = data.test.images.reshape(len(data.test), -1).astype(np.float32)
    means = np.stack([train[data.train.labels == label].mean(0) for label in range(10)])
    distances = ((test[:, None] - means) ** 2).sum(-1)
    assert (distances.argmin(1) == data.test.labels).mean() > 0.95


def test_statistics_are_those_of_all_pixels() -> None:
    """Against numpy on the whole array, over more images than one chunk."""
    images = np.random.default_rng(0).integers(0, 256, (1500, 3, 5, 5), np.uint8)
    images[:, 2] = 51  # never varies
    mean, std = statistics(images)
    assert mean == pytest.approx(images.mean((0, 2, 3)) / 255, abs=1e-12)
    assert std[:2] == pytest.approx(images.std((0, 2, 3))[:2] / 255, abs=1e-12)
    assert std[2] == 1.0


@pytest.mark.torch
@pytest.mark.parametrize("channels", [1, 3])
def test_a_stored_image_becomes_the_same_picture(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, channels, 4, 4), np.uint8)
    picture = np.asarray(Split(np.zeros(2, np.int64), images).pil(1))
    assert (picture.reshape(4, 4, channels).transpose(2, 0, 1) == images[1]).all()


def test_a_waiting_process_names_the_lock_holder(tmp_path: Path) -> None:
    """While one holds it, a second waits (and says for whom); bounded: at the end it gives up naming the process."""
    said: list[str] = []
    with (
        file_tasks.locked(tmp_path / "lock", said.append),
        pytest.raises(DatasetError) as raised,
        file_tasks.locked(tmp_path / "lock", said.append, wait_s=0.3),
    ):
        pytest.fail("two hold one lock")
    assert "for more than 0 s" in str(raised.value)
    assert f"held by process {os.getpid()} on" in str(raised.value)
    assert len(said) == 1
    assert said[0].startswith("waiting for process")


def test_a_released_lock_goes_to_the_waiting_process(tmp_path: Path) -> None:
    waiting, entered = threading.Event(), threading.Event()

    def second() -> None:
        with file_tasks.locked(tmp_path / "lock", lambda _: waiting.set(), wait_s=20):
            entered.set()

    thread = threading.Thread(target=second)
    with file_tasks.locked(tmp_path / "lock", print):
        thread.start()
        assert waiting.wait(10)
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()


def test_work_in_threads_keeps_its_order_and_stops_at_the_first_error() -> None:
    assert list(file_tasks.in_threads(lambda n: n * n, range(300), print, "done", size_bytes=10**9)) == [
        n * n for n in range(300)
    ]
    started: list[int] = []

    def work(n: int) -> int:
        started.append(n)
        if n == 3:
            raise ValueError("the fourth")
        time.sleep(0.0005)
        return n

    with pytest.raises(ValueError, match="the fourth"):
        list(file_tasks.in_threads(work, range(10_000), print, "done", size_bytes=10**9))
    assert len(started) < 1000
