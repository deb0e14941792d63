"""The documents are true: the README's transcript replays, its tables name every plug-in, its links lead somewhere."""

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
DOCUMENTS = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def _transcript() -> list[tuple[str, list[str]]]:
    """Commands of the README's ``console`` block, each with the lines shown below it."""
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
    """A line without what differs from run to run: numbers, ids, padding, table rules."""
    text = re.sub(r"\b[0-9a-f]{12,16}\b", "ID", text)
    text = re.sub(r"\d+(?:[.,]\d+)*", "#", text)
    return " ".join(re.sub(r"[─━┃│┏┓┗┛┡┩┳┻╇└┘┴┬├┤┼╭╮╰╯|+-]", " ", text).split())


@pytest.mark.torch
def test_the_transcript_replays(tmp_path: Path) -> None:
    """Every command of the transcript runs in order in an empty folder, and every line shown is printed again, but for
    numbers. These are not compared, so two of the six epochs do; one would leave epoch times out."""
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
                assert wanted in printed, f"{command}: {wanted!r} not among\n" + "\n".join(printed)
        if argv[1] == "init":
            study = (tmp_path / "experiment.toml").read_text(encoding="utf-8")
            shorter = study.replace("\nepochs = 6\n", "\nepochs = 2\n")
            assert shorter != study
            (tmp_path / "experiment.toml").write_text(shorter, encoding="utf-8")


@pytest.mark.parametrize(
    "name", [*registry.strategies(), *registry.models(), *registry.datasets()], ids=lambda n: n.replace("/", "-")
)
def test_every_plug_in_is_in_the_readme(name: str) -> None:
    shown = name.replace("/*", "/NAME")
    assert f"`{shown}`" in README, f"README.md does not name {shown}"


def test_every_study_is_in_the_readme() -> None:
    assert starter_studies.names()
    for name in starter_studies.names():
        assert f"`{name}`" in README, f"README.md does not name {name}"


def test_the_experiment_file_means_what_is_said() -> None:
    """Each of its conditions meets a cell, and as many run and are left out as the README says."""
    found = re.search(
        r"```toml\n(name = .*?)```\n.*?makes (\d+) runs of it and says why (\d+) cells", README, re.DOTALL
    )
    assert found
    expanded = matrix.expand(experiment.parse(found[1], "README.md"), default_cpus=resources.default_cpus(None))
    assert expanded.notes == []
    assert (len(expanded.cells), len(expanded.excluded)) == (int(found[2]), int(found[3]))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_architecture_names_files_that_exist_and_every_one_of_the_orchestrator() -> None:
    """Whole, or from the package on."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    roots = [ROOT, *(ROOT / package for package in ("orchestrator", "workloads", "db"))]
    named = {path for path in re.findall(r"`([a-z_]+/[\w./]+)`", text) if "NAME" not in path}
    for path in named:
        assert any((root / path).exists() for root in roots), path
    found = {path.relative_to(ROOT / "orchestrator") for path in (ROOT / "orchestrator").rglob("*.py")}
    told = {str(path) for path in found if path.parent.name not in {"", "cli"} and not path.name.startswith("__")}
    assert told <= named, told - named
