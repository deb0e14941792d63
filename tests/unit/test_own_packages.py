"""Other projects have packages called db, workloads and templates: orchestrate uses its own, here and in jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import own_packages

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).parent / "orchestrate"
STUDY = """
name = "names"
[matrix]
model = "cnn"
dataset = "digits"
strategy = "probe"
hardware = "cpu:1"
"""


@pytest.fixture(params=["package", "module"])
def other_project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with foreign packages, or single modules, of all three names; importing one fails."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in own_packages.NAMES:
        path = folder / name / "__init__.py" if request.param == "package" else folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise RuntimeError('the wrong {name}')\n")
    return folder


def _run(argv: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ORCHESTRATE_LEASES": str(folder), **environment}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


VERBS = (["init", "--force"], ["plan", "--local"], ["status"])


@pytest.mark.parametrize("command", [[str(SCRIPT)], [sys.executable, "-m", "orchestrator"]], ids=["script", "module"])
def test_packages_of_the_same_names_on_pythonpath_are_not_imported(
    command: list[str], other_project: Path, tmp_path: Path
) -> None:
    for verb in VERBS:
        done = _run([*command, *verb], tmp_path, PYTHONPATH=str(other_project))
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [[str(SCRIPT)], [sys.executable, "-m", "orchestrator"]], ids=["script", "module"])
def test_packages_of_the_same_names_in_the_working_directory_are_not_imported(
    command: list[str], other_project: Path
) -> None:
    """``python -m`` puts the working directory first on the path."""
    for verb in VERBS:
        done = _run([*command, *verb], other_project)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("installed", [False, True], ids=["source tree", "installed"])
def test_local_runs_use_our_packages(installed: bool, other_project: Path, tmp_path: Path) -> None:
    """Queue, supervisor and job. An installed ``workloads`` is copied for the job, which finds the copy first."""
    root = tmp_path / "lib" / "site-packages" if installed else ROOT
    if installed:
        for name in ("orchestrator", *own_packages.NAMES):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "experiment.toml").write_text(STUDY)
    command = [sys.executable, "-P", "-m", "orchestrator"]
    done = _run(
        [*command, "submit", "--local", "--wait"], work, PYTHONPATH=os.pathsep.join([str(other_project), str(root)])
    )
    logs = "".join(path.read_text() for path in work.glob("runs/*/*/attempts/*/job/*.err"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    copies = list(work.glob("runs/snapshots/code-*/workloads/__init__.py"))
    assert len(copies) == 1


def test_an_installed_package_is_not_copied_without_need(tmp_path: Path) -> None:
    """Nothing shadows it, so its digest is enough."""
    code = "from orchestrator import own_packages; print(dict(own_packages.shadowing()))"
    done = _run([sys.executable, "-P", "-c", code], tmp_path)
    assert done.stdout == "{}\n", done.stderr


def test_the_doctor_names_what_is_shadowed(other_project: Path, tmp_path: Path) -> None:
    done = _run([str(SCRIPT), "doctor", "--local", "--json"], tmp_path, PYTHONPATH=str(other_project))
    assert f"{other_project}/db" in done.stdout and "orchestrate's package db, which is used instead" in done.stdout


def test_a_package_that_was_imported_before_ours_is_named(tmp_path: Path) -> None:
    """``sitecustomize`` runs before any code of ours, and a process has one package of a name."""
    (tmp_path / "db.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import db\n")
    done = _run([str(SCRIPT), "init", "--list"], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(
        f"{tmp_path}/db.py: another project's package 'db' was imported before orchestrate's own\n"
    )
    assert "\n  fix: rename it, or remove it from PYTHONPATH and from sitecustomize.py\n" in done.stderr
