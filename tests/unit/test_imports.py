"""The import rules of ARCHITECTURE.md: one direction, and no framework on the login side."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "db", "workloads")
MAY_IMPORT = {
    "orchestrator": {"orchestrator", "db", "workloads", "templates"},
    "db": {"db", "workloads"},
    "workloads": {"workloads"},
}
CROSSING = ("contract", "files", "metrics", "provenance", "registry", "errors", "lazy", "job/entry")
"""Modules and packages of ``workloads`` that the login side may import (``entry`` only to name the job's callable)."""
FLOORS = (
    {"cli"},
    {"doctor"},
    {"submission"},
    {"planning"},
    {"tracking"},
    {"backends"},
    {"rules"},
    {"cluster", "environment", "config"},
)
"""Folders of ``orchestrator``, from the top down; single files lie below them all."""
FRAMEWORKS = {"torch", "torchvision", "timm", "horovod", "torchgpipe", "tensorflow", "keras", "deepspeed", "sklearn"}


def _sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imports(path: Path, *, top_level: bool = False, types: bool = True) -> Iterator[str]:
    """What a file imports: only when it is imported itself, with what only type checkers see, or all."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and top_level:
            continue
        if isinstance(node, ast.With) and "lazy_imports" in ast.unparse(node.items[0]) and top_level:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    """orchestrator -> db -> workloads, and workloads imports neither."""
    ours = {"orchestrator", "db", "workloads", "templates", "tests", "benchmarks"}
    for path in _sources(package):
        for name in _imports(path):
            top = name.partition(".")[0]
            if top in ours:
                assert top in MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {name}"


def test_folders_of_the_orchestrator_import_downwards() -> None:
    floors = {folder: floor for floor, folders in enumerate(reversed(FLOORS), 1) for folder in folders}
    assert {_folder(path) for path in _sources("orchestrator")} == {*floors, ""}
    for path in _sources("orchestrator"):
        own = _folder(path)
        for name in _imports(path):
            package, folder, *_ = [*name.split("."), ""]
            if package == "orchestrator" and folder != own and path.name != "__main__.py":
                said = f"{path.relative_to(ROOT)} imports {name}"
                assert floors.get(folder, 0) < floors.get(own, 0) or (folder not in floors and own not in floors), said


def _folder(path: Path) -> str:
    """The folder of ``orchestrator`` that a file is in; empty for a single file."""
    folder, *rest = path.relative_to(ROOT / "orchestrator").parts
    return folder if rest else ""


def test_no_file_needs_itself_through_others() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in _sources(package)
    }
    needs = {
        module: {_module(name, files) for name in _imports(path, types=False)} - {module, ""}
        for module, path in files.items()
    }
    assert needs["orchestrator.cli.verbs.watch"] >= {"orchestrator.cli.monitor", "orchestrator.workspace"}
    TopologicalSorter(needs).prepare()  # which names the circle, where there is one


def _module(name: str, files: dict[str, Path]) -> str:
    """Which of our files an imported name is in; empty for what is not ours."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("package", ["orchestrator", "db"])
def test_login_side_sees_only_what_crosses(package: str) -> None:
    """Of workloads, the login side imports the contract and what goes with it, never an engine, model or strategy."""
    for path in _sources(package):
        for name in _imports(path):
            package, _, below = name.partition(".")
            if package == "workloads" and below:
                allowed = (crossing.replace("/", ".") for crossing in CROSSING)
                assert any(f"{below}.".startswith(f"{one}.") for one in allowed), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_no_framework_at_module_level_where_the_login_side_reads() -> None:
    """Declarations and everything the login side imports keep frameworks inside functions and lazy imports."""
    read = [*_sources("orchestrator"), *_sources("db")]
    for name in CROSSING:
        package = ROOT / "workloads" / name
        read += sorted(package.glob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
    for folder in ("strategies", "models", "models/shared", "datasets", "datasets/shared"):
        read += sorted((ROOT / "workloads" / folder).glob("*.py"))
    for path in read:
        for name in _imports(path, top_level=True, types=False):
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
