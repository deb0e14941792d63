"""Data sets on the node's own disk: copied once, complete or not at all; a failure never stops a run."""

from __future__ import annotations

import errno
import getpass
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.cluster import cluster_file, job_script, resources
from orchestrator.errors import ClusterError
from workloads import registry
from workloads.contract import Execution, Hardware, TrainConfig
from workloads.engines import settings
from workloads.errors import DatasetError
from workloads.job import staging
from workloads.job.context import Interrupted, Job

IMAGES = registry.find(registry.datasets(), "imagefolder/pets")
assert IMAGES is not None
DECLARATION = replace(IMAGES, folder=lambda root, name: root / name.partition("/")[2])


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The node's disk, empty however full the one below it is; nothing of an earlier test is held."""
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**9, free=10**9))
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "node"))
    monkeypatch.setenv(staging.VARIABLE, "$NODE_DISK/stage")
    monkeypatch.setattr(staging, "POLL_S", 0.01)
    yield tmp_path / "node" / "stage" / f"orchestrate-{os.getuid()}"
    while staging._in_use:
        staging._in_use.pop().close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root with one data set of four files and a lock."""
    folder = tmp_path / "data" / "pets"
    for name in ("train/cat/1.png", "train/dog/2.png", "test/cat/3.png", "test/dog/4.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
        os.utime(folder / name, ns=(10**18 + 123, 10**18 + 456))
    (folder / "lock").write_text("process 1")
    return tmp_path / "data"


def job(root: Path | None, dataset: str = "imagefolder/pets") -> Job:
    """As much of a job as staging sees."""
    train = TrainConfig(model="cnn", dataset=dataset, strategy="eager", hardware=Hardware("cpu", 1), cpus=1)
    told: list[dict[str, Any]] = []
    return cast(
        Job,
        SimpleNamespace(
            spec=SimpleNamespace(data_root=str(root or ""), train=train, dataset_digest=""),
            pulse=SimpleNamespace(beat=lambda: None),
            events=SimpleNamespace(write=lambda event, **data: told.append({"event": event, **data}), told=told),
            result=SimpleNamespace(provenance={}, dataset_digest=None),
        ),
    )


def told(of: Job) -> dict[str, Any]:
    (event,) = cast(Any, of.events).told
    assert event == {"event": "staging"} | of.result.provenance["staging"]
    return dict(event)


def test_a_data_set_is_copied_once(root: Path, node: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The copy is a data root with the same names, contents and times; the second rank finds it there."""
    first, second = job(root), job(root)
    copy = staging.data_root(first, DECLARATION)
    assert copy is not None and copy.parent == node and staging.data_root(second, DECLARATION) == copy
    for path in (root / "pets").rglob("*.png"):
        same = copy / path.relative_to(root)
        assert same.read_bytes() == path.read_bytes() and same.stat().st_mtime_ns == path.stat().st_mtime_ns
    assert not (copy / "pets" / "lock").exists()
    said = told(first)
    assert said["copied"] and said["size_bytes"] == 5800 and said["staging_s"] > 0 and said["to"] == str(copy)
    assert "staged 0.0 MiB" in capfd.readouterr().err
    assert told(second)["copied"] is False and told(second)["why_not"] == ""


def test_a_changed_data_set_is_copied_again(root: Path, node: Path) -> None:
    """Another content is another copy; one from which a cleaner took a file is made anew."""
    copy = staging.data_root(job(root), DECLARATION)
    (root / "pets" / "train" / "cat" / "1.png").write_bytes(b"new")
    other = staging.data_root(job(root), DECLARATION)
    assert other is not None and other != copy
    (other / "pets" / "train" / "cat" / "1.png").unlink()
    while staging._in_use:
        staging._in_use.pop().close()  # the jobs before have ended
    again = job(root)
    assert staging.data_root(again, DECLARATION) == other and told(again)["copied"]
    assert (other / "pets" / "train" / "cat" / "1.png").read_bytes() == b"new"


