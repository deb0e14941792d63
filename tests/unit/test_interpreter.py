"""What is asked of the job's interpreter, and what is said of the answer."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.environment import interpreter


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that this interpreter would import, never imported yet."""
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_modules_that_the_first_import_will_keep_are_no_problem(torch_folder: Path) -> None:
    assert interpreter.find_missing_bytecode(sys.executable, os.environ) is None


def test_modules_that_nobody_may_keep_are_told(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    problem = interpreter.find_missing_bytecode(sys.executable, os.environ)
    assert problem is not None
    what, fix = problem
    assert what.startswith(f"{torch_folder} has no compiled modules")
    assert fix == f"{sys.executable} -m compileall -q {torch_folder.parent}"
    assert os.waitstatus_to_exitcode(os.system(fix)) == 0
    assert interpreter.find_missing_bytecode(sys.executable, os.environ) is None


def test_modules_in_a_place_that_cannot_be_written(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/proc")  # where nobody can make a file, root neither
    problem = interpreter.find_missing_bytecode(sys.executable, os.environ)
    assert problem is not None and "PYTHONPYCACHEPREFIX" in problem[1] and "unset PYTHONDONTWRITE" in problem[1]


def test_a_path_with_blanks_and_quotes_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's a site"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    problem = interpreter.find_missing_bytecode(sys.executable, env)
    assert problem is not None and os.waitstatus_to_exitcode(os.system(problem[1])) == 0
    assert interpreter.find_missing_bytecode(sys.executable, env) is None


def test_a_torch_in_an_archive_has_no_modules_to_keep(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "site.zip", "w") as archive:
        archive.writestr("torch/__init__.py", "")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site.zip"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert interpreter.find_missing_bytecode(sys.executable, env) is None


@pytest.mark.parametrize("answer", ["null", "[]", "3", "{}", "no JSON"])
def test_an_answer_that_makes_no_sense_is_no_finding(tmp_path: Path, answer: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    assert interpreter.find_missing_bytecode(str(python), os.environ) is None


def test_no_torch_and_no_interpreter_are_no_finding_of_this_kind(tmp_path: Path) -> None:
    python = tmp_path / "python"
    assert interpreter.find_missing_bytecode(str(python), os.environ) is None
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert interpreter.find_missing_bytecode(str(python), os.environ) is None
