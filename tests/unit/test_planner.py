"""The plan: states against the store with reasons, GPU-hours, checks, and the plan file."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from db.queries import Duration, RunRecord
from orchestrator.backends.local.machine import Gpu, Machine
from orchestrator.cli.verbs import plan as plan_verb
from orchestrator.cluster import cluster_file
from orchestrator.config import experiment
from orchestrator.environment.interpreter import Packages
from orchestrator.errors import InputError
from orchestrator.planning import plan_file, planner
from orchestrator.planning.plan import CellState, Plan
from orchestrator.workspace import Workspace
from workloads import registry
from workloads.contract import Hardware, State
from workloads.provenance.software import code_digest

ROOT = Path(__file__).parents[2]
EIGHTEEN = """
name = "eighteen"
[defaults]
dataset = "synthetic"
[matrix]
model = ["resnet18", "resnet50", "vit_tiny"]
strategy = ["eager", "ddp"]
hardware = ["a100:1", "a100:2", "a30:2"]
"""
TWO = """
[defaults]
dataset = "digits"
model = "cnn"
strategy = "ddp"
hardware = "cpu:2"
epochs = 4
[matrix]
seed = [0, 1]
"""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)
"""One black pixel."""
EVERYTHING = {
    "torch": "2.6.0",
    "torchvision": "0.21.0",
    "timm": "1.0.0",
    "scikit-learn": "1.5.0",
    "numpy": "2.0.0",
    "pillow": "11.0.0",
}


def _machine(gpus: int = 0, cores: int = 2) -> Machine:
    devices = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H100 80GB HBM3", 80 << 30) for i in range(gpus))
    return Machine(gpus=devices, cores=tuple(range(cores)), hostname="here")


def _plan(
    folder: Path,
    text: str,
    *,
    profile: cluster_file.ClusterProfile | None = None,
    machine: Machine | None = None,
    records: dict[str, RunRecord] | None = None,
    durations: list[Duration] | None = None,
    packages: dict[str, str] | None = EVERYTHING,
    data_root: Path | None = None,
) -> Plan:
    workspace = Workspace.at(runs=folder / "runs", database=str(folder / "results.db"), data_root=data_root)
    return planner.make_plan(
        workspace,
        experiment.parse(text, "experiment.toml"),
        profile,
        machine or _machine(),
        records or {},
        durations or [],
        Packages("python3", packages),
    )


def _record(plan: Plan, index: int, **changes: Any) -> dict[str, RunRecord]:
    run = plan.runs[index]
    record = RunRecord(
        run_id=run.cell.run_id,
        label=run.cell.label,
        experiment="e",
        state=State.SUCCEEDED,
        attempt=1,
        reason="",
        message="",
        job_id="1",
        target="local",
        code_digest=code_digest(),
        packages_digest=Packages("python3", EVERYTHING).digest,
        dataset_digest=plan.dataset_digests[run.cell.train.dataset],
        total_time_s=40.0,
        gpus=0,
    )
    return {record.run_id: dataclasses.replace(record, **changes)}


@pytest.fixture
def sol() -> cluster_file.ClusterProfile:
    return cluster_file.load(ROOT / "cluster.example.toml")


def test_eighteen_cells_on_sol(tmp_path: Path, sol: cluster_file.ClusterProfile) -> None:
    """One-GPU ddp is valid; eager on pairs is excluded with its reason; three arrays, one for each shape."""
    plan = _plan(tmp_path, EIGHTEEN, profile=sol)
    assert len(plan.runs) == 12
    assert len(plan.excluded) == 6
    assert {e.fields["strategy"] for e in plan.excluded} == {"eager"}
    assert {e.fields["hardware"] for e in plan.excluded} == {"a100:2", "a30:2"}
    assert all("eager trains on one device" in e.why for e in plan.excluded)
    arrays = plan.to_json()["scripts"]
    assert sorted(a["runs"] for a in arrays) == [3, 3, 6]
    assert all(a["text"].startswith("#!/bin/bash\n") for a in arrays)
    assert plan.gpu_hours.high == 6 * 1 + 3 * 2 + 3 * 2
    assert plan.gpu_hours.expected is None and "no measured history" in plan.gpu_hours.basis


def test_the_json_holds_every_training_field_of_every_run(tmp_path: Path, sol: cluster_file.ClusterProfile) -> None:
    data = json.loads(json.dumps(_plan(tmp_path, EIGHTEEN, profile=sol).to_json()))
    run = data["runs"][0]
    assert {"run_id", "label", "state", "model", "lr", "epochs", "cpus", "seed", "precision", "loader"} <= set(run)
    assert {"cell", "rule", "why"} == set(data["excluded"][0])
    assert {"low", "expected", "high", "basis"} == set(data["gpu_hours"])


@pytest.mark.parametrize(
    ("changes", "action", "why"),
    [
        ({}, CellState.DONE, "attempt 1"),
        ({"state": State.RUNNING}, CellState.RUNNING, "attempt 1 is running"),
        ({"state": State.PENDING}, CellState.RUNNING, "attempt 1 is pending"),
        ({"state": State.SUBMITTING}, CellState.RUNNING, "attempt 1 is submitting"),
        ({"state": State.PLANNED, "attempt": 0}, CellState.NEW, ""),
        ({"state": State.TIMEOUT, "attempt": 2}, CellState.FAILED, "attempt 2 ended as timeout"),
        ({"state": State.FAILED, "reason": "hang"}, CellState.FAILED, "attempt 1 ended as failed: hang"),
        ({"code_digest": "other"}, CellState.STALE, "code changed since attempt 1"),
        ({"packages_digest": "other"}, CellState.STALE, "packages changed since attempt 1"),
        ({"dataset_digest": "other"}, CellState.STALE, "data set changed since attempt 1"),
        ({"code_digest": "other", "dataset_digest": "x"}, CellState.STALE, "code and data set changed since attempt 1"),
        ({"code_digest": None}, CellState.DONE, "attempt 1"),
        ({"target": "sol"}, CellState.DONE, "attempt 1 on sol"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_cell_states_follow_from_the_store(
    tmp_path: Path, changes: dict[str, Any], action: CellState, why: str
) -> None:
    """Each state of the store, and each changed source, gives a cell state and its reason."""
    first = _plan(tmp_path, TWO)
    plan = _plan(tmp_path, TWO, records=_record(first, 0, **changes))
    assert (plan.runs[0].state, plan.runs[0].why) == (action, why)
    assert plan.runs[1].state is CellState.NEW
    sent = {run.cell.run_id for run in plan.to_submit()}
    assert (plan.runs[0].cell.run_id in sent) == (action in {CellState.NEW, CellState.FAILED})
    assert len(plan.to_submit(stale=True)) == len(sent) + (action is CellState.STALE)


def test_runs_done_on_another_machine_are_named(tmp_path: Path) -> None:
    """A run is the same run on any machine that has its kind of hardware."""
    records = _record(_plan(tmp_path, TWO), 0, target="sol")
    (check,) = [check for check in _plan(tmp_path, TWO, records=records).checks if "done on" in check.what]
    assert check.what == "1 run done on sol and not measured again on local"
    assert "name the kind in hardware" in check.fix and not check.blocking
    unknown = _record(_plan(tmp_path, TWO), 0, target="")
    assert not [check for check in _plan(tmp_path, TWO, records=unknown).checks if "done on" in check.what]


def test_an_unprepared_data_set_may_have_changed(tmp_path: Path) -> None:
    (record,) = _record(_plan(tmp_path, TWO), 0).values()
    assert record.dataset_digest
    action, why = planner._cell_state(record, "local", code_digest(), Packages("python3", EVERYTHING).digest, "")
    assert action is CellState.DONE and "whether it changed since is unknown" in why


def test_history_gives_an_expectation_and_its_basis(tmp_path: Path) -> None:
    """Two measured seconds an epoch on one GPU: four epochs of two runs on two GPUs are 8 s x 2 x 2."""
    text = TWO.replace("cpu:2", "gpu:2")
    durations = [Duration("cnn", "digits", "ddp", Hardware("gpu", 2), 10, None, t) for t in (10.0, 30.0)]
    plan = _plan(tmp_path, text, machine=_machine(gpus=2), durations=durations)
    hours = plan.gpu_hours
    assert hours.expected == pytest.approx(2 * 2 * (4 * 2.0) / 3600)
    assert hours.low == pytest.approx(2 * 2 * (4 * 1.0) / 3600)
    assert hours.high == pytest.approx(2 * 2 * 1.0)
    assert hours.basis == "measured history for 2 of 2 runs"


def test_pending_runs_are_under_way_and_cpus_have_no_gpu_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In tables; JSON has ``running``."""
    plan = _plan(tmp_path, TWO)
    plan = _plan(tmp_path, TWO, records=_record(plan, 0, state="pending"))
    assert plan_verb.summarize(plan) == "2 cells for local: 1 under way, 1 new; 1 to submit"
    plan_verb._print_plan(plan, every=True)
    assert "under way" in capsys.readouterr().out
    assert plan.to_json()["runs"][0]["state"] == "running"
    sol = cluster_file.load("sol")
    plan = _plan(tmp_path, TWO.replace("cpu:2", "a100:2") + "time_limit = '50m'\n", profile=sol)
    assert plan_verb.summarize(plan).startswith(
        "2 cells for sol: 2 new; 2 to submit, at most 3.3 GPU-hours (no measured"
    )
    plan_verb._print_plan(plan, every=True)
    assert " 3.33 " in capsys.readouterr().out


