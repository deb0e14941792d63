"""What is asked of the job's interpreter, and what is said of the answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from orchestrator import interpreter


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
    assert interpreter.uncompiled(sys.executable) is None


def test_modules_that_nobody_may_keep_are_told(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    problem = interpreter.uncompiled(sys.executable)
    assert problem is not None
    what, fix = problem
    assert what.startswith(f"{torch_folder} has no compiled modules")
    assert fix == f"{sys.executable} -m compileall -q {torch_folder.parent}"
    assert os.waitstatus_to_exitcode(os.system(fix)) == 0
    assert interpreter.uncompiled(sys.executable) is None


def test_modules_in_a_place_that_cannot_be_written(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/proc")  # where nobody can make a file, root neither
    problem = interpreter.uncompiled(sys.executable)
    assert problem is not None and "PYTHONPYCACHEPREFIX" in problem[1] and "unset PYTHONDONTWRITE" in problem[1]


def test_no_torch_and_no_interpreter_are_no_finding_of_this_kind(tmp_path: Path) -> None:
    python = tmp_path / "python"
    assert interpreter.uncompiled(str(python)) is None
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert interpreter.uncompiled(str(python)) is None
