"""Image folders: loading, lost, changed and damaged files, and the cache."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from workloads.contract import Hardware, TrainConfig
from workloads.datasets import imagefolder
from workloads.datasets.imagefolder import DECLARATION
from workloads.datasets.shared import decoded_images
from workloads.datasets.shared.image_data import ImageData
from workloads.errors import DatasetError, InputError

pytestmark = pytest.mark.torch  # Pillow comes with that extra

NAME = "imagefolder/pets"
CACHE = ".orchestrate-cache"


def config(**fields: object) -> TrainConfig:
    return TrainConfig(model="cnn", dataset=NAME, strategy="eager", hardware=Hardware("cpu", 1), cpus=1, **fields)  # type: ignore[arg-type]


def load(root: Path, **fields: object) -> ImageData:
    return DECLARATION.load(root, NAME, config(**fields))


def picture(path: Path, seed: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes(mode, size, random.Random(seed).randbytes(size[0] * size[1] * len(mode))).save(path)


def pets(root: Path, classes: tuple[str, ...] = ("cat", "dog"), **how: object) -> Path:
    """5 training and 2 test images of each class."""
    folder = root / "pets"
    for split, count in (("train", 5), ("test", 2)):
        for name in classes:
            for number in range(count):
                seed = sum(os.fsencode(f"{split}/{name}/{number}"))
                picture(folder / split / name / f"{number}.png", seed, **how)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def pixels_of(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


# What is read


def test_images_come_with_their_class_in_order_of_name(root: Path) -> None:
    folder = pets(root)
    (folder / "train" / "cat" / ".hidden.png").write_text("passed over")
    (folder / "train" / "cat" / "labels.txt").write_text("passed over")
    data = load(root)
    assert data.class_names == ("cat", "dog")
    assert data.train.labels.tolist() == [0] * 5 + [1] * 5
    assert data.test.labels.tolist() == [0] * 2 + [1] * 2
    assert (data.channels, data.size) == (3, 8)
    for split, half in (("train", data.train), ("test", data.test)):
        assert half.files is not None
        for index, path in enumerate(half.files):
            assert path.parts[-3] == split
            assert (half.images[index] == pixels_of(path)).all()
            assert (np.asarray(half.pil(index)).transpose(2, 0, 1) == half.images[index]).all()
    assert data.mean == pytest.approx(data.train.images.mean((0, 2, 3)) / 255, abs=1e-12)


def test_gray_images_have_one_channel_unless_one_has_colour(root: Path) -> None:
    folder = pets(root, mode="L")
    assert load(root).train.images.shape == (10, 1, 8, 8)
    picture(folder / "train" / "cat" / "0.png", 1)
    assert load(root).train.images.shape == (10, 3, 8, 8)


def test_the_shape_is_known_after_the_first_use(root: Path) -> None:
    pets(root)
    assert DECLARATION.shape(root, NAME) is None
    DECLARATION.prepare(root, NAME, print)
    shape = DECLARATION.shape(root, NAME)
    assert shape is not None
    assert (shape.image_size, shape.channels, shape.classes, shape.num_train, shape.num_test) == (8, 3, 2, 10, 4)


def test_members_are_the_folders_that_look_like_one(root: Path) -> None:
    pets(root)
    (root / "MNIST").mkdir()
    assert DECLARATION.members is not None
    assert DECLARATION.members(root) == [NAME]
    assert DECLARATION.members(None) == DECLARATION.members(root / "nowhere") == []


def test_images_of_several_sizes_need_an_image_size(root: Path) -> None:
    """Then the shorter side is resized and the centre kept; the dataloader's pictures are the same."""
    folder = pets(root)
    picture(folder / "train" / "dog" / "3.png", 7, (24, 12))
    with pytest.raises(DatasetError) as raised:
        load(root)
    assert "images of 8 x 8 to 24 x 12 pixels must be resized to one square size" in str(raised.value)
    assert "set image_size" in str(raised.value)
    DECLARATION.prepare(root, NAME, print)
    assert DECLARATION.shape(root, NAME) is None
    data = load(root, image_size=12)
    assert data.size == 12
    assert (data.train.images[8] == pixels_of(folder / "train/dog/3.png")[:, :, 6:18]).all()
    assert (np.asarray(data.train.pil(0)).transpose(2, 0, 1) == data.train.images[0]).all()