def test_a_missing_package_excludes_a_cell(tmp_path: Path) -> None:
    packages = {k: v for k, v in EVERYTHING.items() if k != "torch"}
    plan = _plan(tmp_path, TWO, packages=packages)
    assert plan.runs == []
    assert {(e.rule, e.why) for e in plan.excluded} == {
        ("packages", "not available: python3 has no torch; fix: python3 -m pip install torch")
    }
    assert any("every cell is excluded" in check.what for check in plan.checks)
    horovod = TWO.replace('"ddp"', '"horovod"').replace('"eager"', '"horovod"')
    packages = {k: v for k, v in EVERYTHING.items() if k != "horovod"}
    (excluded, *_) = _plan(tmp_path, horovod, packages=packages, machine=_machine(gpus=2)).excluded
    assert excluded.why.endswith("; fix: orchestrate wheel horovod --python python3 --install")


def test_an_interpreter_that_cannot_run_is_reported_and_excludes_nothing(tmp_path: Path) -> None:
    plan = _plan(tmp_path, TWO, packages=None)
    assert len(plan.runs) == 2
    assert any("unknown" in check.what and not check.blocking for check in plan.checks)


def test_packages_of_another_interpreter_come_from_its_metadata(tmp_path: Path) -> None:
    """Read by a process of it; an interpreter that is not there is unknown, with the reason."""
    link = tmp_path / "python"
    link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    link.chmod(0o755)
    assert "pytest" in (Packages.of(str(link)).versions or {})
    absent = Packages.of(str(tmp_path / "absent"))
    assert absent.versions is None and "FileNotFoundError" in absent.problem and absent.missing(["torch"]) == []


