"""Files of a run: atomic writes, append-only events, errors for files of other runs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workloads.contract import Execution, Expectation, Hardware, RunResult, RunSpec, State, TrainConfig
from workloads.files.event_log import EventLog, read_events
from workloads.files.json_file import read_json, write_json
from workloads.files.run_dir import RunDir, run_dirs

RUN_ID = "a9ff36a397d39cd3"


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    """A value that JSON lacks fails before, a full disk during the write: the reader sees the old content."""
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_full_disk_during_a_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("content", [b"", b"  \n", b'{"a": 1', b"\xff\xfe", b"not json", b"[" * 100_000])
def test_the_error_names_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"result\.json"):
        read_json(path)


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "", "A9FF36A397D39CD3", "a9ff", RUN_ID + "/x"])
def test_only_a_run_id_becomes_a_path(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ValueError, match="not a run id"):
        RunDir.of(tmp_path, run_id)


def test_a_result_of_another_run_or_attempt_is_an_error(tmp_path: Path) -> None:
    attempt = RunDir.of(tmp_path, RUN_ID).attempt(2).create()
    write_json(attempt.result, RunResult(run_id=RUN_ID, attempt=1, state=State.SUCCEEDED).to_json())
    with pytest.raises(ValueError, match="belongs to run a9ff36a397d39cd3 attempt 1"):
        attempt.read_result()


def test_an_edited_spec_is_an_error(tmp_path: Path) -> None:
    """Its directory would hold what another learning rate learned."""
    train = TrainConfig(model="cnn", dataset="digits", strategy="eager", hardware=Hardware("cpu", 1), cpus=1)
    run = RunDir.of(tmp_path, train.run_id())
    run.path.mkdir(parents=True)
    spec = RunSpec(
        run_id=train.run_id(),
        label="",
        experiment="",
        train=train,
        execution=Execution(),
        expect=Expectation(ranks=1, nodes=1, gpus_per_node=0, cpus_per_rank=1),
        target="local",
        data_root="",
    )
    run.write_spec(spec)
    assert run.read_spec() == spec
    run.spec.write_text(run.spec.read_text().replace('"lr": 0.05', '"lr": 0.9'))
    with pytest.raises(ValueError, match="edited: its training configuration no longer matches run"):
        run.read_spec()


def test_a_failed_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system names none when a disk is full."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/result\.json'$"):
        write_json(tmp_path / "result.json", {})
    assert list(tmp_path.iterdir()) == []


def test_run_dirs_skips_other_files(tmp_path: Path) -> None:
    run = RunDir.of(tmp_path, RUN_ID)
    run.attempt(10).create()
    run.attempt(9).create()
    (tmp_path / "queue").mkdir()
    (tmp_path / "a9" / "notes.txt").write_text("mine")
    (tmp_path / "zz").mkdir()
    (tmp_path / "zz" / RUN_ID).mkdir()
    assert [r.run_id for r in run_dirs(tmp_path)] == [RUN_ID]
    assert [a.number for a in run.attempts()] == [9, 10]


def test_events_are_read_from_the_offset_of_the_last_call(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("epoch", epoch=1, train_loss=float("inf"), name="日本\n")
    events, offset = read_events(path)
    assert [(e["event"], e["epoch"], e["train_loss"], e["name"]) for e in events] == [("epoch", 1, None, "日本\n")]
    log.write("epoch", epoch=2)
    events, offset = read_events(path, offset)
    assert [e["epoch"] for e in events] == [2]
    assert read_events(path, offset) == ([], offset)
    log.close()


def test_an_event_nested_too_deeply_is_skipped(tmp_path: Path) -> None:
    """As one that is broken."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"start"}\n{"event":"start","x":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert read_events(path)[0] == [{"event": "start"}]


def test_a_broken_last_line_is_left_for_later_and_a_new_writer_ends_it(tmp_path: Path) -> None:
    """A writer killed in the middle of a line neither hides its earlier events nor swallows the next writer's first."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"epoch","epoch":1}\n{"event":"epo')
    events, offset = read_events(path)
    assert [e["epoch"] for e in events] == [1]
    log = EventLog(path)
    log.write("resume", epoch=1)
    log.close()
    events, _ = read_events(path, offset)
    assert [e["event"] for e in events] == ["resume"]


def test_events_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from workloads.files.event_log import EventLog;"
        "log = EventLog(Path(sys.argv[1])); log.write('epoch', epoch=1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [e["epoch"] for e in read_events(path)[0]] == [1]
