"""Snapshots of code: copies, links, omissions, errors, and the job's check."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.environment import snapshot
from orchestrator.environment.snapshot import Experiment
from orchestrator.errors import InputError, OperationError
from orchestrator.submission import submitter
from workloads import registry
from workloads.contract import Hardware, TrainConfig
from workloads.errors import CodeChangedError
from workloads.provenance import code_snapshot, software
from workloads.provenance.code_snapshot import Manifest


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a plug-in package in a source tree, the only one there is."""
    package = tmp_path / "tree" / "frosty_ways"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("A = 1\n")
    point = importlib.metadata.EntryPoint("frosty", "frosty_ways:D", "orchestrate.strategies")
    monkeypatch.setattr(registry, "entry_points", lambda: (point,))
    monkeypatch.syspath_prepend(tmp_path / "tree")
    return package


def take(tmp_path: Path, **versions: str) -> Manifest:
    return Manifest.read(tmp_path / "runs", name_of(tmp_path, **versions))


def name_of(tmp_path: Path, **versions: str) -> str:
    return snapshot.take(tmp_path / "runs", {sys.executable: versions} if versions else {})


def copy_of(tmp_path: Path, package: str = "frosty_ways") -> Path:
    folder = take(tmp_path).code_folder(tmp_path / "runs")
    assert folder is not None
    return folder / package


def test_the_same_code_is_kept_once(tmp_path: Path, plugin: Path) -> None:
    """Taking it again writes nothing new; an edit makes another one; both stay."""
    first = name_of(tmp_path)
    before = sorted((tmp_path / "runs" / "snapshots").iterdir())
    assert name_of(tmp_path) == first and sorted((tmp_path / "runs" / "snapshots").iterdir()) == before
    (plugin / "__init__.py").write_text("A = 2\n")
    assert name_of(tmp_path) != first
    assert len(list((tmp_path / "runs" / "snapshots").glob("code-*"))) == 2


def test_sources_are_copied_data_is_linked_caches_are_left_out(tmp_path: Path, plugin: Path) -> None:
    """A package with everything that people leave in one; what lies elsewhere or is large is not copied."""
    (tmp_path / "elsewhere").mkdir()
    for name in (".git", "__pycache__", "data", "data_code", "datasets", "kernels"):
        (plugin / name).mkdir()
        (plugin / name / "file.bin").write_bytes(b"1")
    (plugin / "datasets" / "__init__.py").write_text("")
    (plugin / "pictures").symlink_to(tmp_path / "elsewhere")
    (plugin / "late.py").symlink_to(tmp_path / "tree" / "frosty_ways" / "__init__.py")
    with open(plugin / "weights.pt", "wb") as stream:
        stream.truncate(snapshot.LARGE_FILE_BYTES + 1)
    copy = copy_of(tmp_path)
    assert sorted(path.name for path in copy.iterdir()) == [
        *("__init__.py", "data", "data_code", "datasets", "kernels", "late.py", "pictures", "weights.pt"),
    ]
    links = {path.name for path in copy.iterdir() if path.is_symlink()}
    assert links == {"data", "pictures", "weights.pt"} and (copy / "data").resolve() == plugin / "data"
    assert not os.access(copy / "__init__.py", os.W_OK) or os.geteuid() == 0
    assert (copy / "__init__.py").stat().st_mode & 0o222 == 0


def test_imports_from_source_trees_are_copied_too(tmp_path: Path, plugin: Path) -> None:
    """Imports inside functions and of other trees count, those of installed packages do not, prose does not."""
    tree = plugin.parent
    (tree / "photos").mkdir()
    (tree / "photos" / "1.py").write_text("")
    for name in ("helper", "second", "third", "unused"):
        (tree / f"{name}.py").write_text("import third\n" if name == "second" else "")
    prose = '"""Read this.\n\nimport photos\nfrom unused times.\n"""\n'
    (plugin / "more.py").write_text(f"{prose}def f():\n    from helper import x\nimport numpy, second as s\n")
    assert sorted(take(tmp_path).frozen) == ["frosty_ways", "helper.py", "second.py", "third.py", "workloads"]


