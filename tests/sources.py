"""An environment whose packages lie in source trees: ours, a plug-in and what it imports, all of them editable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

DECLARATION = '''
"""A plug-in whose every import leaves a trace in the result."""
import os
from dataclasses import replace
from workloads.strategies.probe import DECLARATION as PROBE

VERSION = "1"
os.environ["OMP_NOTE_{name}"] = VERSION


def create():
    import acme_late

    return acme_late


DECLARATION = replace(PROBE, name="{name}", create=create)
'''
TOOLS = """
import os

VERSION = "1"
os.environ["OMP_NOTE_tools"] = VERSION
"""


@dataclass(frozen=True, slots=True)
class Sources:
    """A virtual environment in which everything is as people have it who develop."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Sources:
        """The strategies ``acme`` (editable, imports ``acme_tools`` of another tree) and ``solid`` (installed)."""
        made = cls(folder)
        for package in ("workloads", "orchestrator", "db", "templates"):
            shutil.copytree(ROOT / package, made.ours / package, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["/usr/bin/env", "python3", "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        made._plugin("acme", folder / "acme_tree", "import acme_tools\n")
        made._plugin("solid", made.site_packages, "")
        (folder / "tools_tree").mkdir()
        (folder / "tools_tree" / "acme_tools.py").write_text(TOOLS)
        (folder / "tools_tree" / "acme_late.py").write_text("VERSION = '1'\n")
        trees = (sysconfig.get_path("purelib"), made.ours, folder / "acme_tree", folder / "tools_tree")
        (made.site_packages / "trees.pth").write_text("".join(f"{tree}\n" for tree in trees))
        return made

    @property
    def ours(self) -> Path:
        return self.folder / "ours"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def runs(self) -> Path:
        return self.work / "runs"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        return found

    def _plugin(self, name: str, tree: Path, first: str) -> None:
        package = tree / f"{name}_ways"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "fast.py").write_text(first + DECLARATION.format(name=name))
        metadata = self.site_packages / f"{name}_ways-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-ways\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[orchestrate.strategies]\n{name} = {name}_ways.fast:DECLARATION\n")

    def edit(self) -> None:
        """Change everything in source trees, as somebody does while a job waits."""
        engine = self.ours / "workloads" / "engines" / "probe.py"
        _replace(engine, 'about["cpu_model"]', '"edited"')
        _replace(self.folder / "acme_tree" / "acme_ways" / "fast.py", 'VERSION = "1"', 'VERSION = "2"')
        _replace(self.folder / "tools_tree" / "acme_tools.py", 'VERSION = "1"', 'VERSION = "2"')

    def edit_installed(self) -> None:
        """Change what is in site-packages."""
        _replace(self.site_packages / "solid_ways" / "fast.py", 'VERSION = "1"', 'VERSION = "2"')

    def orchestrate(
        self, *argv: str, env: dict[str, str] | None = None, patch: str = "", expect: int | None = 0
    ) -> str:
        """Type ``orchestrate ...`` in ``work``; what it printed, both streams."""
        code = f"import sys\n{patch}\nfrom orchestrator.cli import run\nsys.exit(run(sys.argv[1:]))"
        environ = {k: v for k, v in (env or os.environ).items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.python), "-P", "-c", code, *argv],
            **{"cwd": self.work, "env": environ, "capture_output": True, "text": True, "timeout": 120, "check": False},
        )
        assert expect is None or done.returncode == expect, f"{argv}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def notes(result: dict[str, Any]) -> dict[str, str]:
    """What plug-ins noted in a result, by name."""
    environment = result["provenance"]["environment"]
    return {k.removeprefix("OMP_NOTE_"): v for k, v in environment.items() if k.startswith("OMP_NOTE_")}


def results(runs: Path) -> dict[str, dict[str, Any]]:
    """Newest ``result.json`` of each run, by strategy."""
    found = {}
    for spec in runs.glob("*/*/spec.json"):
        attempts = sorted(spec.parent.glob("attempts/*/result.json"), key=lambda path: int(path.parent.name))
        found[json.loads(spec.read_text())["train"]["strategy"]] = json.loads(attempts[-1].read_text())
    return found


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
