"""``orchestrate data``: output and exit codes, through the command line's entry point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator import cli
from workloads import registry


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.run(["data", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def no_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ORCHESTRATE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root with one image folder of two classes."""
    for split in ("train", "test"):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / "data" / "pets" / split / name
            folder.mkdir(parents=True)
            (folder / "0.ppm").write_bytes(b"P6 8 8 255\n" + bytes([number]) * 192)
    return tmp_path / "data"


def test_list_shows_usable_data_sets(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    code, out, _ = run(capsys, "list", "--json", "--data", str(root))
    rows = {row["dataset"]: row for row in json.loads(out)}
    assert code == 0
    single = {name for name in registry.datasets() if not name.endswith("/*")}
    assert {"digits", "mnist"} < single and set(rows) == single | {"imagefolder/pets"}
    assert [rows[name]["usable"] for name in ("digits", "mnist", "imagefolder/pets")] == [True, False, True]
    assert rows["digits"]["num_train"] == 1437


@pytest.mark.torch
def test_prepare_reports_on_standard_error_and_is_idempotent(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    for _ in range(2):
        code, out, err = run(capsys, "prepare", "digits", "imagefolder/pets", "--data", str(root))
        assert (code, out) == (0, "")
        assert "imagefolder/pets: ready, 2 training and 2 test images of 2 classes" in err
    assert "decoding" not in err


def test_check_names_each_problem_and_its_fix(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    (root / "pets/test/dog/0.ppm").unlink()
    code, out, err = run(capsys, "check", "imagefolder/pets", "digits", "--json", "--data", str(root))
    assert code == 1
    (problem,) = json.loads(out)
    assert problem["where"] == str(root / "pets/test/dog")
    assert problem["what"] == "no images in this class folder"
    assert err == "data sets checked: 2; problems: 1\n"


def test_check_of_whole_data_sets_succeeds(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    code, out, err = run(capsys, "check", "imagefolder/pets", "--data", str(root))
    assert (code, out, err) == (0, "", "data sets checked: 1; problems: 0\n")


def test_check_without_names_checks_all_data_sets(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    code, out, _ = run(capsys, "check", "--json", "--data", str(root))
    assert code == 1
    assert {problem["dataset"] for problem in json.loads(out)} == {"cifar10", "mnist"}


def test_an_unknown_name_is_an_input_error_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "prepare", "digits", "mnits")
    assert (code, out) == (2, "")
    assert "no data set is named 'mnits'" in err
    assert "did you mean mnist?" in err
    assert "needs no preparation" not in err  # names are checked before anything is done


def test_one_failure_among_several_exits_as_partly_done(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "prepare", "digits", "mnist")
    assert code == 3
    assert "export ORCHESTRATE_DATA" in err
    assert "1 of 2 data sets could not be prepared: mnist" in err


def test_exit_codes_of_total_failure_and_of_a_hostile_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "prepare", "mnist")[0] == 1
    assert run(capsys, "prepare", "mnist", "imagefolder/pets")[0] == 1
    code, _, err = run(capsys, "prepare", "imagefolder/../pets")
    assert code == 2
    assert "does not name a folder of the data root" in err


def test_the_error_names_a_missing_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, _, err = run(capsys, "prepare", "imagefolder/pets")
    assert code == 1
    assert "imagefolder/pets needs the package pillow, which is not installed here" in err
    assert "pip install 'orchestrate-hpc[torch]'" in err
