"""One run in local mode, from the queue to its verdict: what its ranks see, and how each kind of end is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import db
from orchestrator.backends import leases
from workloads.contract import State
from workloads.files.run_dir import RunDir

from .conftest import UUIDS, Lab, alive, lab_processes, seen, wait_until


def test_ranks_see_their_devices_and_nothing_else(lab: Lab) -> None:
    """Two ranks on two leased GPUs and a core each; a session of their own, no terminal, our packages."""
    (run,) = lab.send(lab.spec(ranks=2, gpus=2, sleep=0.1))
    (ended,) = lab.wait_exit(run)
    assert ended.state is State.SUCCEEDED
    assert ended.exit_codes == (0, 0)
    first, second = seen(run, 0), seen(run, 1)
    for rank in (first, second):
        assert rank["gpus"] == ",".join(UUIDS[:2])
        assert rank["order"] == "PCI_BUS_ID"
        assert rank["threads"] == "1"
        assert rank["stdin"] == ""
        assert rank["session"] != os.getsid(0)
        assert rank["environ"]["PYTHONSAFEPATH"] == "1"
        assert rank["environ"]["HF_HUB_OFFLINE"] == "1"
        assert len(rank["cores"]) == 1
    assert first["cores"] != second["cores"]
    submission = json.loads(run.directory.submission.read_text())
    assert submission["job_id"].isdigit()
    assert submission["token"] == run.token
    assert [p.name for p in run.directory.logs(1)] == [
        f"{submission['job_id']}_1_log.err",
        f"{submission['job_id']}_1_log.out",
    ]
    assert "rank 1 says hello" in run.directory.logs(1)[1].read_text()


def test_a_cpu_run_sees_no_gpu(lab: Lab) -> None:
    (run,) = lab.send(lab.spec())
    assert seen(run)["gpus"] == ""


@pytest.mark.parametrize("visible", ["2,0", f"{UUIDS[2]},{UUIDS[0]}", "2,GPU-0000"])
def test_gpus_are_those_that_the_submit_could_see(lab: Lab, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    """Whichever way they were written; ranks always get UUIDs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (run,) = lab.send(lab.spec(gpus=2, cpus_per_rank=0))
    assert seen(run)["gpus"] == f"{UUIDS[2]},{UUIDS[0]}"