def test_the_cache_holds_the_smaller_of_own_and_requested_size(root: Path) -> None:
    """A cache for 4 px does not hold 8 px; for 32 px the device enlarges, not the cache."""
    pets(root)
    assert load(root, image_size=4).train.images.shape[-1] == 4
    assert load(root, image_size=32).train.images.shape[-1] == 8


# What is noticed


def test_plan_and_job_compute_the_same_digest(root: Path) -> None:
    """Empty before the first use (reading everything is not cheap), equal afterwards, and the same in another place."""
    pets(root)
    assert DECLARATION.digest(root, NAME) == ""
    digest = load(root).digest
    assert DECLARATION.digest(root, NAME) == digest
    shutil.copytree(root / "pets", root.parent / "elsewhere" / "pets", ignore=shutil.ignore_patterns(CACHE))
    assert load(root.parent / "elsewhere").digest == digest


def _overwrite(folder: Path) -> None:
    path = folder / "train/cat/1.png"
    path.write_bytes((folder / "train/cat/2.png").read_bytes())


def _rename(folder: Path) -> None:
    (folder / "train/cat/1.png").rename(folder / "train/cat/10.png")


def _add(folder: Path) -> None:
    picture(folder / "test/dog/9.png", 99)


def _move_class(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split / "cat").rename(folder / split / "zebra")


@pytest.mark.parametrize("change", [_overwrite, _add])
def test_changed_content_changes_the_digest(root: Path, change: Callable[[Path], None]) -> None:
    """At plan time and in the job alike, and the job's images are the new ones."""
    folder = pets(root)
    before = load(root)
    change(folder)
    planned = DECLARATION.digest(root, NAME)
    after = load(root)
    assert planned == after.digest != before.digest
    assert after.train.files is not None
    for index, path in enumerate(after.train.files):
        assert (after.train.images[index] == pixels_of(path)).all()
    assert DECLARATION.check(root, NAME) == []


@pytest.mark.parametrize("change", [_rename, _move_class])
def test_renamed_images_change_the_digest_and_count_as_missing(root: Path, change: Callable[[Path], None]) -> None:
    folder = pets(root)
    before = load(root).digest
    change(folder)
    assert DECLARATION.digest(root, NAME) not in {"", before}
    with pytest.raises(DatasetError, match="are missing"):
        load(root)


def test_touching_files_changes_nothing(root: Path) -> None:
    folder = pets(root)
    digest = load(root).digest
    for path in folder.rglob("*.png"):
        os.utime(path, ns=(1, 1))
    assert DECLARATION.digest(root, NAME) == digest == load(root).digest


def test_half_a_data_set_deleted_is_an_error_that_names_a_file(root: Path) -> None:
    """In check, prepare and load: a scratch purge must not end as a lower accuracy. Meant deletions have a way."""
    folder = pets(root)
    load(root)
    for path in sorted((folder / "train").rglob("*.png"))[::2]:
        path.unlink()
    first = str(folder / "train/cat/0.png")
    (problem,) = DECLARATION.check(root, NAME)
    assert problem.where == first
    assert "5 of the data set's 14 images are missing" in problem.what
    for attempt in (lambda: load(root), lambda: DECLARATION.prepare(root, NAME, print)):
        with pytest.raises(DatasetError) as raised:
            attempt()
        assert raised.value.where == first
        assert f"delete {folder / CACHE} and prepare again" in raised.value.hint
    shutil.rmtree(folder / CACHE)
    assert len(load(root).train) == 5


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_error_names_a_missing_class_folder(root: Path, split: str) -> None:
    folder = pets(root)
    shutil.rmtree(folder / split / "dog")
    with pytest.raises(DatasetError, match="class folder missing") as raised:
        load(root)
    assert raised.value.where == str(folder / split / "dog")
    assert DECLARATION.check(root, NAME)[0].where == str(folder / split / "dog")