def test_a_missing_data_set_blocks_and_names_the_remedy(tmp_path: Path) -> None:
    plan = _plan(tmp_path, TWO.replace("digits", "mnist"), data_root=tmp_path)
    blocking = [check for check in plan.checks if check.blocking]
    assert blocking and "mnist" in blocking[0].what and "data prepare mnist" in blocking[0].fix


def test_an_unprepared_data_set_is_noted(tmp_path: Path) -> None:
    """A run that decodes a whole folder holds its devices meanwhile, and looks as if it hung."""
    for split in ("train", "test"):
        (tmp_path / "shapes" / split / "square").mkdir(parents=True)
        (tmp_path / "shapes" / split / "square" / "1.png").write_bytes(PNG)
    plan = _plan(tmp_path, TWO.replace('"digits"', '"imagefolder/shapes"'), data_root=tmp_path)
    assert plan.runs, plan.excluded
    assert [(c.blocking, c.fix) for c in plan.checks if "shapes" in c.what] == [
        (False, "orchestrate data prepare imagefolder/shapes")
    ]


def test_data_that_only_the_cluster_mounts_is_not_checked_here(
    tmp_path: Path, sol: cluster_file.ClusterProfile
) -> None:
    text = EIGHTEEN.replace("synthetic", "mnist")
    plan = _plan(tmp_path, text, profile=sol, data_root=tmp_path / "elsewhere")
    assert not any(check.blocking for check in plan.checks)
    assert any("not visible here" in check.what for check in plan.checks)


