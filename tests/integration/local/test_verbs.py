"""The verbs as people type them: submit, status, logs, cancel, retry, on tiny jobs instead of training."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import time
from typing import Any

import pytest

from db.connect import open_store
from db.submissions import record_intents, withdraw_intents
from orchestrator.backends.base import Request, Status
from orchestrator.backends.local.records import QueueFolder
from workloads.contract import ResourceShape, State
from workloads.files.run_dir import RunDir

from .conftest import Lab, alive, lab_processes, seen, wait_until

EXPERIMENT = """
name = "tiny"
[defaults]
dataset = "digits"
epochs = 1
hardware = "cpu:1"
strategy = "eager"
[matrix]
model = ["cnn"]
seed = [0, 1, 2]
"""


def status(lab: Lab, *options: str) -> list[dict[str, Any]]:
    code, stdout, stderr = lab.run("status", "--json", *options)
    assert code == 0, stderr
    rows: list[dict[str, Any]] = json.loads(stdout)
    return rows


@pytest.fixture
def planned(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A workspace with an experiment of three runs that sleep a little."""
    lab.root.mkdir()
    (lab.root / "experiment.toml").write_text(EXPERIMENT)
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"sleep": 0.2}')
    return lab


@pytest.mark.torch
def test_submit_sends_once_and_waits(planned: Lab) -> None:
    """Lines for a pipe, exit code 0; the same again finds nothing to send and says so."""
    code, stdout, stderr = planned.run("submit", "--local", "--wait")
    assert code == 0, stderr
    assert stdout == "3 runs submitted to local\n"
    assert len(re.findall(r"cnn.*: succeeded", stderr)) == 3
    assert [row["state"] for row in status(planned)] == ["succeeded"] * 3
    code, stdout, _ = planned.run("submit", "--local", "--wait")
    assert (code, stdout) == (0, "0 runs submitted (3 done)\n")
    assert planned.starts().total() == 3


@pytest.mark.parametrize("wait", [(), ("--wait",), ("--watch",)])
def test_a_submit_of_nothing_but_excluded_cells_fails_and_says_which_rule(planned: Lab, wait: tuple[str, ...]) -> None:
    """A script sees it by the exit code, whether it waits or not."""
    code, stdout, stderr = planned.run("submit", "--local", "--set", "hardware=cpu:2", *wait)
    assert (code, stdout) == (1, "0 runs submitted (3 excluded)\n")
    assert "every cell is excluded\n" in stderr
    assert "  why: strategy eager: eager trains on one device and cpu:2 has 2" in stderr


def test_a_submit_without_its_data_set_is_refused_with_one_remedy(planned: Lab) -> None:
    """Four files are missing, one command fetches them."""
    code, _, stderr = planned.run("submit", "--local", "--set", "dataset=mnist", "--data", str(planned.root))
    assert code == 2
    assert stderr.startswith("4 plan checks failed; fix them first")
    assert stderr.count("orchestrate data prepare mnist") == 1
    assert not planned.runs.exists()


FULL_DISK = """
import errno, os
calls, fsync = [0], os.fsync
def full(descriptor):
    calls[0] += 1
    if calls[0] >= {call}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fsync(descriptor)
os.fsync = full
"""


FULL_DATABASE = """
import sqlite3
connect = sqlite3.connect
def full(database, **options):
    if "mode=ro" in database:
        return connect(database, **options)
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    raise error
sqlite3.connect = full
"""