def _stage(root: Path, barrier: Any, answers: Any) -> None:
    slow = staging._copy_files

    def copy_files(*arguments: Any) -> None:
        time.sleep(0.2)
        slow(*arguments)

    staging._copy_files = copy_files
    barrier.wait()
    mine = job(root)
    answers.put((str(staging.data_root(mine, DECLARATION)), told(mine)["copied"]))


def test_ranks_that_start_together_copy_once(root: Path, node: Path) -> None:
    """Four processes; the others wait for the one that copies and read the same copy."""
    context = get_context("fork")
    barrier, answers = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=_stage, args=(root, barrier, answers)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    said = [answers.get(timeout=30) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert len({where for where, _ in said}) == 1 and sorted(copied for _, copied in said) == [False] * 3 + [True]
    assert sorted(path.suffix for path in node.iterdir()) == ["", ".lock"]


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**6, free=50_001))


def no_space_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_files(_original: Any, target: Path, _beat: Any) -> None:
        (target / "half").write_bytes(b"1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(staging, "_copy_files", copy_files)


def changing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = staging._copy_files

    def copy_files(original: Any, target: Path, beat: Any) -> None:
        real(original, target, beat)
        (original.folder / "train" / "cat" / "5.png").write_bytes(b"new")

    monkeypatch.setattr(staging, "_copy_files", copy_files)


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NODE_DISK")


def relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(staging.VARIABLE, "stage")


def of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.path.expandvars(os.environ[staging.VARIABLE])) / f"orchestrate-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(os.environ["NODE_DISK"]).write_text("")


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (full_disk, "0.0 MiB do not fit: 0.0 MiB are free there, and 5% of the disk must stay free"),
        (no_space_left, "No space left on device"),
        (changing, "the data set changed during the copy"),
        (unset, "$NODE_DISK/stage is no absolute path on this node; is the variable set here?"),
        (relative, "stage is no absolute path on this node"),
        (of_others, "belongs to another user, or others may write to it"),
        (a_file, "Not a directory"),
    ],
)
def test_a_failed_copy_leaves_the_job_with_the_original(
    root: Path,
    node: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    trouble: Callable[[pytest.MonkeyPatch], None],
    why: str,
) -> None:
    """The run reads the original, a line says why, and nothing half is left on the node."""
    trouble(monkeypatch)
    mine = job(root)
    assert staging.data_root(mine, DECLARATION) == root
    facts = told(mine)
    assert why in facts["why_not"] and not facts["copied"] and facts["to"] == str(root)
    said = capfd.readouterr().err
    assert "the data set is not staged to" in said and why in said and f"the job reads it from {root}" in said
    assert not node.is_dir() or {path.suffix for path in node.iterdir()} <= {".lock", ".failed"}


def test_a_recent_failure_is_not_repeated_by_every_rank(
    root: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of eight ranks would fill the disk again; some minutes later it may have room."""
    with monkeypatch.context() as patch:
        no_space_left(patch)
        assert staging.data_root(job(root), DECLARATION) == root
    second = job(root)
    assert staging.data_root(second, DECLARATION) == root
    assert "No space left on device" in second.result.provenance["staging"]["why_not"]
    (failed,) = node.glob("*.failed")
    os.utime(failed, (time.time() - 2 * staging.RETRY_S,) * 2)
    assert staging.data_root(job(root), DECLARATION) != root


def test_unused_copies_are_deleted_to_free_space(root: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in use stays, whatever the need."""
    shutil.copytree(root / "pets", root / "old")
    shutil.copytree(root / "pets", root / "used")
    old = staging.data_root(job(root, "imagefolder/old"), DECLARATION)
    while staging._in_use:
        staging._in_use.pop().close()
    used = staging.data_root(job(root, "imagefolder/used"), DECLARATION)
    assert old is not None and used is not None
    monkeypatch.setattr(
        staging.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**5, free=0 if old.exists() else 10**5)
    )
    assert staging.data_root(job(root), DECLARATION) not in {root, None}
    assert used.exists() and not old.exists()


