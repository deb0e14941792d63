"""The import rules of ARCHITECTURE.md: one direction, and no framework on the login side."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "db", "workloads")
MAY_IMPORT = {
    "orchestrator": {"orchestrator", "db", "workloads", "templates"},
    "db": {"db", "workloads"},
    "workloads": {"workloads"},
}
CROSSING = {"arrays", "contract", "rundir", "specs", "registry", "errors", "provenance", "frozen", "entry"}
"""Modules of ``workloads`` that the login side may import (``entry`` only to name the callable of a job)."""
FRAMEWORKS = {"torch", "torchvision", "timm", "horovod", "torchgpipe", "tensorflow", "keras", "deepspeed", "sklearn"}


def _sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _outside_functions(tree) if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside_functions(tree: ast.Module) -> Iterator[ast.stmt]:
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    """orchestrator -> db -> workloads, and workloads imports neither."""
    ours = {"orchestrator", "db", "workloads", "templates", "tests", "benchmarks"}
    for path in _sources(package):
        for name in _imports(path):
            top = name.partition(".")[0]
            if top in ours:
                assert top in MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", ["orchestrator", "db"])
def test_login_side_sees_only_what_crosses(package: str) -> None:
    """Of workloads, the login side imports the contract and what goes with it, never an engine, model or strategy."""
    for path in _sources(package):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "workloads" and len(parts) > 1:
                assert parts[1] in CROSSING, f"{path.relative_to(ROOT)} imports {name}"


def test_no_framework_at_module_level_where_the_login_side_reads() -> None:
    """Declarations and everything the login side imports keep frameworks inside functions."""
    read = [*_sources("orchestrator"), *_sources("db")]
    read += [ROOT / "workloads" / f"{name}.py" for name in CROSSING]
    for folder in ("strategies", "models", "datasets"):
        read += sorted((ROOT / "workloads" / folder).glob("*.py"))
    for path in read:
        for name in _imports(path, top_level_only=True):
            assert name.partition(".")[0] not in FRAMEWORKS, f"{path.relative_to(ROOT)} imports {name} at module level"


BLOCK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {frameworks!r}:
            raise ImportError('a framework was imported on the login side: ' + name)
sys.meta_path.insert(0, Refuse())
from orchestrator.cli import run
code = run({argv!r})
loaded = sorted({frameworks!r} & set(sys.modules))
assert not loaded, loaded
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("argv", "exit_code"),
    [
        (["--help"], 0),
        (["plan", "--local"], 0),
        (["plan", "--local", "--json"], 0),
        (["status"], 0),
        (["status", "--json"], 0),
        (["collect"], 0),
        (["results"], 0),
        (["results", "--json"], 0),
        (["query", "select count(*) from runs"], 0),
        (["db", "rebuild"], 0),
        (["data", "list"], 0),
        (["cancel", "--all"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_verbs_work_where_no_framework_can_be_imported(tmp_path: Path, argv: list[str], exit_code: int) -> None:
    """In a subprocess where importing any framework raises, ``plan`` on the demo study and the reading verbs work."""
    (tmp_path / "runs").mkdir()
    for command in (["init", "--study", "demo"], ["collect"], argv):
        code = BLOCK.format(frameworks=FRAMEWORKS, argv=command)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        expected = exit_code if command is argv else 0
        assert done.returncode == expected, f"{command}: {done.stdout}{done.stderr}"