def test_runs_can_be_seen_and_ended_when_the_disk_is_full(lab: Lab) -> None:
    """What fills it may be their own logs."""
    running, _ = lab.submit(lab.spec(gpus=4, cpus_per_rank=0, sleep=600), lab.spec(gpus=4, cpus_per_rank=0))
    rank = seen(running)
    wait_until(lambda: [row["state"] for row in status(lab)] == ["running", "pending"])
    code, stdout, stderr = lab.run("status", "--json", patch=FULL_DATABASE)
    assert code == 0, stderr
    assert [row["state"] for row in json.loads(stdout)] == ["running", "pending"]
    assert "results.db: the disk is full, so states may be old\n" in stderr
    code, stdout, stderr = lab.run("cancel", "--all", patch=FULL_DATABASE)
    assert (code, stdout) == (0, "2 runs cancelled\n"), stderr
    assert "by Slurm" not in stderr and not alive(rank["pid"])
    assert [row["state"] for row in status(lab)] == ["cancelled"] * 2


@pytest.mark.torch
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_disk_that_fills_up_during_submit_loses_and_doubles_nothing(planned: Lab, call: int) -> None:
    """At the plan, the specs or the queue's entries: one message that names the file, and the same submit again sends
    each run once."""
    code, _, stderr = planned.run("submit", "--local", patch=FULL_DISK.format(call=call))
    assert code in {1, 2}
    assert "No space left on device" in stderr and str(planned.root) in stderr and "Traceback" not in stderr
    code, _, stderr = planned.run("submit", "--local", "--wait")
    assert code == 0, stderr
    assert [(row["state"], row["attempt"]) for row in status(planned)] == [("succeeded", 1)] * 3
    assert planned.starts().total() == 3


@pytest.mark.torch
def test_the_exit_code_tells_whether_all_or_some_failed(planned: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 when one of three failed, 1 when the one that is left to send fails too, 0 when its retry succeeds."""
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"bad_seed": 1}')
    code, _, stderr = planned.run("submit", "--local", "--wait")
    assert code == 3
    assert "failed: rank 0 ended with exit code 3: rank 0 complains" in stderr
    code, stdout, _ = planned.run("submit", "--local", "--wait")
    assert (code, stdout) == (1, "1 run submitted to local (2 done, 1 failed before)\n")
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", "{}")
    code, stdout, _ = planned.run("retry", "--failed", "--wait")
    assert (code, stdout) == (0, "1 run submitted\n")
    assert sorted(row["attempt"] for row in status(planned)) == [1, 1, 3]


@pytest.mark.torch
def test_retry_tells_of_an_edited_experiment_file_only(planned: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what --set said or another file was planned from; there is no job script on this machine."""
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"bad_seed": 0}')
    file = planned.root / "experiment.toml"
    file.rename(planned.root / "other.toml")
    assert planned.run("submit", "--local", "--wait", "-e", "other.toml", "--set", "seed=0")[0] == 1
    code, _, stderr = planned.run("retry", "--failed", "--wait")
    assert code == 1 and "otherwise" not in stderr
    (planned.root / "other.toml").write_text(EXPERIMENT.replace("epochs = 1", "epochs = 2"))
    code, _, stderr = planned.run("retry", "--failed", "--wait")
    assert "note: the experiment file has changed since the last plan; retry keeps their time limit and" in stderr
    assert "job script" not in stderr


@pytest.mark.torch
def test_each_run_is_told_once_when_a_canary_goes_first(planned: Lab) -> None:
    """And nothing is counted as to come after it where nothing does."""
    code, _, stderr = planned.run("submit", "--local", "--canary", "--wait", "--set", "seed=0")
    assert code == 0, stderr
    assert "1 canary, one of each resource shape, and no more runs\n" in stderr
    assert stderr.count(": succeeded") == 1
    code, _, stderr = planned.run("submit", "--local", "--canary", "--wait", "--set", "epochs=2")
    assert code == 0, stderr
    assert "1 canary, one of each resource shape, before 2 more runs\n" in stderr
    assert len(re.findall(r"cnn.*: succeeded", stderr)) == 3


@pytest.mark.torch
def test_a_canary_that_succeeded_counts_for_the_exit_code(planned: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """3, some succeeded, though all that came after it failed."""
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"bad_seed": 1}')
    (planned.root / "experiment.toml").write_text(EXPERIMENT.replace("[0, 1, 2]", "[0, 1]"))
    code, _, stderr = planned.run("submit", "--local", "--canary", "--wait")
    assert code == 3, stderr


