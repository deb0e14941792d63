"""In continuous integration a skipped test is a failure, wherever it was skipped, unless nobody promises it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
PLAIN = """
import pytest
def test_skipped():
    pytest.skip("no such thing here")
"""
IN_A_FIXTURE = """
import pytest
@pytest.fixture
def thing():
    pytest.importorskip("no_such_module")
def test_of_a_thing(thing):
    pass
"""
WHOLE_MODULE = """
import pytest
pytest.importorskip("no_such_module")
def test_never_seen():
    pass
"""
EXCUSED = """
import pytest
@pytest.mark.optional
def test_skipped():
    pytest.skip("nobody promised it")
def test_run():
    pass
"""


def run(folder: Path, content: str, ci: str) -> tuple[int, str]:
    """Run a file of tests under our rules; exit code, and what was said."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  optional: not promised\n")
    (folder / "test_it.py").write_text(content)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"CI": ci}, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("content", "what", "why"),
    [
        (PLAIN, "test_it.py::test_skipped", "no such thing here"),
        (IN_A_FIXTURE, "test_it.py::test_of_a_thing", "could not import 'no_such_module'"),
        (WHOLE_MODULE, "test_it.py", "could not import 'no_such_module'"),
    ],
    ids=["in the test", "in a fixture", "at collection"],
)
def test_a_skip_fails_on_ci_and_only_there(tmp_path: Path, content: str, what: str, why: str) -> None:
    """The reason of the skip is the reason of the failure; elsewhere it stays a skip."""
    code, said = run(tmp_path, content, "true")
    assert code != 0
    assert re.search(rf"{re.escape(what)} was skipped, and CI promises to run it: .*{re.escape(why)}", said), said
    code, said = run(tmp_path, content, "")
    assert code in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED} and "1 skipped" in said


def test_what_nobody_promises_may_be_skipped_on_ci(tmp_path: Path) -> None:
    """Of tests that are marked optional a skip is no failure, and the others run."""
    code, said = run(tmp_path, EXCUSED, "true")
    assert code == 0 and "1 passed, 1 skipped" in said