def test_a_site_that_requires_an_account_blocks_without_one(tmp_path: Path) -> None:
    """Before anything is submitted, with the fix."""
    profile = cluster_file.load("perlmutter")
    plan = _plan(tmp_path, EIGHTEEN, profile=profile)
    assert [(c.what, c.fix) for c in plan.checks if c.blocking] == [
        (
            "cluster perlmutter rejects jobs without an account",
            "orchestrate init --cluster --profile perlmutter writes cluster.toml; set account there",
        )
    ]
    plan = _plan(tmp_path, EIGHTEEN, profile=profile.model_copy(update={"account": "m1234"}))
    assert not any(c.blocking for c in plan.checks)


def test_more_gpus_than_any_node_has_are_excluded(tmp_path: Path, sol: cluster_file.ClusterProfile) -> None:
    plan = _plan(tmp_path, EIGHTEEN.replace('"a30:2"', '"a30:8"'), profile=sol)
    reasons = {e.why for e in plan.excluded if e.fields["hardware"] == "a30:8" and e.rule == "hardware"}
    assert len(reasons) == 1
    assert "3" in reasons.pop()


def test_an_experiment_without_any_run_is_noted(tmp_path: Path) -> None:
    plan = _plan(tmp_path, TWO + '[[exclude]]\nmatch = { model = "cnn" }\nwhy = "later"\n')
    assert (plan.runs, {(e.rule, e.why) for e in plan.excluded}) == ([], {("exclude[0]", "later")})
    (check,) = plan.checks
    assert check.what == "every cell is excluded, nothing can run"


def test_plan_file_round_trip(tmp_path: Path, sol: cluster_file.ClusterProfile) -> None:
    """What ``submit`` reads is what ``plan`` made: same runs, specs, scripts and exclusions."""
    plan = _plan(tmp_path, EIGHTEEN, profile=sol)
    plan_file.save(plan, tmp_path / "plan.json")
    back = plan_file.read(tmp_path / "plan.json")
    assert back.to_json() == plan.to_json()
    assert [back.spec(run) for run in back.runs] == [plan.spec(run) for run in plan.runs]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"plan_version": 99}', '{"plan_version": 1}'])
def test_a_foreign_plan_file_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"plan\.json"):
        plan_file.read(path)


def _current(folder: Path, **changes: Any) -> Plan:
    workspace = Workspace.at(
        runs=folder / "runs", database=str(folder / "results.db"), experiment=folder / "experiment.toml"
    )
    return planner.current_plan(workspace, **({"local": True, "cluster": None} | changes))