def test_too_much_code_is_an_error_with_a_fix(tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and files have limits; nothing is left behind."""
    monkeypatch.setattr(snapshot, "MAX_BYTES", 1000)
    monkeypatch.setattr(snapshot, "MAX_FILES", 2)
    monkeypatch.setattr(snapshot, "OURS", "frosty_ways")
    (plugin / "b.py").write_text("")
    (plugin / "c.py").write_text("")
    with pytest.raises(InputError, match="too large to be copied") as refused:
        name_of(tmp_path)
    assert str(plugin) in refused.value.text() and "install it without -e" in refused.value.hint
    (plugin / "c.py").unlink()
    (plugin / "b.py").write_bytes(b"#" * 1001)
    with pytest.raises(InputError, match="too large to be copied"):
        name_of(tmp_path)
    assert list((tmp_path / "runs" / "snapshots").iterdir()) == []


def test_sources_that_change_while_they_are_copied(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an edit is never frozen."""
    real = snapshot.shutil.copyfile
    monkeypatch.setattr(
        snapshot.shutil, "copyfile", lambda a, b: ((plugin / "__init__.py").write_text("B"), real(a, b))[1]
    )
    with pytest.raises(OperationError, match="changed while they were copied") as refused:
        name_of(tmp_path)
    assert "stopped changing" in refused.value.hint
    assert list((tmp_path / "runs" / "snapshots").glob("*code*")) == []


def test_a_source_that_cannot_be_read(tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named."""

    def unreadable(places: object, runs: object) -> object:
        raise PermissionError(13, "Permission denied", str(plugin / "secret.py"))

    monkeypatch.setattr(snapshot, "_content", unreadable)
    with pytest.raises(OperationError, match=r"secret\.py: a source cannot be read: Permission denied"):
        name_of(tmp_path)


def test_a_damaged_copy_is_replaced(tmp_path: Path, plugin: Path) -> None:
    """As after a purge of old files, or a power cut."""
    copy = copy_of(tmp_path)
    (copy / "__init__.py").unlink()
    assert (copy_of(tmp_path) / "__init__.py").read_text() == "A = 1\n"


def test_a_namespace_package_is_frozen_from_all_its_trees(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of several editable installs."""
    (plugin / "__init__.py").unlink()
    (plugin / "one.py").write_text("")
    (tmp_path / "other" / "frosty_ways").mkdir(parents=True)
    (tmp_path / "other" / "frosty_ways" / "two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "other")
    assert sorted(path.name for path in copy_of(tmp_path).iterdir()) == ["one.py", "two.py"]


def test_the_experiment_is_kept_with_what_replaced_its_keys(tmp_path: Path, plugin: Path) -> None:
    """Its bytes and every --set; runs that are sent again keep it."""
    (tmp_path / "experiment.toml").write_text("name = 'x'\n")
    experiment = Experiment.read(tmp_path / "experiment.toml", ["lr=0.1"])
    runs = tmp_path / "runs"
    name = snapshot.take(runs, {}, experiment)
    assert (runs / "snapshots" / name / "experiment.toml").read_text() == "# --set lr=0.1\nname = 'x'\n"
    (plugin / "__init__.py").write_text("A = 2\n")
    again = snapshot.retake(runs, name, local=True)
    assert again != name and (runs / "snapshots" / again / "experiment.toml").exists()
    assert list(Manifest.read(runs, again).packages) == [sys.executable]
    assert Experiment.read(tmp_path / "gone.toml") is None


def test_a_job_imports_the_submitted_code(tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the PYTHONPATH it is given, everything comes from the copies, and the result says so."""
    runs, name = tmp_path / "runs", name_of(tmp_path)
    monkeypatch.setattr(sys, "path", [code_snapshot.pythonpath(runs, name, ""), *sys.path])
    manifest = Manifest.read(runs, name)
    folder = manifest.code_folder(runs)
    assert code_snapshot.pythonpath(runs, name, "/more") == f"{folder}:/more"
    assert code_snapshot.pythonpath(runs, "gone", "/more") == "/more" and code_snapshot.pythonpath(runs, "", "") == ""
    monkeypatch.delitem(sys.modules, "frosty_ways", raising=False)
    without_ours = Manifest(**{**manifest.to_json(), "frozen": {"frosty_ways": manifest.frozen["frosty_ways"]}})
    monkeypatch.setattr(Manifest, "read", lambda *_: without_ours)
    told = code_snapshot.check(runs, name, thorough=True)
    assert told["snapshot"]["id"] == name and list(told["snapshot"]["frozen"]) == ["frosty_ways"]


def test_a_job_that_nobody_submitted_is_not_compared(tmp_path: Path) -> None:
    """python -m workloads.job.entry by hand."""
    assert code_snapshot.check(tmp_path, "", thorough=True) == {} and code_snapshot.imported_outside(tmp_path, "") == []


def test_a_replaced_path_is_an_error(tmp_path: Path, plugin: Path) -> None:
    """A prologue or container that drops PYTHONPATH would measure what is there now."""
    name = name_of(tmp_path)
    with pytest.raises(
        CodeChangedError, match=r"Python would import .* from .*, not from the submitted copy"
    ) as refused:
        code_snapshot.check(tmp_path / "runs", name, thorough=False)
    assert "let no prologue, launcher or container replace PYTHONPATH" in refused.value.hint


def edit_copy(tmp_path: Path, plugin: Path) -> None:
    path = copy_of(tmp_path) / "__init__.py"
    path.chmod(0o644)
    path.write_text("B")


def remove_copy(tmp_path: Path, plugin: Path) -> None:
    shutil.rmtree(copy_of(tmp_path))


def remove_all(tmp_path: Path, plugin: Path) -> None:
    shutil.rmtree(tmp_path / "runs" / "snapshots")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_copy, "the submitted code of frosty_ways was changed or damaged"),
        (remove_copy, "the submitted code of frosty_ways cannot be read"),
        (remove_all, "the submitted code is missing"),
    ],
)
def test_changed_or_missing_copies_are_an_error(
    tmp_path: Path, plugin: Path, damage: Callable[[Path, Path], None], message: str
) -> None:
    """Each with the place and the remedy; the class of failure is one of its own."""
    name = name_of(tmp_path)
    damage(tmp_path, plugin)
    with pytest.raises(CodeChangedError, match=message) as refused:
        code_snapshot.check(tmp_path / "runs", name, thorough=True)
    assert refused.value.failure_class == "code_changed"
    assert "orchestrate submit to use the current code" in refused.value.hint and refused.value.where


@pytest.fixture
def nothing_copied(tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything counts as installed."""
    monkeypatch.setattr(code_snapshot, "in_source_tree", lambda _location: False)


@pytest.mark.usefixtures("nothing_copied")
def test_versions_of_measured_packages_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, one that came and one that went are named; packages that do not count are passed over."""
    name = name_of(tmp_path, numpy="2.0", torch="2.6", rich="13")
    monkeypatch.setattr(software, "installed_packages", lambda: {"numpy": "2.1", "timm": "1.0", "rich": "14"})
    with pytest.raises(CodeChangedError) as refused:
        code_snapshot.check(tmp_path / "runs", name, thorough=True)
    assert refused.value.why == "numpy 2.0 then, 2.1 now; timm missing then, 1.0 now; torch 2.6 then, missing now"
    assert "orchestrate retry" in refused.value.hint
    monkeypatch.setattr(software, "installed_packages", lambda: {"numpy": "2.0", "torch": "2.6"})
    assert code_snapshot.check(tmp_path / "runs", name, thorough=True)


@pytest.mark.usefixtures("nothing_copied")
def test_an_interpreter_that_could_not_be_asked_is_not_compared(tmp_path: Path) -> None:
    """Nothing is known of it; of another one, something may be."""
    name = snapshot.take(tmp_path / "runs", {sys.executable: {}, "/other/python": {"numpy": "0.1"}})
    assert code_snapshot.check(tmp_path / "runs", name, thorough=True)


@pytest.mark.usefixtures("nothing_copied")
def test_an_installed_package_is_compared_by_content(tmp_path: Path, plugin: Path) -> None:
    """An edit counts; files that are no code do not, nor does a plug-in that jobs do not have."""
    name = name_of(tmp_path)
    (plugin / "notes.txt").write_text("x")
    assert code_snapshot.check(tmp_path / "runs", name, thorough=True)["snapshot"]["frozen"] == {}
    (plugin / "__init__.py").write_text("A = 2\n")
    with pytest.raises(CodeChangedError, match="frosty_ways: the installed package frosty_ways differs"):
        code_snapshot.check(tmp_path / "runs", name, thorough=True)
    (plugin / "__init__.py").unlink()
    plugin.rename(tmp_path / "away")
    assert code_snapshot.check(tmp_path / "runs", name, thorough=True), "what is not there cannot be measured"


def test_imports_outside_the_snapshot_are_reported(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module by a computed name, from a source tree; installed ones and the standard library do not count."""
    module = type(sys)("frosty_escape")
    module.__file__ = str(plugin / "escape.py")
    monkeypatch.setitem(sys.modules, "frosty_escape", module)
    # As Debian has it: a link in the standard library to a file of /etc.
    library, elsewhere = tmp_path / "library", tmp_path / "etc.py"
    library.mkdir()
    elsewhere.touch()
    (library / "frosty_site.py").symlink_to(elsewhere)
    linked = type(sys)("frosty_site")
    linked.__file__ = str(library / "frosty_site.py")
    monkeypatch.setitem(sys.modules, "frosty_site", linked)
    assert "frosty_site" in code_snapshot.imported_outside(tmp_path / "runs", "some")
    monkeypatch.setattr(os, "__file__", str(library / "os.py"))
    escaped = code_snapshot.imported_outside(tmp_path / "runs", "some")
    assert "frosty_escape" in escaped and not {"numpy", "json", "pytest", "frosty_site"} & set(escaped)


def test_only_old_unreferenced_snapshots_are_unneeded(tmp_path: Path, plugin: Path) -> None:
    """A young one may belong to a submit at work; the code of a needed one is needed."""
    runs, name = tmp_path / "runs", name_of(tmp_path)
    (plugin / "__init__.py").write_text("A = 2\n")
    other = name_of(tmp_path)
    folders = {path.name: path for path in (runs / "snapshots").iterdir()}
    assert len(folders) == 4 and snapshot.find_unneeded(runs, []) == []
    (runs / "snapshots" / "link").symlink_to(tmp_path)
    for path in folders.values():
        os.utime(path, (time.time() - 7200,) * 2)
    gone = {path.name for path in snapshot.find_unneeded(runs, [name])}
    assert gone == {other, f"code-{Manifest.read(runs, other).code}"}
    assert snapshot.find_unneeded(tmp_path / "nowhere", []) == []


def test_a_missing_snapshot_is_not_kept(tmp_path: Path, plugin: Path) -> None:
    """Runs that name it are frozen anew."""
    name = name_of(tmp_path)
    assert snapshot.renew(tmp_path / "runs", name)
    assert not snapshot.renew(tmp_path / "runs", "") and not snapshot.renew(tmp_path / "runs", "0123")
    folder = Manifest.read(tmp_path / "runs", name).code_folder(tmp_path / "runs")
    assert folder is not None
    folder.rename(tmp_path / "away")
    assert not snapshot.renew(tmp_path / "runs", name)


def test_a_manifest_of_another_version(tmp_path: Path) -> None:
    """Unknown keys are no manifest; a job would say that the code is gone."""
    place = code_snapshot.snapshot_folder(tmp_path, "abc")
    place.mkdir(parents=True)
    (place / "manifest.json").write_text('{"code": "", "new": 1}')
    with pytest.raises(ValueError, match="not a manifest of this version"):
        Manifest.read(tmp_path, "abc")


def test_a_runs_folder_that_pythonpath_cannot_name(tmp_path: Path) -> None:
    """A colon parts two folders there."""
    with pytest.raises(InputError, match="path contains :") as refused:
        submitter.prepare_runs_folder(tmp_path / "a:b")
    assert "PYTHONPATH" in refused.value.why and "--runs" in refused.value.hint
    assert not (tmp_path / "a:b").exists()


def test_locations_that_people_edit() -> None:
    """A checkout is one; the standard library and what installers put somewhere are not."""
    assert code_snapshot.in_source_tree(Path("/home/somebody/project/package"))
    assert not code_snapshot.in_source_tree(Path("/home/somebody/project/.venv/lib/python3.12/site-packages/package"))
    assert not code_snapshot.in_source_tree(Path("/usr/lib/python3/dist-packages/package"))
    assert not code_snapshot.in_source_tree(Path(os.path.realpath(os.__file__)))


@pytest.fixture
def digests(plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[str, str]]]:
    """Of a run that uses the plug-in, and of one that does not."""
    (plugin / "__init__.py").write_text("class D:\n    name = 'frosty'\n")
    users = TrainConfig(model="cnn", dataset="digits", strategy="frosty", hardware=Hardware("cpu", 1), cpus=1)

    def ask() -> tuple[str, str]:
        for cached in (snapshot._code_digest, registry._packages):
            cached.cache_clear()
        others = dataclasses.replace(users, strategy="eager")
        return snapshot.code_digest(users, tmp_path / "runs"), snapshot.code_digest(others, tmp_path / "runs")

    monkeypatch.delitem(sys.modules, "frosty_ways", raising=False)
    yield ask
    registry._packages.cache_clear()


def test_the_code_digest_of_a_run_covers_only_its_own_plug_ins(
    plugin: Path, digests: Callable[[], tuple[str, str]]
) -> None:
    """What makes results stale: an edit of a plug-in, and of what it imports. What is never copied does not count, nor
    does the copy of a submission."""
    before = digests()
    assert before[0] != before[1] == software.code_digest()
    (plugin / "build").mkdir()
    (plugin / "build" / "left.py").write_text("B = 1\n")
    (plugin / "gone.py").symlink_to("/nowhere/x.py")
    assert digests() == before
    (plugin.parent / "frosty_core.py").write_text("C = 1\n")
    (plugin / "step.py").write_text("import frosty_core\n")
    importing = digests()
    assert importing[0] != before[0]
    (plugin.parent / "frosty_core.py").write_text("C = 2\n")
    edited = digests()
    assert edited[0] != importing[0] and edited[1] == before[1]


def test_an_unreadable_source_is_an_error_where_it_is_needed(
    plugin: Path, digests: Callable[[], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> dict[str, str]:
        raise PermissionError(13, "Permission denied", str(plugin / "__init__.py"))

    monkeypatch.setattr(snapshot, "_digests", unreadable)
    with pytest.raises(OperationError, match="a source cannot be read: Permission denied"):
        digests()


def test_a_job_with_plug_ins_reports_the_submitted_code_digest(
    plugin: Path, digests: Callable[[], tuple[str, str]], campaign: Any
) -> None:
    """Whatever the copy looks like beside its source: links, data and namespace packages are not what they were."""
    digests()
    submitted = {"code_digest": "c0de", "snapshot": "5a9"}
    with_plugin = dataclasses.replace(campaign.spec(strategy="frosty"), **submitted)
    assert code_snapshot.run_code_digest(with_plugin) == "c0de"
    own = software.code_digest()
    assert code_snapshot.run_code_digest(dataclasses.replace(with_plugin, snapshot="")) == own
    assert code_snapshot.run_code_digest(dataclasses.replace(campaign.spec(), **submitted)) == own
