"""What ``clean`` takes away by which rule, and what it never touches."""

from __future__ import annotations

import json
import os
import pty
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.connect import Store, open_store
from db.queries import run_records
from db.submissions import record_intents
from orchestrator import cli
from orchestrator.backends import leases
from orchestrator.backends.base import Status
from orchestrator.environment import snapshot
from orchestrator.tracking import clean
from orchestrator.tracking.clean import CleanPolicy, CleanReport, Item, ItemKind, KeepCheckpoints
from workloads.contract import ResourceShape, State
from workloads.files.json_file import write_json
from workloads.files.packed_specs import pack_specs
from workloads.files.run_dir import AttemptDir, RunDir, jobs_folder

from .conftest import Campaign

DAY_S = 86400.0
KEPT = ("spec.json", "submission.json", "result.json", "exit.json", "events.jsonl", "owner.json", "supervisor.json")


@pytest.fixture(autouse=True)
def leases_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leases.DOMAIN_VARIABLE, str(tmp_path))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "results.db")) as opened:
        yield opened


def trained(campaign: Campaign, accuracy: float | None = 0.9, *, state: State = State.SUCCEEDED, **spec: Any) -> RunDir:
    """A run that left every kind of file, two days ago."""
    attempt = campaign.submit(campaign.run(**spec), job_id="12_0")
    run = RunDir(attempt.path.parent.parent)
    campaign.train(attempt)
    if state is State.SUCCEEDED:
        campaign.finish(attempt, test_accuracy=accuracy)
    else:
        Status(state, "because", "of this").write_exit(attempt)
    run.checkpoint.parent.mkdir()
    run.checkpoint.write_bytes(b"c" * 1000)
    (run.checkpoint.parent / "last.pt.damaged").write_bytes(b"d" * 10)
    (run.path / ".spec.json.abcdefgh").write_bytes(b"t")
    attempt.owner.write_text("{}")
    attempt.supervisor.write_text("{}")
    (attempt.job_folder / "12_0_log.out").write_bytes(b"l" * 100)
    (attempt.job_folder / "12_submitted.pkl").write_bytes(b"p")
    attempt.hang(0).write_text("stack")
    array = jobs_folder(campaign.runs) / "12"
    array.mkdir(parents=True, exist_ok=True)
    (array / "12_0_0_log.err").write_bytes(b"e" * 7)
    (array / "12_1_0_log.err").write_bytes(b"of another task")
    (jobs_folder(campaign.runs) / "slurm-12_0.out").write_bytes(b"s")
    long_ago = time.time() - 2 * DAY_S
    for path in [*run.path.rglob("*"), *array.iterdir()]:
        os.utime(path, (long_ago, long_ago))
    return run


def find(store: Store, campaign: Campaign, **policy: Any) -> CleanReport:
    from db.ingest import collect

    assert not collect(store, campaign.runs).problems
    needed = clean.needed_snapshots(store, campaign.runs)
    return clean.find(campaign.runs, run_records(store), needed, CleanPolicy(**policy))


def names(found: CleanReport, *kinds: ItemKind) -> list[str]:
    return sorted(item.path.name for item in found.items if not kinds or item.kind in kinds)


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_the_default_policy_deletes_only_leftovers(store: Store, campaign: Campaign) -> None:
    """Unfinished files and damaged checkpoints; a young temporary file belongs to a living process."""
    run = trained(campaign)
    (run.path / ".spec.json.12345678").write_bytes(b"young")
    assert names(find(store, campaign)) == [".spec.json.abcdefgh", "last.pt.damaged"]