def test_a_users_own_db_py_does_not_stand_in_for_ours(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory of a run is the submit's, with whatever modules lie there."""
    (tmp_path / "db.py").write_text("raise SystemExit('the wrong db')")
    (tmp_path / "workloads.py").write_text("raise SystemExit('the wrong workloads')")
    monkeypatch.chdir(tmp_path)
    (run,) = lab.send(lab.spec())
    (ended,) = lab.wait_exit(run)
    assert ended.state is State.SUCCEEDED
    assert seen(run)["db"] == db.__file__


def test_a_dead_rank_ends_its_run_within_10_s_and_no_other(lab: Lab) -> None:
    """Its peer ignores SIGTERM and has a child in a session of its own: all of it goes, the neighbour stays."""
    neighbour = lab.spec(sleep=600)
    dying = lab.spec(sleep=600, exit=1, code=3, stubborn=True, child=True)
    dying = replace(dying, expect=replace(dying.expect, ranks=2, cpus_per_rank=0))
    other, run = lab.send(neighbour, dying)
    rank_0 = seen(run, 0)
    died_at = seen(run, 1)["time"]
    (ended,) = lab.wait_exit(run)
    assert time.time() - died_at < 10
    assert ended.state is State.FAILED
    assert ended.reason == "program_error"
    assert ended.message.startswith("rank 1 ended with exit code 3, so the others were stopped")
    assert ended.exit_codes == (-signal.SIGKILL, 3)
    child = json.loads((run.directory.path / "child.json").read_text())
    assert not alive(rank_0["pid"])
    assert not alive(child)
    assert alive(seen(other)["pid"])


def test_a_rank_that_leaves_early_is_a_dead_rank(lab: Lab) -> None:
    """sys.exit(0) in one rank leaves its peers waiting just as a crash does."""
    spec = lab.spec(sleep=600, exit=0, code=0)
    (run,) = lab.send(replace(spec, expect=replace(spec.expect, ranks=2, cpus_per_rank=0)))
    left_at = seen(run, 0)["time"]
    (ended,) = lab.wait_exit(run)
    assert time.time() - left_at < 10
    assert (ended.state, ended.reason) == (State.FAILED, "rank_left")
    assert ended.message == "rank 0 exited while the others were running"


def test_a_ranks_own_words_are_the_reason(lab: Lab) -> None:
    (run,) = lab.send(lab.spec(fail=0))
    (ended,) = lab.wait_exit(run)
    assert (ended.state, ended.reason) == (State.OUT_OF_MEMORY, "device_memory")
    assert ended.message == "rank 0: no room on the device"


def test_a_killed_rank_is_named(lab: Lab) -> None:
    (run,) = lab.send(lab.spec(sleep=600))
    os.kill(seen(run)["pid"], signal.SIGKILL)
    (ended,) = lab.wait_exit(run)
    assert ended.state is State.FAILED
    assert ended.message == "rank 0 was killed by SIGKILL"
    assert ended.exit_codes == (-signal.SIGKILL,)


def test_success_needs_a_result(lab: Lab) -> None:
    (run,) = lab.send(lab.spec(silent=True))
    (ended,) = lab.wait_exit(run)
    assert (ended.state, ended.reason) == (State.FAILED, "no_result")


def test_a_silent_rank_is_a_hang(lab: Lab) -> None:
    """Stopped in its tracks, so that no watchdog inside the job can act."""
    (run,) = lab.send(lab.spec(sleep=600, progress=True, hang_timeout_s=1))
    wait_until(run.directory.progress(0).exists)
    os.kill(seen(run)["pid"], signal.SIGSTOP)
    (ended,) = lab.wait_exit(run)
    assert (ended.state, ended.reason) == (State.FAILED, "hang")
    assert ended.message == "rank 0 made no progress for 1 s"
    assert not alive(seen(run)["pid"])


def test_a_clock_that_jumps_makes_no_run_look_silent(lab: Lab) -> None:
    """The rank goes on saying where it is, with times an hour old: this machine's clock was put forward, or the file
    server's is behind."""
    (run,) = lab.send(lab.spec(sleep=6, progress=True, behind=3600, hang_timeout_s=1))
    (ended,) = lab.wait_exit(run)
    assert ended.state is State.SUCCEEDED, ended.message


def test_the_time_limit_comes_with_a_warning(lab: Lab) -> None:
    (run,) = lab.send(lab.spec(sleep=600, time_limit_s=2, warned=True))
    started = seen(run)["time"]
    (ended,) = lab.wait_exit(run)
    assert 1.5 < time.time() - started < 8
    assert (ended.state, ended.reason) == (State.TIMEOUT, "time_limit")
    assert ended.message == "it reached its time limit of 2 s"
    assert (run.directory.path / "warned.0").exists()


def test_a_rank_that_heeds_the_warning_is_out_of_time_too(lab: Lab) -> None:
    """Rank 0 leaves at once, rank 1 does not: it is no dead rank that rank 1 lost."""
    spec = lab.spec(ranks=2, cpus_per_rank=0, sleep=600, time_limit_s=3, heeds=0, stubborn=True)
    (run,) = lab.send(spec)
    (ended,) = lab.wait_exit(run)
    assert (ended.state, ended.reason) == (State.TIMEOUT, "time_limit")
    assert ended.exit_codes == (os.EX_TEMPFAIL, -signal.SIGKILL)


def test_launchers_around_us_do_not_reach_the_ranks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside an allocation or under torchrun, a rank would take itself for one of theirs."""
    for name in ("SLURM_PROCID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("LOCAL_DATA", "stays")
    (run,) = lab.send(lab.spec())
    environ = seen(run)["environ"]
    assert (
        not {"SLURM_PROCID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK"} & environ.keys()
    )
    assert environ["LOCAL_DATA"] == "stays"


def test_sigterm_to_the_supervisor_cancels(lab: Lab) -> None:
    (run,) = lab.send(lab.spec(sleep=600))
    rank = seen(run)
    os.kill(int(json.loads(run.directory.submission.read_text())["job_id"]), signal.SIGTERM)
    (ended,) = lab.wait_exit(run)
    assert (ended.state, ended.reason) == (State.CANCELLED, "signal")
    assert "SIGTERM" in ended.message
    assert not alive(rank["pid"])


def test_kill_9_of_the_supervisor_frees_its_devices(lab: Lab) -> None:
    """The ranks die with it, the queue notices, the next run gets the device."""
    (run,) = lab.send(lab.spec(sleep=600, gpus=4, child=True))
    rank = seen(run)
    wait_until((run.directory.path / "child.json").exists)
    os.kill(int(json.loads(run.directory.submission.read_text())["job_id"]), signal.SIGKILL)
    (ended,) = lab.wait_exit(run)
    assert (ended.state, ended.reason) == (State.LOST, "supervisor_lost")
    assert "its supervisor was killed" in ended.message
    assert not alive(rank["pid"])
    assert not alive(json.loads((run.directory.path / "child.json").read_text()))
    wait_until(lambda: not leases.is_held(leases.gpu_name(UUIDS[3])))
    (after,) = lab.send(lab.spec(gpus=4))
    assert lab.wait_exit(after)[0].state is State.SUCCEEDED


def test_an_interpreter_that_is_gone_fails_the_run(lab: Lab) -> None:
    request = lab.request(lab.spec())
    with mock.patch.object(sys, "executable", "/nowhere/python"):
        lab.executor.submit([request])
    lab.executor.ensure_running()
    (ended,) = lab.wait_exit(request)
    assert (ended.state, ended.reason) == (State.FAILED, "start_failed")
    assert "/nowhere/python" in ended.message


def test_a_damaged_spec_fails_the_run(lab: Lab) -> None:
    request = lab.request(lab.spec())
    RunDir.of(lab.runs, request.spec.run_id).spec.write_text("{")
    lab.executor.submit([request])
    lab.executor.ensure_running()
    (ended,) = lab.wait_exit(request)
    assert (ended.state, ended.reason) == (State.FAILED, "start_failed")
    assert "not whole JSON" in ended.message


def test_the_queue_ends_when_nothing_is_left(lab: Lab) -> None:
    (run,) = lab.send(lab.spec())
    lab.wait_exit(run)
    wait_until(lambda: not lab_processes(lab.domain), what="queue and supervisor end")
    assert not lab.executor.queue_alive
    assert "nothing left to do" in (lab.runs / "queue/log.txt").read_text()
