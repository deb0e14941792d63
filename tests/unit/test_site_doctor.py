"""The doctor about a cluster: each fault of a cluster file is named with its remedy, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.backends.slurm import queue_choice
from orchestrator.backends.slurm.queue_choice import StartEstimate
from orchestrator.cli.verbs.wheel import Package
from orchestrator.cluster import cluster_file
from orchestrator.doctor import machine, probing, site
from orchestrator.doctor.findings import Finding, Level
from orchestrator.environment.interpreter import BUILT_HERE, Packages
from orchestrator.workspace import Workspace
from tests.unit.test_site_facts import BIG, HOSTS, Slurm

FILE = """
[cluster.big]
hostname_pattern = 'big\\.example\\.edu$'
account = "grp_lab"
max_submit = 500
{top}
[cluster.big.gpu.a100]
type = "a100"
node_gpus = 4
cpus_per_gpu = 12
queue = [{{ partition = "public", qos = "public", max_time = "7-00:00:00" }}{queue}]
"""


@pytest.fixture(autouse=True)
def sbatch(monkeypatch: pytest.MonkeyPatch) -> dict[str, StartEstimate]:
    """What ``--test-only`` says, by arguments; a start for those that are not in it."""
    said: dict[str, StartEstimate] = {}

    def estimate(script: Path, *arguments: str) -> StartEstimate:
        assert script.read_text().startswith("#!/bin/bash\n")
        return said.get(" ".join(arguments), StartEstimate(start="2026-11-28T10:00:00"))

    monkeypatch.setattr(queue_choice, "estimate", estimate)
    return said


def findings(
    top: str = "",
    queue: str = "",
    answers: Mapping[str, str] = BIG,
    hosts: tuple[str, ...] = HOSTS,
    without: str = "",
) -> dict[str, list[tuple[str, str, str]]]:
    """By subject: (verdict, what, fix)."""
    text = FILE.format(top=top, queue=queue).replace(without, "")
    profile = cluster_file.parse_file(text, "cluster.toml")["big"]
    slurm = Slurm(dict(answers))

    def run(*argv: str) -> tuple[bool, str]:
        if argv[0] == "sacct":
            return "qos" in answers, "Connection refused"
        return slurm(*argv)

    found: dict[str, list[tuple[str, str, str]]] = {}
    every = [
        *site.profile_findings(profile),
        *site.examine(profile, None, run, user="me", hosts=hosts),
    ]
    for finding in every:
        found.setdefault(finding.subject, []).append((finding.level.value, finding.what, finding.fix))
    return found


def test_a_file_that_fits() -> None:
    """One line a subject, all of them well, and when each script would start."""
    assert findings() == {
        "profile": [("ok", "scripts for a pair of a100 are sound", "")],
        "slurm": [("ok", "Slurm 24.11.5, cluster big", "")],
        "accounting": [("ok", "sacct answers", "")],
        "account": [("ok", "grp_lab", "")],
        "limits": [("ok", "arrays up to index 50000, 500 jobs queued", "")],
        "queue": [("ok", "public/public", "")],
        "shape": [("ok", "a100:2 in public/public: would start about 2026-11-28T10:00:00", "")],
    }


@pytest.mark.parametrize(
    ("top", "queue", "subject", "finding"),
    [
        (
            "array_index_max = 90000",
            "",
            "limits",
            ("fail", "array_index_max = 90000, and this site allows 50000", "array_index_max = 50000"),
        ),
        (
            "accounting = 'squeue'",
            "",
            "accounting",
            ("note", "this site has it, and the cluster file does not use it", 'accounting = "auto"'),
        ),
        (
            "account_suffix = '-gpu'",
            "",
            "account",
            (
                "fail",
                "grp_lab-gpu is not one of your accounts: class_ml, grp_lab",
                "change account in the cluster file",
            ),
        ),
        (
            "",
            ", { partition = 'gpu' }",
            "queue",
            ("fail", "there is no partition gpu (gpu.a100)", "this cluster has: htc, general, public, arm, staff"),
        ),
        (
            "",
            ", { partition = 'htc', max_time = '8h' }",
            "queue",
            (
                "fail",
                "htc ends jobs after 0-04:00:00, and the cluster file says 0-08:00:00 (gpu.a100)",
                'max_time = "0-04:00:00"',
            ),
        ),
        (
            "",
            ", { partition = 'general', qos = 'public', max_time = '4h' }",
            "queue",
            ("fail", "partition general does not allow qos public (gpu.a100)", "it allows: private, grp_lab"),
        ),
        (
            "",
            ", { partition = 'htc', qos = 'private', max_time = '4h' }",
            "queue",
            ("fail", "partition htc does not allow qos private (gpu.a100)", "it allows: any but private"),
        ),
    ],
)
def test_what_does_not_fit(top: str, queue: str, subject: str, finding: tuple[str, str, str]) -> None:
    """Limits, accounts, partitions and pairs that this cluster does not have."""
    assert finding in findings(top, queue)[subject]


def test_what_slurm_refuses_is_shown_in_its_words(sbatch: dict[str, StartEstimate]) -> None:
    """With what to look at in the file."""
    sbatch["--partition=public --qos=public"] = StartEstimate(rejection="Invalid qos specification")
    ((verdict, what, fix),) = findings()["shape"]
    assert (verdict, what) == ("fail", "a100:2 in public/public: Invalid qos specification")
    assert "the pair of partition and qos" in fix


def test_a_site_that_does_not_tell_everything() -> None:
    """No answer is no fault of the file, unless the file rests on it."""
    bare = {name: BIG[name] for name in ("sinfo", "config")}
    found = findings(answers=bare, hosts=("login", "login.elsewhere.org"))
    assert found["host"][0][:2] == (
        "note",
        "login.elsewhere.org is not a host of big (hostname_pattern big\\.example\\.edu$)",
    )
    assert found["accounting"] == [
        (
            "note",
            "sacct does not answer now: Connection refused",
            "states come from squeue and the runs' own files meanwhile",
        )
    ]
    assert found["account"][0][:2] == ("note", "Slurm does not show your accounts")
    assert "queue" not in found
    off = {**bare, "config": "ClusterName = big\nAccountingStorageType = accounting_storage/none\n"}
    assert findings("accounting = 'sacct'", answers=off)["accounting"][0][0] == "fail"
    assert findings(answers=off)["accounting"][0][0] == "ok" and "account" not in findings(answers=off)
    assert findings(answers={})["slurm"] == [
        ("fail", "Slurm does not answer: Access denied", "run this on a login node of the cluster")
    ]


def test_a_queue_limit_that_the_file_does_not_know() -> None:
    """A note with the line to write: without it arrays are refused whole."""
    what = "you may have 500 jobs queued, and the cluster file sets no max_submit"
    assert findings(without="max_submit = 500\n")["limits"] == [("note", what, "max_submit = 500")]


# --- the rest of the doctor ---


def test_packages_that_are_missing_come_with_the_command_that_gets_them() -> None:
    """pip for what an index has, our own build for Horovod, which pip cannot install; in this order."""
    found = {f.what.partition(":")[0]: f.fix for f in machine._strategies(Packages("/e/python", {"torch": "2"}))}
    assert found["eager"] == ""
    assert found["gpipe"] == "/e/python -m pip install torchgpipe"
    assert found["horovod"] == "orchestrate wheel horovod --python /e/python --install"
    bare = {f.what.partition(":")[0]: f.fix for f in machine._strategies(Packages("/e/python", {}))}
    assert bare["horovod"] == "/e/python -m pip install torch && " + found["horovod"]
    assert {package.value for package in Package} == BUILT_HERE


def test_a_runs_folder_on_a_disk_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster only: jobs may not see it."""
    found = list(machine._runs_folder(tmp_path / "runs", shared=True))
    assert [f.level for f in found] == [Level.OK, Level.NOTE] and "may not see" in found[1].what
    assert [f.level for f in machine._runs_folder(tmp_path / "runs", shared=False)] == [Level.OK]
    monkeypatch.setattr(machine, "is_local", lambda folder: False)
    assert [f.level for f in machine._runs_folder(tmp_path / "runs", shared=True)] == [Level.OK]