def test_which_checkpoints_of_succeeded_runs_stay(store: Store, campaign: Campaign) -> None:
    """None, or that of the best of the runs that differ only in seed and repeat; not compared with other cells and
    runs in other states."""
    trained(campaign, 0.8, seed=0)
    best = trained(campaign, 0.9, seed=1)
    trained(campaign, None, seed=2)
    other = trained(campaign, 0.1, seed=0, model="vit_tiny")
    failed = trained(campaign, seed=3, state=State.FAILED)
    assert names(find(store, campaign), ItemKind.CHECKPOINT) == []
    found = find(store, campaign, checkpoints=KeepCheckpoints.NONE)
    assert names(found, ItemKind.CHECKPOINT) == ["checkpoint"] * 4
    assert {i.size_bytes for i in found.items if i.kind is ItemKind.CHECKPOINT} == {1010}
    found = find(store, campaign, checkpoints=KeepCheckpoints.BEST)
    gone = {item.run_id for item in found.items if item.kind is ItemKind.CHECKPOINT}
    assert len(gone) == 2 and not gone & {best.run_id, other.run_id, failed.run_id}
    found = find(store, campaign, checkpoints=KeepCheckpoints.NONE, states=frozenset({State.FAILED}))
    assert [item.run_id for item in found.items if item.kind is ItemKind.CHECKPOINT] == [failed.run_id]


def test_age_counts_from_the_end_of_the_newest_attempt(store: Store, campaign: Campaign) -> None:
    """Two days ago."""
    trained(campaign)
    assert names(find(store, campaign, checkpoints=KeepCheckpoints.NONE, older_than_s=1.9 * DAY_S), ItemKind.CHECKPOINT)
    assert not names(find(store, campaign, checkpoints=KeepCheckpoints.NONE, older_than_s=2.1 * DAY_S))


def test_results_are_never_removed(store: Store, campaign: Campaign) -> None:
    """With the widest policy the files that record a run stay, and the store can be rebuilt from them."""
    run = trained(campaign)
    before = {path for path in tree(campaign.runs) if path.name in KEPT}
    found = find(store, campaign, checkpoints=KeepCheckpoints.NONE, logs=True)
    done = clean.remove(store, campaign.runs, found.items)
    assert done.kept == [] and len(done.items) == len(found.items) == 7
    after = {path for path in tree(campaign.runs) if path.is_file()}
    others = {jobs_folder(campaign.runs) / "12" / "12_1_0_log.err"}
    assert after == before | others and not run.checkpoint.parent.exists()
    assert run.attempt(1).read_result().test_accuracy == 0.9
    assert find(store, campaign, checkpoints=KeepCheckpoints.NONE, logs=True).items == []


def test_a_live_run_keeps_everything(store: Store, campaign: Campaign) -> None:
    """One that runs; one that was given up but still writes; one that is live according to the store only."""
    going_on = trained(campaign, seed=0)
    campaign.submit(going_on, 2, job_id="13_0")
    lost = trained(campaign, seed=1, state=State.LOST)
    write_json(lost.attempt(1).progress(0), {})
    policy = {
        "checkpoints": KeepCheckpoints.NONE,
        "logs": True,
        "states": frozenset({State.SUCCEEDED, State.LOST, State.FAILED}),
    }
    found = find(store, campaign, **policy)
    assert found.items == [] and found.num_live == 1
    assert found.kept == [(lost.path, "it was given up but still writes")]


def test_a_run_that_ended_seconds_ago_keeps_everything(store: Store, campaign: Campaign) -> None:
    """Its other ranks may still print; with an exit.json, or some seconds later, they do not."""
    run = trained(campaign)
    os.utime(run.attempt(1).result)
    found = find(store, campaign, checkpoints=KeepCheckpoints.NONE, logs=True)
    assert found.items == [] and found.kept == [(run.path, "it ended only seconds ago")]
    Status(State.SUCCEEDED, "", "").write_exit(run.attempt(1))
    assert find(store, campaign, checkpoints=KeepCheckpoints.NONE, logs=True).items


def test_a_run_that_is_submitted_again_meanwhile_keeps_everything(store: Store, campaign: Campaign) -> None:
    """Between find and remove somebody submits it: it may continue from its checkpoint."""
    run, other = trained(campaign, seed=0), trained(campaign, seed=1)
    found = find(store, campaign, checkpoints=KeepCheckpoints.NONE)
    assert len(record_intents(store, campaign.runs, [(run.read_spec(), ResourceShape())], "local")) == 1
    done = clean.remove(store, campaign.runs, found.items)
    assert run.checkpoint.exists() and not other.checkpoint.exists()
    assert {why for _, why in done.kept} == {"the run was submitted again meanwhile"}