def test_a_plan_is_current_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read again, and made anew after a change of the experiment, ``--set`` or the target."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(TWO)
    first = _current(tmp_path)
    marked = dataclasses.replace(first, created_at="the first")
    plan_file.save(marked, tmp_path / "plan.json")
    assert _current(tmp_path).created_at == "the first"
    assert _current(tmp_path, sets=["epochs=2"]).created_at != "the first"
    assert _current(tmp_path).digests == first.digests
    plan_file.save(marked, tmp_path / "plan.json")
    (tmp_path / "experiment.toml").write_text(TWO + "# a comment\n")
    assert _current(tmp_path).created_at != "the first"
    plan_file.save(marked, tmp_path / "plan.json")
    assert _current(tmp_path, local=False, cluster=ROOT / "cluster.example.toml").target == "sol"


@pytest.mark.parametrize("edit", [lambda plan: plan["runs"][0][6].update(lr=0.9), lambda plan: plan["runs"][0].pop()])
def test_an_edited_plan_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, edit: Callable[[Any], object]
) -> None:
    """Its runs would not be what their run ids say; a new plan is made, with a warning."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(TWO)
    first = _current(tmp_path)
    edited = json.loads((tmp_path / "plan.json").read_text())
    edit(edited)
    (tmp_path / "plan.json").write_text(json.dumps(edited, separators=(",", ":")))
    assert _current(tmp_path).runs == first.runs
    assert "damaged or edited" in caplog.text and "planning anew" in caplog.text


def test_a_folder_in_the_place_of_the_plan_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(TWO)
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(InputError, match="cannot write the plan file: Is a directory"):
        _current(tmp_path)


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also any letter beyond ASCII where the locale is C and UTF-8 mode is off."""
    folder = tmp_path / os.fsdecode(b"caf\xe9 \n'$x")
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "experiment.toml").write_text(TWO)
    made = _current(folder)
    assert plan_file.read(folder / "plan.json").runs_folder == made.runs_folder == folder / "runs"


def test_a_comment_or_another_order_plans_nothing_new(tmp_path: Path) -> None:
    first = _plan(tmp_path, TWO)
    second = _plan(tmp_path, TWO.replace("[0, 1]", "[1, 0]") + "# a comment\n")
    assert {run.cell.run_id for run in first.runs} == {run.cell.run_id for run in second.runs}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not write")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As an unprivileged user in a read-only folder: one message with a way out, no traceback."""
    (tmp_path / "experiment.toml").write_text(TWO)
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    # Planned once as root, so that all is imported: the interpreter's own folder may be root's alone.
    code = (
        "import os, sys; from orchestrator.cli import run; assert run(['plan', '--local']) == 0;"
        "os.setgid(65534); os.setuid(65534); sys.exit(run(['plan', '--local']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot write the plan file: Permission denied" in done.stderr
    assert "--runs" in done.stderr


def test_blocking_checks_are_repeated_when_no_source_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set may appear without any digest changing, so such a plan is never read from the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(TWO.replace("digits", "mnist"))
    assert any(check.blocking for check in _current(tmp_path).checks)
    mnist = registry.datasets()["mnist"]
    monkeypatch.setitem(registry.datasets(), "mnist", dataclasses.replace(mnist, check=lambda *_: []))
    assert not any(check.blocking for check in _current(tmp_path).checks)


def test_a_login_node_needs_a_cluster_or_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on a login node is forbidden at most sites, so it never happens by accident."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(TWO)
    with pytest.raises(InputError) as caught:
        _current(tmp_path, local=False)
    assert "--cluster" in caught.value.text() and "--local" in caught.value.text()


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"tensorflow": "2.21", "numpy": "2"}, []),
        ({"tensorflow-cpu": "2.21", "numpy": "2"}, []),
        ({"torch": "2.6", "numpy": "2"}, ["tensorflow"]),
        (None, []),
    ],
)
def test_either_of_two_packages_will_do(installed: dict[str, str] | None, missing: list[str]) -> None:
    """``one|other`` names distributions that do the same; what is reported as missing can be given to pip."""
    packages = Packages("python3", installed)
    assert packages.missing(["numpy", *registry.strategies()["tf_eager"].packages]) == missing