def test_a_database_on_a_network_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usable with locks, not without them."""
    monkeypatch.setattr(machine, "is_local", lambda folder: False)
    found = machine._database(str(tmp_path / "results.db"))
    assert found.level is Level.OK and "network disk" in found.what
    monkeypatch.setattr(machine, "lock_problem", lambda folder: "ENOLCK No locks available")
    found = machine._database(str(tmp_path / "results.db"))
    assert found.level is Level.FAIL and "ENOLCK" in found.what and "local disk" in found.fix


# --- what probes tell ---


@pytest.mark.parametrize(
    ("started", "level", "what"),
    [
        (1010.0, Level.OK, "n7 and this machine agree, as far as a job can tell"),
        (1100.0, Level.NOTE, "the clock of n7 is at least 80 s ahead of this machine's"),
        (400.0, Level.NOTE, "the clock of n7 is at least 600 s behind this machine's"),
    ],
)
def test_clocks_that_differ(started: float, level: Level, what: str) -> None:
    """Sent at 1000, seen at 1020: a start outside of that is told by another clock."""
    (found,) = probing._clock({"time": started, "node": "n7"}, 1000.0, 1020.0)
    assert (found.level, found.what) == (level, what)
    assert not list(probing._clock(None, 1000.0, None))


def test_a_data_set_that_nodes_do_not_see() -> None:
    """The node's own words, with where it must be."""
    problem = {"where": "/data/mnist", "what": "is not there", "fix": "orchestrate data prepare mnist"}
    (found,) = probing._data("mnist", {"dataset": "mnist", "problems": [problem]})
    assert found == Finding(
        Level.FAIL,
        "data",
        "mnist, seen from a node: /data/mnist: is not there",
        "orchestrate data prepare mnist; it must be on a disk that compute nodes see",
    )
    assert [f.level for f in probing._data("mnist", {"dataset": "mnist", "problems": []})] == [Level.OK]