def test_links_are_not_followed(store: Store, campaign: Campaign, tmp_path: Path) -> None:
    """A checkpoint folder, a run and a file that are links: their targets stay, and the links are reported."""
    elsewhere = tmp_path / "elsewhere"
    linked = trained(campaign, seed=0)
    linked.checkpoint.parent.rename(elsewhere)
    linked.checkpoint.parent.symlink_to(elsewhere)
    moved = trained(campaign, seed=1)
    moved.path.rename(tmp_path / moved.run_id)
    moved.path.symlink_to(tmp_path / moved.run_id)
    inside = trained(campaign, seed=2)
    (inside.checkpoint.parent / "best.pt").symlink_to(elsewhere / "last.pt")
    before = tree(elsewhere) | tree(tmp_path / moved.run_id)
    found = find(store, campaign, checkpoints=KeepCheckpoints.NONE)
    clean.remove(store, campaign.runs, found.items)
    assert tree(elsewhere) | tree(tmp_path / moved.run_id) == before
    assert {path for path, _ in found.kept} == {linked.checkpoint.parent, moved.path}
    assert not inside.checkpoint.parent.exists()


def test_an_interrupted_clean_is_finished_by_the_next(
    store: Store, campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the renames and before the deletion."""
    trained(campaign)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(clean.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            clean.remove(store, campaign.runs, find(store, campaign, checkpoints=KeepCheckpoints.NONE).items)
    found = find(store, campaign)
    assert [(item.kind, item.size_bytes > 1000) for item in found.items] == [(ItemKind.LEFTOVER, True)]
    clean.remove(store, campaign.runs, found.items)
    assert not (campaign.runs / clean.TRASH).exists()


def test_what_cannot_be_removed_is_reported(store: Store, campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is deleted."""
    stuck, other = trained(campaign, seed=0), trained(campaign, seed=1)
    real = Path.rename

    def rename(path: Path, target: Any) -> Path:
        if path == stuck.checkpoint.parent:
            raise PermissionError(13, "Permission denied")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    done = clean.remove(store, campaign.runs, find(store, campaign, checkpoints=KeepCheckpoints.NONE).items)
    assert done.kept == [(stuck.checkpoint.parent, "Permission denied")] and not other.checkpoint.parent.exists()


def old_snapshot(campaign: Campaign) -> tuple[str, Path]:
    name = snapshot.take(campaign.runs, {})
    for path in (campaign.runs / "snapshots").iterdir():
        os.utime(path, (time.time() - DAY_S,) * 2)
    return name, campaign.runs / "snapshots"


def test_snapshots_go_when_no_run_needs_them(store: Store, campaign: Campaign) -> None:
    """A waiting run keeps its code, and so does one whose submit was interrupted before it wrote the spec."""
    name, folder = old_snapshot(campaign)
    spec = campaign.spec(seed=5)
    run = RunDir.of(campaign.runs, spec.run_id)
    run.path.mkdir(parents=True)
    write_json(run.spec, spec.to_json() | {"snapshot": name})
    attempt = campaign.submit(run)
    assert names(find(store, campaign)) == []
    campaign.finish(attempt)
    assert len(names(find(store, campaign), ItemKind.SNAPSHOT)) == 2
    outbox = campaign.runs / "queue" / "outbox"
    outbox.mkdir(parents=True)
    (outbox / "1.json").write_bytes(pack_specs([replace(spec, snapshot=name)]))
    assert names(find(store, campaign)) == []
    (outbox / "1.json").unlink()
    found = find(store, campaign)
    assert snapshot.renew(campaign.runs, name)  # a submit takes it again
    done = clean.remove(store, campaign.runs, found.items)
    assert {why for _, why in done.kept} == {"a submit uses it again"} and len(list(folder.iterdir())) == 2
    old_snapshot(campaign)
    clean.remove(store, campaign.runs, find(store, campaign).items)
    assert list(folder.iterdir()) == []


@pytest.fixture
def typed(campaign: Campaign, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Callable[..., tuple[int, str, str]]:
    """``orchestrate clean ...`` in the campaign's folder."""
    monkeypatch.chdir(campaign.runs.parent)

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.run(["clean", *argv])
        return (code, *capfd.readouterr())

    return run


Typed = Callable[..., tuple[int, str, str]]


def test_a_dry_run_shows_sizes_and_removes_nothing(campaign: Campaign, typed: Typed) -> None:
    """The table by kind; the same as JSON with every path."""
    run = trained(campaign)
    before = tree(campaign.runs)
    code, stdout, stderr = typed("--keep", "none", "--logs", "--dry-run")
    assert code == 0, stderr
    assert "checkpoint" in stdout and " size \n" in stdout and "leftover" in stdout and "log" in stdout
    code, stdout, _ = typed("--keep", "none", "--dry-run", "--json")
    told = json.loads(stdout)
    assert code == 0 and not told["removed"] and told["bytes"] == 1011
    assert {"kind": "checkpoint", "run_id": run.run_id, "path": str(run.checkpoint.parent), "size_bytes": 1010} in told[
        "items"
    ]
    assert {path for path in tree(campaign.runs) if "queue" not in path.parts} == before


def test_yes_removes_and_reports_the_size(campaign: Campaign, typed: Typed) -> None:
    """Then nothing is left to remove."""
    run = trained(campaign)
    code, stdout, _ = typed("--keep", "none", "--yes")
    assert "1,010 bytes" in stdout and " 1 byte " in stdout, "the table has the unit of the sum below it"
    assert code == 0 and stdout.endswith("1,011 bytes removed\n") and not run.checkpoint.exists()
    assert typed("--keep", "none", "--yes")[:2] == (0, "nothing to remove by these rules\n")
    code, stdout, _ = typed("--logs", "--yes", "--json")
    told = json.loads(stdout)
    assert code == 0 and told["removed"] and {item["kind"] for item in told["items"]} == {"log"}


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("y\n", False)])
def test_it_asks_at_a_terminal(
    campaign: Campaign, typed: Typed, monkeypatch: pytest.MonkeyPatch, answer: str, stays: bool
) -> None:
    """No is no."""
    run = trained(campaign)
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    with open(theirs, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        code, stdout, stderr = typed("--keep", "none")
    os.close(ours)
    assert code == 0 and "Remove 1,011 bytes? This cannot be undone." in stderr
    assert ("nothing was removed" in stdout) is stays
    assert run.checkpoint.exists() is stays


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--keep", "none"],
            "standard input is no terminal, so nobody can confirm\n  fix: add --yes to remove, or --dry-run to list",
        ),
        (["--json"], "--json cannot ask before it removes\n  fix: add --dry-run to list only, or --yes to remove"),
        (
            ["--state", "running"],
            "runs that are running need all their files\n  fix: orchestrate cancel ends",
        ),
        (["--state", "planned"], "have no files yet\n  fix: orchestrate submit submits them, orchestrate db rebuild"),
        (["--older-than", "7"], '--older-than: "7" has no unit'),
        (["--older-than", "0d"], '--older-than: "0d" is zero'),
    ],
)
def test_bad_input_removes_nothing(campaign: Campaign, typed: Typed, argv: list[str], message: str) -> None:
    """Each error says what to type instead; exit code 2."""
    run = trained(campaign)
    code, _, stderr = typed(*argv)
    assert code == 2 and message in stderr
    assert run.checkpoint.exists()


def test_kept_items_are_reported(campaign: Campaign, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3 if an item could not be removed; a workspace without runs is no error."""
    assert typed()[:2] == (0, "nothing to remove by these rules\n")
    run = trained(campaign)
    monkeypatch.setattr(
        clean,
        "remove",
        lambda *_: CleanReport(items=[Item(ItemKind.LOG, "", run.path, 3)], kept=[(run.path, "stuck")]),
    )
    code, stdout, stderr = typed("--yes")
    assert code == 3 and stdout.endswith("3 bytes removed\n")
    assert "1 item could not be removed" in stderr and f"{run.path}: stuck" in stderr


def test_an_attempt_without_exit_and_result_keeps_everything(store: Store, campaign: Campaign) -> None:
    """Its files were lost, and the store says that it succeeded."""
    run = trained(campaign)
    find(store, campaign)
    AttemptDir(run.path / "attempts" / "1").result.unlink()
    found = clean.find(campaign.runs, run_records(store), set(), CleanPolicy(checkpoints=KeepCheckpoints.NONE))
    assert found.items == [] and found.kept == [(run.path, "its newest attempt has no result.json or exit.json")]