def test_the_error_names_an_empty_class_folder(root: Path) -> None:
    folder = pets(root)
    for path in (folder / "test/cat").iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match=r"test/cat: no images in this class folder"):
        load(root)


def test_the_error_names_a_missing_split(root: Path) -> None:
    folder = pets(root)
    shutil.rmtree(folder / "test")
    with pytest.raises(DatasetError, match=r"pets/test: no class folders here"):
        load(root)


def test_a_folder_inside_a_class_is_an_error(root: Path) -> None:
    picture(pets(root) / "train/cat/more/0.png", 0)
    with pytest.raises(DatasetError, match=r"train/cat/more: a folder inside a class folder"):
        load(root)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere.png")])
def test_links_to_nothing_and_pipes_are_errors_and_never_opened(root: Path, make: Callable[[Path], None]) -> None:
    """Reading a pipe would wait for ever."""
    path = pets(root) / "train" / "dog" / "9.png"
    make(path)
    with pytest.raises(DatasetError, match=r"train/dog/9\.png: a broken link, or not a regular file"):
        load(root)


@pytest.mark.parametrize("damage", ["zero bytes", "text", "truncated"])
def test_the_error_names_an_unreadable_image(root: Path, damage: str) -> None:
    """The others are fine; nothing half-made is left, and a whole copy mends it."""
    path = pets(root) / "train" / "dog" / "2.png"
    whole = path.read_bytes()
    path.write_bytes({"zero bytes": b"", "text": b"not an image", "truncated": whole[:-40]}[damage])
    with pytest.raises(DatasetError, match="cannot read this image") as raised:
        DECLARATION.prepare(root, NAME, print)
    assert raised.value.where == str(path)
    assert not list(path.parents[2].glob(f"{CACHE}/*pixels*")) + list(path.parents[2].glob(f"{CACHE}/.*pixels*"))
    path.write_bytes(whole)
    assert len(load(root).train) == 10