def test_each_hardware_and_each_data_set_gets_a_probe(tmp_path: Path) -> None:
    """Without a plan, a pair of each type that has one."""
    assert [w.hardware for w in probing.choose_probes(None, cluster_file.load("sol"))] == [
        "a100:2",
        "a30:2",
        "a100.20gb:1",
    ]


def test_the_data_folder_of_the_cluster_file_counts(tmp_path: Path) -> None:
    """Unless an option or the environment names another."""
    profile = cluster_file.load("sol")
    assert Workspace.at().with_data(profile.data).data_root == Path(profile.data) != Path()
    assert Workspace.at(data_root=tmp_path).with_data(profile.data).data_root == tmp_path
    assert Workspace.at().with_data("").data_root is None


def test_data_that_only_nodes_see_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """plan says the same of them; what a node sees, a probe tells."""
    from orchestrator.cli import run

    (tmp_path / "cluster.toml").write_text(FILE.format(top=f'data = "{tmp_path}/far"', queue=""))
    (tmp_path / "experiment.toml").write_text(
        '[defaults]\ndataset = "imagefolder/x"\nmodel = "cnn"\nstrategy = "eager"\n[matrix]\nhardware = ["a100:1"]\n'
    )
    monkeypatch.chdir(tmp_path)
    run(["doctor", "--cluster", "cluster.toml", "--json"])
    found = [finding for finding in json.loads(capsys.readouterr().out) if finding["subject"] == "data"]
    assert [(f["verdict"], f["what"]) for f in found] == [
        ("note", f"imagefolder/x: {tmp_path}/far is not visible here, so it was not checked")
    ]
