"""Submits survive each other, a kill at any point, and runs folders that must not be used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from db.connect import open_store
from db.queries import run_records
from orchestrator.backends.base import Status
from orchestrator.backends.local.records import QueueFolder
from orchestrator.errors import InputError, OperationError
from orchestrator.submission import submitter
from orchestrator.tracking import tracker
from workloads.contract import ResourceShape, RunSpec, State
from workloads.files.run_dir import RunDir

from .conftest import Lab, seen, wait_until

SEND = """
import json, os, signal, sys
from pathlib import Path
from orchestrator.backends.local.executor import LocalExecutor
LocalExecutor.__init__.__kwdefaults__["job"] = "lab_jobs:job"
import db.submissions
from orchestrator.submission import submitter
from orchestrator.workspace import Workspace
from orchestrator.backends.local import records
from workloads.files import run_dir
from workloads.contract import ResourceShape, RunSpec

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def dying(owner, name, call, after):
    # The call number CALL of owner.name is the last thing that this process does.
    real, count = getattr(owner, name), [0]
    def wrapped(*args, **kwargs):
        count[0] += 1
        if count[0] == call and not after:
            die()
        answer = real(*args, **kwargs)
        if count[0] == call:
            die()
        return answer
    setattr(owner, name, wrapped)

{kill}
runs, database, specs = sys.argv[1:]
wanted = [(RunSpec.from_json(spec), ResourceShape()) for spec in json.loads(Path(specs).read_text())]
done = submitter.submit_runs(Workspace.at(runs=Path(runs), database=database), wanted, "local")
print(json.dumps([s.run_id for s in done.submitted]))
"""

KILL_POINTS = {
    "before the outbox": 'dying(submitter.outbox, "write", 1, False)',
    "before the intents": 'dying(db.submissions, "record_intents", 1, False)',
    "after the intents": 'dying(db.submissions, "record_intents", 1, True)',
    "before the second spec": 'dying(run_dir.RunDir, "write_spec", 2, False)',
    "after the second spec": 'dying(run_dir.RunDir, "write_spec", 2, True)',
    "after the second attempt's folder": 'dying(run_dir.AttemptDir, "create", 2, True)',
    "before the first entry": 'dying(records.QueueFolder, "put", 1, False)',
    "after the second entry": 'dying(records.QueueFolder, "put", 2, True)',
    "before the store knows": 'dying(db.submissions, "update_statuses", 1, False)',
    "after the store knows": 'dying(db.submissions, "update_statuses", 1, True)',
    "before the queue": 'dying(LocalExecutor, "ensure_running", 1, False)',
    "after the queue": 'dying(LocalExecutor, "ensure_running", 1, True)',
}


def send_in_a_child(lab: Lab, specs: list[RunSpec], kill: str = "") -> subprocess.Popen[str]:
    path = lab.root / "specs.json"
    lab.root.mkdir(exist_ok=True)
    path.write_text(json.dumps([spec.to_json() for spec in specs]))
    argv = [sys.executable, "-c", SEND.format(kill=kill), str(lab.runs), lab.workspace().database, str(path)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kill", KILL_POINTS.values(), ids=KILL_POINTS.keys())
def test_kill_9_of_submit_loses_and_duplicates_nothing(lab: Lab, kill: str) -> None:
    """Wherever it is killed, repeating it makes every run start exactly once."""
    specs = [lab.spec(cpus_per_rank=0) for _ in range(3)]
    process = send_in_a_child(lab, specs, kill)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    again = submitter.submit_runs(lab.workspace(), [(spec, ResourceShape()) for spec in specs], "local")
    with open_store(lab.workspace().database) as store:
        wait_until(lambda: _all_ended(store, lab), what="all runs end")
        records = run_records(store)
    assert {spec.run_id for spec in specs} == records.keys()
    assert {record.state for record in records.values()} == {State.SUCCEEDED}
    assert {record.attempt for record in records.values()} == {1}
    assert lab.starts() == {spec.run_id: 1 for spec in specs}
    assert len(again.submitted) + len(again.resumed) <= 3


def _all_ended(store: object, lab: Lab) -> bool:
    tracker.refresh(store, lab.runs)  # type: ignore[arg-type]
    records = run_records(store)  # type: ignore[arg-type]
    return len(records) == 3 and not any(record.state.live for record in records.values())


def test_two_submits_at_once_submit_each_run_once(lab: Lab) -> None:
    specs = [lab.spec(cpus_per_rank=0) for _ in range(6)]
    first, second = (send_in_a_child(lab, specs) for _ in range(2))
    sent = [json.loads(process.communicate(timeout=60)[0]) for process in (first, second)]
    assert sorted(sent[0] + sent[1]) == sorted(spec.run_id for spec in specs)
    wait_until(lambda: lab.starts().total() == 6)
    assert lab.starts() == {spec.run_id: 1 for spec in specs}
    assert [len(RunDir.of(lab.runs, spec.run_id).attempts()) for spec in specs] == [1] * 6


def test_an_intent_without_a_spec_is_lost_not_stuck(lab: Lab) -> None:
    """Somebody cleared the queue folder after the kill: the run can be submitted anew."""
    spec = lab.spec()
    process = send_in_a_child(lab, [spec], KILL_POINTS["after the intents"])
    process.communicate(timeout=30)
    for path in QueueFolder(lab.runs).outbox.iterdir():
        path.unlink()
    code, stdout, _ = lab.run("status", "--json")
    assert code == 0
    (row,) = json.loads(stdout)
    assert (row["state"], row["reason"]) == ("lost", "never_sent")
    assert [d.directory.number for d in lab.submit(spec)] == [2]


def test_an_outbox_of_a_dead_submit_is_cleared_in_time(lab: Lab) -> None:
    folder = QueueFolder(lab.runs)
    folder.create()
    old, new = folder.outbox / "old.json", folder.outbox / "new.json"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    process = send_in_a_child(lab, [lab.spec()], KILL_POINTS["after the intents"])
    process.communicate(timeout=30)
    lab.submit()
    assert not old.exists()
    assert new.exists()


def test_a_run_with_a_newer_attempt_than_the_plan_is_skipped(lab: Lab) -> None:
    """Another command submitted it after our plan, and it failed."""
    spec = lab.spec(exit=0, code=3)
    (run,) = lab.submit(spec)
    lab.wait_exit(run)
    done = submitter.submit_runs(lab.workspace(), [(spec, ResourceShape())], "local", newest_known={})
    assert (done.submitted, done.skipped) == ([], [spec.run_id])


def test_a_cluster_without_a_plan_gets_no_runs(lab: Lab) -> None:
    with pytest.raises(OperationError) as caught:
        submitter.submit_runs(lab.workspace(), [], "sol")
    assert "no run was submitted to cluster sol from this runs folder" in caught.value.what
    assert "orchestrate submit --cluster sol" in caught.value.hint


def test_a_world_writable_runs_folder_is_rejected(lab: Lab) -> None:
    lab.runs.mkdir(parents=True)
    lab.runs.chmod(0o777)
    with pytest.raises(InputError) as caught:
        lab.submit(lab.spec())
    assert caught.value.what == "everybody may write to the runs folder"
    assert "pickle is code" in caught.value.why
    assert caught.value.hint == f"chmod -R o-w {lab.runs}"
    lab.runs.chmod(0o755)
    assert lab.submit(lab.spec())


@pytest.mark.parametrize("folder", ["queue/pending", "queue/running", "jobs"])
def test_a_world_writable_folder_below_it_is_rejected(lab: Lab, folder: str) -> None:
    """What ``chmod -R 777`` leaves open when only the runs folder itself is closed again."""
    (lab.runs / folder).mkdir(parents=True)
    (lab.runs / folder).chmod(0o777)
    with pytest.raises(InputError, match=rf"{folder}: everybody may write to a folder of the runs folder"):
        lab.submit(lab.spec())


def test_a_pickle_in_a_world_writable_folder_is_not_loaded(lab: Lab) -> None:
    """The folder of one run, opened between submit and start."""
    (run,) = lab.submit(lab.spec(gpus=4, cpus_per_rank=0, sleep=0.5))
    (waiting,) = lab.submit(lab.spec(gpus=4, cpus_per_rank=0))
    waiting.directory.path.chmod(0o777)
    done, refused = lab.wait_exit(run, waiting)
    assert done.state is State.SUCCEEDED
    assert (refused.state, refused.reason) == (State.FAILED, "start_failed")
    assert "everybody may write to a folder of the runs folder" in refused.message


def test_nothing_we_make_is_world_writable(lab: Lab) -> None:
    """Whatever the umask: a supervisor would load a pickle that anybody could have put there."""
    before = os.umask(0)
    try:
        (run,) = lab.submit(lab.spec())
        lab.wait_exit(run)
    finally:
        os.umask(before)
    made = [path for path in lab.runs.rglob("*") if not path.is_symlink()]
    assert len(made) > 10
    assert [path for path in made if path.stat().st_mode & 0o002] == []


def test_a_path_that_submitit_would_change_is_rejected(lab: Lab) -> None:
    with pytest.raises(InputError, match="the runs folder's path contains %j"):
        submitter.prepare_runs_folder(lab.root / "50%jobs")


def without_root(action: Callable[[], object]) -> str:
    """What an action raises for a user without privileges: in a fork, as nobody may not run root's interpreter."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            action()
            said = "nothing was raised"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root to become somebody else")