def test_an_image_above_the_limit_of_pillow_has_its_own_fix(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL refuses it, and a whole copy of the file would be no smaller."""
    from PIL import Image

    path = pets(root) / "train" / "dog" / "2.png"
    Image.new("L", (400, 400)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 70_000)
    with pytest.raises(DatasetError, match="this image is larger than Pillow's limit") as raised:
        DECLARATION.prepare(root, NAME, print)
    assert raised.value.where == str(path)
    assert "exceeds limit" in raised.value.why and "make the image smaller" in raised.value.hint


def test_check_reports_an_empty_file(root: Path) -> None:
    path = pets(root) / "test" / "dog" / "1.png"
    path.write_bytes(b"")
    assert [problem.where for problem in DECLARATION.check(root, NAME)] == [str(path)]


def test_the_error_for_a_missing_data_set_lists_existing_ones(root: Path) -> None:
    pets(root)
    with pytest.raises(DatasetError, match="no such data set") as raised:
        DECLARATION.load(root, "imagefolder/pest", config())
    assert "has pets" in raised.value.why
    with pytest.raises(DatasetError, match="ORCHESTRATE_DATA"):
        DECLARATION.load(None, NAME, config())


# Names


@pytest.mark.parametrize("member", ["../pets", "..", ".", "", "/etc", "a/b", ".hidden", "pets/", "x\0y"])
def test_names_outside_the_data_root_are_input_errors(root: Path, member: str) -> None:
    """By every function, as bad input, without looking at the disk."""
    pets(root)
    name = f"imagefolder/{member}"
    with pytest.raises(InputError, match="does not name a folder of the data root"):
        DECLARATION.load(root / "pets", name, config())
    assert len(DECLARATION.check(root / "pets", name)) == 1
    assert DECLARATION.shape(root / "pets", name) is None
    assert DECLARATION.digest(root / "pets", name) == ""


def test_links_out_of_the_data_set_are_errors(root: Path) -> None:
    """The data set, a class, a file; a link that stays inside is fine."""
    outside = pets(root.parent / "outside")
    (root / "pets").symlink_to(outside)
    with pytest.raises(InputError, match="leads out of the data root"):
        load(root)
    (root / "pets").unlink()
    folder = pets(root)
    (folder / "train/cat/0.png").unlink()
    (folder / "train/cat/0.png").symlink_to(outside / "train/cat/0.png")
    with pytest.raises(DatasetError, match=r"train/cat/0\.png: a link that leads out"):
        load(root)
    (folder / "train/cat/0.png").unlink()
    (folder / "train/cat/0.png").symlink_to(folder / "train/cat/1.png")
    assert len(load(root).train) == 10
    shutil.rmtree(folder / "test/cat")
    (folder / "test/cat").symlink_to(outside / "test/cat")
    with pytest.raises(DatasetError, match=r"test/cat: a link that leads out"):
        load(root)


USE = """
import json, sys
from pathlib import Path
from workloads.datasets import imagefolder
from workloads.contract import Hardware, TrainConfig
config = TrainConfig(model="cnn", dataset=sys.argv[2], strategy="eager", hardware=Hardware("cpu", 1), cpus=1)
print("started", flush=True)
data = imagefolder.DECLARATION.load(Path(sys.argv[1]), sys.argv[2], config)
print(json.dumps([data.class_names, data.digest, len(data.train)]))
"""


def test_any_folder_name_works_under_the_c_locale(root: Path) -> None:
    """Names with spaces, quotes, two scripts, a newline and a byte that is not UTF-8; digest as in this process."""
    classes = ("a b'\"$;", "кошка 猫", "new\nline", os.fsdecode(b"caf\xe9"), os.fsdecode(b"\x80"))
    pets(root, classes).rename(root / "les bêtes 动物")
    name = "imagefolder/les bêtes 动物"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(root), name], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names, digest, count = json.loads(done.stdout.splitlines()[1])
    assert names == ["a b'\"$;", "caf\\xe9", "new\nline", "\\x80", "кошка 猫"]
    assert count == 25
    here = DECLARATION.load(root, name, config())
    assert (list(here.class_names), here.digest) == (names, digest)


# The cache


def test_the_second_load_decodes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pets(root)
    first = load(root)
    monkeypatch.setattr(decoded_images, "decode", lambda *_, **__: pytest.fail("decoded again"))
    again = load(root)
    assert (again.train.images == first.train.images).all()
    assert (again.mean, again.std, again.digest) == (first.mean, first.std, first.digest)


def _flip_a_byte(cache: Path) -> None:
    path = cache / "pixels-3x8.npy"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def _truncate(cache: Path) -> None:
    os.truncate(cache / "pixels-3x8.npy", 200)


def _remove(cache: Path) -> None:
    (cache / "pixels-3x8.npy").unlink()


def _garble_description(cache: Path) -> None:
    (cache / "pixels-3x8.json").write_text('{"version": 1, "conte')


def _garble_manifest(cache: Path) -> None:
    (cache / "manifest.json").write_bytes(b"\0\0\0")


def _other_version(cache: Path) -> None:
    for path in cache.glob("*.json"):
        path.write_text(path.read_text().replace('"version": 1', '"version": 0'))


def _empty_all(cache: Path) -> None:
    for path in cache.iterdir():
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [_flip_a_byte, _truncate, _remove, _garble_description, _garble_manifest, _other_version, _empty_all]
)
def test_a_damaged_cache_is_replaced(root: Path, damage: Callable[[Path], None]) -> None:
    folder = pets(root)
    before = load(root)
    expected = np.array(before.train.images)
    damage(folder / CACHE)
    after = load(root)
    assert (after.train.images == expected).all()
    assert (after.mean, after.digest) == (before.mean, before.digest)
    assert DECLARATION.digest(root, NAME) == before.digest


def test_processes_that_prepare_at_once_do_the_work_once(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three real processes load a data set that nobody prepared: same digest, one of them decodes, nothing is left."""
    folder = pets(root)
    loud = USE.replace("import json, sys\n", "import json, sys, logging\nlogging.basicConfig(level='INFO')\n")
    argv = [sys.executable, "-c", loud, str(root), NAME]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for _ in range(3)
        ]
        outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out.splitlines()[1] for out, _ in outputs}) == 1
    talk = "".join(err for _, err in outputs)
    assert talk.count("decoding 14 images") == 1
    assert talk.count("reading 14 of 14 images") == 1
    assert {path.name for path in (folder / CACHE).iterdir()} == {
        "lock", "manifest.json", "files", "pixels-3x8.npy", "pixels-3x8.json",
    }  # fmt: skip