def test_an_interrupted_copy_leaves_no_files(root: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to end, it ends; killed, the next one clears away what it left."""

    def interrupted(*_: Any) -> None:
        raise Interrupted("SIGTERM")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_copy_files", interrupted)
        with pytest.raises(Interrupted):
            staging.data_root(job(root), DECLARATION)
    (lock,) = node.iterdir()
    (node / f".{lock.stem}.killed").mkdir()
    copy = staging.data_root(job(root), DECLARATION)
    assert sorted(path.name for path in node.iterdir()) == sorted([lock.name, lock.stem]) and copy == node / lock.stem


def test_nothing_is_staged_without_a_request_or_a_folder(
    root: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built-in data sets; no data root; no stage."""
    assert staging.data_root(job(root), replace(DECLARATION, folder=None)) == root
    assert staging.data_root(job(None), DECLARATION) is None
    monkeypatch.delenv(staging.VARIABLE)
    assert staging.data_root(job(root), DECLARATION) == root
    assert not node.exists()
    missing = job(root, "imagefolder/nosuch")
    monkeypatch.setenv(staging.VARIABLE, str(node))
    with pytest.raises(DatasetError, match="no such data set"):
        staging.data_root(missing, cast(Any, IMAGES))


def test_links_inside_a_data_set_become_files(root: Path, tmp_path: Path) -> None:
    """Also a link to a folder, once; the copy does not depend on where they lead."""
    pets = root / "pets"
    (pets / "train" / "cat" / "again.png").symlink_to(pets / "train" / "dog" / "2.png")
    (pets / "loop").symlink_to(pets)
    copy = staging.data_root(job(root), DECLARATION)
    assert copy is not None and not any(path.is_symlink() for path in copy.rglob("*"))
    assert (copy / "pets" / "train" / "cat" / "again.png").read_bytes() == b"train/dog/2.png" * 100


def test_a_run_loads_the_copy_and_finds_the_planned_content(tmp_path: Path) -> None:
    """Real images: the digest that was planned from the original is that of the copy; the original is not read."""
    from PIL import Image

    folder = tmp_path / "data" / "pets"
    for number, name in enumerate(("train/cat/1", "train/dog/2", "test/cat/3", "test/dog/4")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{name}.png")
    assert IMAGES is not None
    IMAGES.prepare(tmp_path / "data", "imagefolder/pets", lambda _: None)
    mine = job(tmp_path / "data")
    mine.spec.dataset_digest = IMAGES.digest(tmp_path / "data", "imagefolder/pets")  # type: ignore[misc]
    assert mine.spec.dataset_digest
    data = settings.load_data(mine)
    assert data.digest == mine.result.dataset_digest == mine.spec.dataset_digest
    staged = Path(mine.result.provenance["staging"]["to"])
    assert data.train.files is not None and all(path.is_relative_to(staged) for path in data.train.files)  # type: ignore[union-attr]


PROFILE = """
[cluster.lab]
stage = "{stage}"
[cluster.lab.cpu]
"""


def test_the_node_expands_the_variables_of_the_cluster_file() -> None:
    """$TMPDIR reaches the job as it stands; {user} is known here."""
    profile = cluster_file.parse_file(PROFILE.format(stage="$TMPDIR"), "c")["lab"]
    train = TrainConfig(model="cnn", dataset="mnist", strategy="probe", hardware=Hardware("cpu", 1), cpus=1)
    strategy = registry.strategies()["probe"]
    shape = resources.place(train, Execution(), strategy, profile, None)
    assert not isinstance(shape, str)
    text = job_script.render(shape, profile, runs=Path("/runs"), python="/usr/bin/python3")
    assert "export ORCHESTRATE_STAGE='$TMPDIR'\n" in text
    named = cluster_file.parse_file(PROFILE.format(stage="/local/{user}"), "c")["lab"]
    assert named.stage == f"/local/{getpass.getuser()}"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("local/data", "is not an absolute path"),
        ("/local/{nobody}", "{nobody} is unknown"),
        ("/a\\tb", "control character"),
    ],
)
def test_an_impossible_stage_is_an_error_in_the_cluster_file(stage: str, message: str) -> None:
    """Located in the cluster file."""
    with pytest.raises(ClusterError, match=r"cluster\.lab\.stage") as refused:
        cluster_file.parse_file(PROFILE.format(stage=stage), "c")
    assert message in str(refused.value)