@pytest.mark.torch
def test_ctrl_c_leaves_the_runs_alone_and_says_so(planned: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real terminal: the bars are drawn, the interrupt goes to the whole foreground group, as a keyboard's does."""
    monkeypatch.setenv("ORCHESTRATE_LAB_TODO", '{"sleep": 6.0, "progress": true}')
    monkeypatch.setenv("TERM", "xterm")
    main, side = pty.openpty()
    process = planned.command(
        "submit", "--local", "--wait", stdin=side, stdout=side, stderr=side, start_new_session=True, text=False
    )
    os.close(side)
    screen = b""
    deadline = time.monotonic() + 30
    while b"123 samples/s" not in screen and time.monotonic() < deadline:
        screen += os.read(main, 4096)
    os.killpg(process.pid, signal.SIGINT)
    while process.poll() is None or b"interrupted" not in screen:
        try:
            screen += os.read(main, 4096)
        except OSError:
            break
    os.close(main)
    assert process.wait() == 130
    text = screen.decode()
    assert "epoch 1/3" in text
    assert "interrupted: the runs go on; orchestrate status shows them" in text
    wait_until(lambda: [row["state"] for row in status(planned)] == ["succeeded"] * 3, what="runs went on")
    assert planned.starts().total() == 3


def test_status_tells_state_reason_and_progress(lab: Lab) -> None:
    running, waiting, failed = lab.submit(
        lab.spec(gpus=4, cpus_per_rank=0, sleep=600, progress=True),
        lab.spec(gpus=2, cpus_per_rank=0),
        lab.spec(cpus_per_rank=0, exit=0, code=3),
    )
    wait_until(running.directory.progress(0).exists)
    lab.wait_exit(failed)
    rows = {row["run_id"]: row for row in status(lab)}
    first, second, third = (rows[d.spec.run_id] for d in (running, waiting, failed))
    assert (first["state"], first["epoch"], first["epochs"], first["samples_per_s"]) == ("running", 1, 3, 123.0)
    assert first["job_id"] == str(seen(running)["session"])
    assert (second["state"], second["reason"]) == ("pending", "queued")
    assert second["message"] == "waits for 2 GPUs (0 of 4 free)"
    assert (third["state"], third["reason"], third["attempt"]) == ("failed", "program_error", 1)
    code, stdout, _ = lab.run("status")
    assert code == 0
    assert "waits for 2 GPUs (0 of 4 free)" in stdout
    assert "1/3" in stdout


def test_status_revives_a_dead_queue(lab: Lab) -> None:
    running, waiting = lab.submit(lab.spec(gpus=4, cpus_per_rank=0, sleep=1.5), lab.spec(gpus=4, cpus_per_rank=0))
    seen(running)
    os.kill(lab.queue_pid(), signal.SIGKILL)
    wait_until(lambda: not lab.executor.queue_alive)
    assert {row["state"] for row in status(lab)} == {"running", "pending"}
    assert [ended.state for ended in lab.wait_exit(running, waiting)] == [State.SUCCEEDED] * 2


def test_a_reboot_leaves_lost_runs_that_retry_sends_again(lab: Lab) -> None:
    """Everything is killed at once, as a power cut does; the supervisor's file tells of another boot."""
    run, waiting = lab.submit(lab.spec(gpus=4, cpus_per_rank=0, sleep=600), lab.spec(gpus=4, cpus_per_rank=0))
    seen(run)
    power_cut(lab)
    started = json.loads(run.directory.supervisor.read_text())
    started["host"]["boot"] = "before"
    run.directory.supervisor.write_text(json.dumps(started))
    rows = {row["run_id"]: row for row in status(lab, "--no-recover")}
    assert rows[run.spec.run_id]["state"] == "lost"
    assert rows[run.spec.run_id]["recovery_message"] == "will be resubmitted (1 of 1 for lost)"
    assert rows[run.spec.run_id]["message"].startswith("the machine was restarted")
    assert lab.wait_exit(waiting)[0].state is State.SUCCEEDED
    code, stdout, stderr = lab.run("retry", "--failed")
    assert (code, stdout) == (0, "1 run submitted\n"), stderr
    wait_until((RunDir.of(lab.runs, run.spec.run_id).attempt(2).path / "seen.0.json").exists, what="attempt 2 runs")


def power_cut(lab: Lab) -> None:
    while left := lab_processes(lab.domain):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def test_a_lost_run_is_sent_again_once_by_itself(lab: Lab) -> None:
    """By the next command that looks; a run that is lost for the second time waits for its people."""
    (run,) = lab.submit(lab.spec(gpus=1, cpus_per_rank=0, sleep=600))
    seen(run)
    power_cut(lab)
    (row,) = status(lab)
    assert (row["attempt"], row["recovery"], row["recoveries"]) == (2, "resubmit", 1)
    assert row["recovery_message"] == "resubmitted after attempt 1 (1 of 1 for lost)"
    wait_until((RunDir.of(lab.runs, run.spec.run_id).attempt(2).path / "seen.0.json").exists, what="attempt 2 runs")
    power_cut(lab)
    (row,) = status(lab)
    assert (row["state"], row["attempt"], row["recovery"]) == ("lost", 2, "stop")
    assert row["recovery_message"].startswith("not resubmitted: after 1 of 1 for lost; find out what became of it")


def test_cancel_keeps_what_has_ended_from_being_sent_again(lab: Lab) -> None:
    (run,) = lab.submit(lab.spec(gpus=1, cpus_per_rank=0, sleep=600))
    seen(run)
    power_cut(lab)
    code, stdout, stderr = lab.run("cancel", "--all")
    assert (code, stdout) == (0, "0 runs cancelled\n") and "1 run that had ended will not be resubmitted" in stderr
    (row,) = status(lab)
    assert (row["state"], row["attempt"], row["recovery"]) == ("lost", 1, "stop")
    assert "it was cancelled; orchestrate retry" in row["recovery_message"]


def test_cancel_keeps_what_has_lost_its_folder_from_being_sent_again(lab: Lab) -> None:
    (run,) = lab.submit(lab.spec(gpus=1, cpus_per_rank=0, sleep=600))
    seen(run)
    power_cut(lab)
    assert status(lab, "--no-recover")[0]["state"] == "lost"
    shutil.rmtree(run.directory.path)
    code, stdout, stderr = lab.run("cancel", "--all")
    assert (code, stdout) == (0, "0 runs cancelled\n") and "1 run that had ended will not be resubmitted" in stderr
    (row,) = status(lab)
    assert (row["state"], row["attempt"], row["recovery"]) == ("lost", 1, "stop")


@pytest.mark.parametrize("gone", ["", "job"])
def test_cancel_ends_what_runs_without_its_folder(lab: Lab, gone: str) -> None:
    (run,) = lab.submit(lab.spec(gpus=1, cpus_per_rank=0, sleep=600))
    rank = seen(run)
    shutil.rmtree(run.directory.path / gone)
    code, stdout, stderr = lab.run("cancel", "--all")
    assert (code, stdout) == (0, "1 run cancelled\n"), stderr
    assert not alive(rank["pid"])
    (row,) = status(lab)
    assert (row["state"], row["message"]) == ("cancelled", "stopped by orchestrate cancel")


def test_cancel_stops_what_waits_and_what_runs(lab: Lab) -> None:
    """One that ignores SIGTERM and has a child of its own, and one in the queue; a second cancel changes nothing."""
    running, waiting = lab.submit(
        lab.spec(gpus=4, cpus_per_rank=0, sleep=600, stubborn=True, child=True), lab.spec(gpus=1, cpus_per_rank=0)
    )
    rank = seen(running)
    wait_until((running.directory.path / "child.json").exists)
    code, stdout, stderr = lab.run("cancel", "--all")
    assert (code, stdout) == (0, "2 runs cancelled\n"), stderr
    assert not alive(rank["pid"])
    assert not alive(json.loads((running.directory.path / "child.json").read_text()))
    assert {row["state"] for row in status(lab)} == {"cancelled"}
    assert not (waiting.directory.path / "seen.0.json").exists()
    before = Status.read_exit(running.directory)
    code, stdout, stderr = lab.run("cancel", running.spec.run_id)
    assert (code, stdout) == (0, "0 runs cancelled\n")
    assert "already cancelled" in stderr
    assert Status.read_exit(running.directory) == before


IMPATIENT = "LocalExecutor.cancel_wait_s = 1.0"


def supervisor(run: Request) -> int:
    return int(json.loads(run.directory.submission.read_text())["job_id"])


@pytest.mark.parametrize("full", [False, True])
def test_cancel_is_final_where_the_supervisor_does_not_answer(lab: Lab, full: bool) -> None:
    """It is stopped and its ranks train on; with a full disk nothing can be written of it either."""
    (run,) = lab.submit(lab.spec(gpus=1, cpus_per_rank=0, sleep=600, stubborn=True, child=True))
    rank = seen(run)
    wait_until((run.directory.path / "child.json").exists)
    pid = supervisor(run)
    os.kill(pid, signal.SIGSTOP)
    code, stdout, stderr = lab.run("cancel", "--all", patch=IMPATIENT + (FULL_EXIT if full else ""))
    assert (code, stdout) == (0, "1 run cancelled\n"), stderr
    assert f"its supervisor, pid {pid} on this host, did not respond within 1 s" in stderr
    assert "so it and its ranks were killed" in stderr
    assert not alive(pid) and not alive(rank["pid"])
    assert not alive(json.loads((run.directory.path / "child.json").read_text()))
    (row,) = status(lab)
    assert (row["state"], row["message"]) == ("cancelled", "stopped by orchestrate cancel")


FULL_EXIT = """
import errno, os
from orchestrator.backends.base import Status
def full(self, directory, **_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
Status.write_exit = full
"""


def test_status_says_when_the_disk_has_no_room_for_how_a_run_ended(lab: Lab) -> None:
    """Its ranks are gone, and its supervisor waits for room: not a run that trains."""
    (run,) = lab.submit(lab.spec(gpus=1, cpus_per_rank=0, sleep=600))
    rank = seen(run)
    run.directory.exit.mkdir()  # nothing can be written there
    os.kill(rank["pid"], signal.SIGKILL)
    wait_until(lambda: QueueFolder(lab.runs).is_unreported(run.token), what="the supervisor notes it")
    (row,) = status(lab)
    assert (row["state"], row["reason"]) == ("running", "disk_full") and not alive(rank["pid"])
    run.directory.exit.rmdir()
    assert lab.wait_exit(run)[0].state is State.FAILED
    wait_until(lambda: not QueueFolder(lab.runs).is_unreported(run.token))
    assert status(lab, "--no-recover")[0]["state"] == "failed"


def test_cancel_says_where_a_run_goes_on_that_is_out_of_its_reach(lab: Lab) -> None:
    """The runs folder is shared, the processes are not."""
    (run,) = lab.submit(lab.spec(gpus=1, cpus_per_rank=0, sleep=600))
    rank = seen(run)
    os.kill(lab.queue_pid(), signal.SIGKILL)
    os.kill(supervisor(run), signal.SIGSTOP)
    started = json.loads(run.directory.supervisor.read_text())
    started["host"]["name"] = "n7"
    run.directory.supervisor.write_text(json.dumps(started))
    unseen = IMPATIENT + "\nfrom orchestrator.backends import leases, processes\n"
    unseen += "processes.find_supervisor = lambda token: None; leases.is_held = lambda name: False\n"
    unseen += "processes.kill_attempt = lambda *a, **k: True\n"
    code, stdout, stderr = lab.run("cancel", "--all", patch=unseen)
    assert (code, stdout) == (1, "0 runs cancelled\n")
    assert "  why: its supervisor on n7 did not respond within 1 s" in stderr
    assert stderr.endswith("  fix: run orchestrate cancel on n7\n") and "SIGKILL" not in stderr
    assert alive(rank["pid"])


def test_logs_of_a_rank_a_stream_an_attempt(lab: Lab) -> None:
    (run,) = lab.submit(lab.spec(ranks=2, cpus_per_rank=0, exit=1, code=3))
    lab.wait_exit(run)
    name = run.spec.run_id[:8]
    code, stdout, _ = lab.run("logs", name, "--rank", "1", "--stdout")
    assert (code, stdout) == (0, "rank 1 says hello\n")
    code, stdout, _ = lab.run("logs", name, "--stderr")
    assert (code, stdout) == (0, "rank 0 complains\n")
    code, stdout, _ = lab.run("logs", name, "--all")
    assert code == 0
    assert re.sub(r"==> .*/", "==> ", stdout).splitlines() == [
        f"==> {seen(run)['session']}_0_log.out <==",
        "rank 0 says hello",
        f"==> {seen(run)['session']}_0_log.err <==",
        "rank 0 complains",
        f"==> {seen(run)['session']}_1_log.out <==",
        "rank 1 says hello",
        f"==> {seen(run)['session']}_1_log.err <==",
        "rank 1 complains",
    ]
    code, stdout, stderr = lab.run("logs", name, "--rank", "7")
    assert (code, stdout) == (2, "")
    assert "has no rank 7\n  why: it has 2 ranks\n  fix: --rank 0 to 1, or --all" in stderr
    code, _, stderr = lab.run("logs", name, "--attempt", "7")
    assert code == 2
    assert "has no attempt 7\n  fix: its newest is 1" in stderr


def test_logs_follow_until_the_end(lab: Lab) -> None:
    """Started while the run waits, it shows what comes and ends with the run."""
    first, run = lab.submit(lab.spec(gpus=4, cpus_per_rank=0, sleep=1.0), lab.spec(gpus=4, cpus_per_rank=0, sleep=0.5))
    process = lab.command("logs", run.spec.run_id, "--follow", "--stdout")
    stdout, _ = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (0, "rank 0 says hello\n")
    assert run.directory.result.exists() and Status.read_exit(first.directory) is not None


def test_a_run_that_has_printed_nothing(lab: Lab) -> None:
    _, waiting = lab.submit(lab.spec(gpus=4, cpus_per_rank=0, sleep=600), lab.spec(gpus=4, cpus_per_rank=0))
    code, _, stderr = lab.run("logs", waiting.spec.run_id)
    assert code == 1
    assert "has no output yet\n  why: it is pending" in stderr


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_a_run_that_succeeded_and_printed_nothing(lab: Lab, follow: tuple[str, ...]) -> None:
    """No error, and what is said is true: empty files are named, and what clean removed is not taken for silence."""
    (run,) = lab.submit(lab.spec(cpus_per_rank=0))
    lab.wait_exit(run)
    log = next(path for path in run.directory.logs(0) if path.suffix == ".err")
    log.write_text("")
    code, stdout, stderr = lab.run("logs", run.spec.run_id, "--stderr", *follow)
    assert (code, stdout, stderr) == (0, "", f"run {run.spec.run_id} attempt 1 has empty logs: {log}\n")
    log.unlink()
    code, stdout, stderr = lab.run("logs", run.spec.run_id, "--stderr", *follow)
    assert (code, stdout) == (0, "")
    assert stderr.endswith("attempt 1 has no such logs: it wrote none, or orchestrate clean --logs removed them\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("logs", "nosuch"), 2, "no run is named 'nosuch'\n  fix: orchestrate status"),
        (("logs", ""), 2, "no run is named ''"),
        (("cancel",), 2, "cancel which runs?\n  fix: orchestrate cancel RUN, or orchestrate cancel --all"),
        (("cancel", "x", "--all"), 2, "runs are named, and --all is given too"),
        (("retry",), 2, "retry which runs?"),
        (("retry", "--failed"), 0, ""),
        (("status",), 0, "no runs yet; next: orchestrate submit"),
    ],
)
def test_what_is_said_where_nothing_runs(lab: Lab, arguments: tuple[str, ...], code: int, said: str) -> None:
    answer, _, stderr = lab.run(*arguments)
    assert answer == code
    assert said in stderr
    assert "Traceback" not in stderr
    assert list(lab.root.iterdir()) == [], "looking makes no files"