def test_a_killed_preparation_does_not_stop_the_next(root: Path) -> None:
    """kill -9 in the middle of decoding: the next one neither waits nor takes the half-made file."""
    pets(root)
    slow = USE.replace(
        "config =",
        "from workloads.datasets.shared import decoded_images\n"
        "def decode(*_, **__):\n"
        "    print('decoding', flush=True)\n"
        "    __import__('time').sleep(60)\n"
        "decoded_images.decode = decode\n"
        "config =",
    )
    with subprocess.Popen([sys.executable, "-c", slow, str(root), NAME], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert process.stdout.readline() == "decoding\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    said: list[str] = []
    DECLARATION.prepare(root, NAME, said.append)
    assert not [line for line in said if "waiting" in line]
    assert len(load(root).train) == 10


def ordinary(argv: list[str]) -> list[str]:
    """The same command, bound by file permissions even where the tests run as root."""
    if os.geteuid() != 0:
        return argv
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed, and root ignores permissions")
    return ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search", "--", *argv]


@contextlib.contextmanager
def read_only(*folders: Path) -> Iterator[None]:
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_read_only_data_root_keeps_its_cache_with_the_user(root: Path) -> None:
    """And a later change is noticed there as well."""
    folder = pets(root)
    argv = ordinary([sys.executable, "-c", USE, str(root), NAME])
    with read_only(root, folder):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert not (folder / CACHE).exists()
    assert len(list((root.parent / "user cache").rglob("pixels-3x8.npy"))) == 1
    digest = json.loads(done.stdout.splitlines()[1])[1]
    assert DECLARATION.digest(root, NAME) == digest
    _overwrite(folder)
    assert DECLARATION.digest(root, NAME) not in {"", digest}


def test_an_unwritable_cache_is_an_error_that_names_both_folders(root: Path) -> None:
    folder, user_cache = pets(root), root.parent / "user cache"
    user_cache.mkdir()
    argv = ordinary([sys.executable, "-c", USE, str(root), NAME])
    with read_only(root, folder, user_cache):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "cannot write the data set's cache" in done.stderr
    assert f"{folder / CACHE}: Permission denied; {user_cache}" in done.stderr
    assert "XDG_CACHE_HOME" in done.stderr


def test_a_full_disk_is_an_error_and_leaves_no_half_file(root: Path) -> None:
    """The limit on file size stands for the disk: the write of the decoded images fails in the middle."""
    folder = pets(root, size=(64, 64))
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n" + USE
    done = subprocess.run([sys.executable, "-c", limited, str(root), NAME], capture_output=True, text=True, check=False)
    assert "cannot write the data set's cache" in done.stderr
    assert "EFBIG" in done.stderr
    assert "free space there" in done.stderr
    assert not [path for path in (folder / CACHE).iterdir() if "pixels" in path.name]
    assert len(load(root).train) == 10


def test_only_old_leftovers_are_deleted(root: Path) -> None:
    cache = pets(root) / CACHE
    cache.mkdir()
    for name, age_s in (("old", 2 * 3600), ("young", 0)):
        (cache / f".pixels-3x8.npy.{name}").write_bytes(b"half")
        stamp = (cache / f".pixels-3x8.npy.{name}").stat().st_mtime - age_s
        os.utime(cache / f".pixels-3x8.npy.{name}", (stamp, stamp))
    load(root)
    assert [path.name for path in cache.glob(".pixels*")] == [".pixels-3x8.npy.young"]


def test_much_changed_content_is_not_read_while_planning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a gigabyte the digest is unknown (empty) rather than slow; here the bound is one byte."""
    folder = pets(root)
    load(root)
    _overwrite(folder)
    monkeypatch.setattr(imagefolder, "CHEAP_BYTES", 1)
    assert DECLARATION.digest(root, NAME) == ""