@pytest.mark.parametrize(
    ("mode", "owner", "folder", "said"),
    [
        (0o755, 0, "", "InputError: RUNS: the runs folder belongs to root, not to nobody"),
        (
            0o555,
            65534,
            "",
            "OperationError: RUNS: cannot write to the runs folder\n  why: it is read-only\n  fix: chmod u+w",
        ),
        (0o755, 0, "new", "OperationError: RUNS/new: cannot create the runs folder: Permission denied"),
        (0o700, 65534, "", "nothing was raised"),
        (0o700, 65534, "new", "nothing was raised"),
    ],
)
def test_folders_met_without_privileges(mode: int, owner: int, folder: str, said: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        runs = Path(root) / "runs"
        runs.mkdir()
        os.chown(runs, owner, owner)
        runs.chmod(mode)
        answer = without_root(lambda: submitter.prepare_runs_folder(runs / folder))
        assert answer.replace(str(runs), "RUNS").startswith(said)


def test_hostile_paths(tmp_path: Path, domain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes, spaces, a dollar, a newline, letters beyond ASCII and bytes that are no text, all under LC_ALL=C."""
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("ORCHESTRATE_ODD", os.fsdecode(b"\xff\xfe"))
    root = tmp_path / 'it\'s a "test" of $HOME;\nrésumé-实验'
    root.mkdir()
    monkeypatch.chdir(root)
    lab = Lab(root / "w x", domain)
    (run,) = lab.submit(lab.spec(note="naïve ' \" $ ;\n 实验"))
    (ended,) = lab.wait_exit(run)
    assert (ended.state, ended.message) == (State.SUCCEEDED, "")
    assert os.fsencode(seen(run)["environ"]["ORCHESTRATE_ODD"]) == b"\xff\xfe"
    code, stdout, _ = lab.run("status", "--json")
    assert code == 0
    assert json.loads(stdout)[0]["label"] == run.spec.label
    code, stdout, _ = lab.run("logs", run.spec.run_id[:6])
    assert code == 0
    assert "rank 0 says hello" in stdout
    assert Status.read_exit(run.directory) == ended