@pytest.mark.parametrize("options", [(), ("--attempt", "1"), ("--follow",)])
def test_logs_of_a_run_that_was_never_sent(lab: Lab, options: tuple[str, ...]) -> None:
    """Slurm did not answer, or had no room: the run is known and has no attempt."""
    workspace, spec = lab.workspace(), lab.spec(cpus_per_rank=0)
    with open_store(workspace.database) as store:
        (intent,) = record_intents(store, workspace.runs, [(spec, ResourceShape())], "local")
        withdraw_intents(store, [intent.token])
    code, stdout, stderr = lab.run("logs", spec.run_id, *options)
    assert (code, stdout) == (2, "")
    assert stderr == f"run {spec.run_id} has no logs: it was not submitted yet\n  fix: orchestrate submit\n"


def test_a_name_of_several_runs_lists_them(lab: Lab) -> None:
    """The same label twice: neither is taken; a run that is done is not retried."""
    first, second = lab.submit(lab.spec(cpus_per_rank=0), lab.spec(cpus_per_rank=0))
    lab.wait_exit(first, second)
    code, _, stderr = lab.run("cancel", "{}")
    assert code == 2
    told = [f"{run.spec.run_id} (experiment lab, succeeded)" for run in (first, second)]
    assert "'{}' names 2 runs\n  why: all have the label {}: " in stderr
    assert all(text in stderr for text in told)
    assert "'{' names 2 runs" in lab.run("cancel", "{")[2], "the start of a label"
    assert "no run is named '}'" in lab.run("cancel", "}")[2], "no other part of it: too much would be meant"
    assert "fix: give the run id of one, such as " in stderr and "the label\n" not in stderr
    code, _, stderr = lab.run("retry", first.spec.run_id)
    assert code == 2
    assert "is succeeded: nothing to retry\n  fix: orchestrate submit --stale" in stderr


def test_a_folder_that_may_only_be_looked_at(lab: Lab) -> None:
    """Status still tells what it knows where it may not start anything."""
    lab.submit(lab.spec(gpus=4, cpus_per_rank=0, sleep=600), lab.spec(gpus=4, cpus_per_rank=0))
    wait_until(lambda: len(status(lab)) == 2)
    os.kill(lab.queue_pid(), signal.SIGKILL)
    lab.runs.chmod(0o777)
    code, stdout, stderr = lab.run("status", "--json")
    assert code == 0
    assert {row["state"] for row in json.loads(stdout)} == {"running", "pending"}
    assert "everybody may write to the runs folder" in stderr


def test_every_help_ends_with_an_example(lab: Lab) -> None:
    for verb in ("submit", "status", "logs", "cancel", "retry"):
        code, stdout, _ = lab.run(verb, "--help")
        assert code == 0
        assert f"Example: orchestrate {verb}" in " ".join(stdout.split())
