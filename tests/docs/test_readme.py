"""Check the documents: the README's session replays, its tables list every plug-in, all relative links resolve."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cluster import resources
from orchestrator.config import experiment, starter_studies
from orchestrator.planning import matrix
from workloads import registry

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("orchestrator", "workloads", "db")
DOCUMENTS = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def _transcript() -> list[tuple[str, list[str]]]:
    """Return the commands of the README's ``console`` block, each with the output shown below it."""
    block = re.search(r"```console\n(.*?)```", README, re.DOTALL)
    assert block, "README.md has no console block"
    commands: list[tuple[str, list[str]]] = []
    for line in block[1].splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif line.strip():
            commands[-1][1].append(line)
    return commands


def _shape(text: str) -> str:
    """Return a line without what differs from run to run: numbers, ids, padding, table rules."""
    text = re.sub(r"\b[0-9a-f]{12,16}\b", "ID", text)
    text = re.sub(r"\d+(?:[.,]\d+)*", "#", text)
    return " ".join(re.sub(r"[─━┃│┏┓┗┛┡┩┳┻╇└┘┴┬├┤┼╭╮╰╯|+-]", " ", text).split())


@pytest.mark.torch
def test_the_session_replays(tmp_path: Path) -> None:
    """Run every command of the session in order in an empty folder; each prints the lines shown, except for numbers.

    The study is shortened from six epochs to two, because numbers are not compared. One epoch would give no epoch time.
    """
    commands = _transcript()
    assert len(commands) >= 5
    for command, shown in commands:
        argv = shlex.split(command)
        assert argv[0] == "orchestrate"
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *argv[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        printed = [_shape(line) for line in (done.stdout + done.stderr).splitlines()]
        for line in shown:
            wanted = _shape(line)
            if wanted and wanted != "...":
                assert wanted in printed, f"{command}: {wanted!r} is missing from\n" + "\n".join(printed)
        if argv[1] == "init":
            study = (tmp_path / "experiment.toml").read_text(encoding="utf-8")
            shorter = study.replace("\nepochs = 6\n", "\nepochs = 2\n")
            assert shorter != study
            (tmp_path / "experiment.toml").write_text(shorter, encoding="utf-8")


@pytest.mark.parametrize(
    "name", [*registry.strategies(), *registry.models(), *registry.datasets()], ids=lambda n: n.replace("/", "-")
)
def test_the_readme_lists_every_plug_in(name: str) -> None:
    shown = name.replace("/*", "/NAME")
    assert f"`{shown}`" in README, f"README.md does not list {shown}"


def test_the_readme_lists_every_study() -> None:
    assert starter_studies.names()
    for name in starter_studies.names():
        assert f"`{name}`" in README, f"README.md does not list {name}"


def test_the_experiment_file_expands_as_described() -> None:
    """Every condition matches a cell; runs and excluded cells are as many as the README says."""
    found = re.search(
        r"```toml\n(name = .*?)```\n.*?makes (\d+) runs of it and says why (\d+) cells", README, re.DOTALL
    )
    assert found
    expanded = matrix.expand(experiment.parse(found[1], "README.md"), default_cpus=resources.default_cpus(None))
    assert expanded.notes == []
    assert (len(expanded.cells), len(expanded.excluded)) == (int(found[2]), int(found[3]))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_architecture_names_existing_files_and_all_of_the_orchestrator() -> None:
    """Paths are relative to the root or to a package."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    roots = [ROOT, *(ROOT / package for package in PACKAGES)]
    named = {path for path in re.findall(r"`([a-z_]+/[\w./]+)`", text) if "NAME" not in path}
    for path in named:
        assert any((root / path).exists() for root in roots), path
    found = {path.relative_to(ROOT / "orchestrator") for path in (ROOT / "orchestrator").rglob("*.py")}
    required = {
        str(path) for path in found if path.parent.name not in {"", "cli", "verbs"} and not path.name.startswith("__")
    }
    assert required <= named, required - named


def test_the_walks_name_existing_functions() -> None:
    """Every row of the walks in ARCHITECTURE.md names a file and functions or classes that are defined in it."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Three walks\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", text, re.MULTILINE)
    assert len(rows) > 30
    for path, names in rows:
        (file,) = (root / path for root in (ROOT, *(ROOT / p for p in PACKAGES)) if (root / path).exists())
        source = file.read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), f"{path} defines no {name}"
