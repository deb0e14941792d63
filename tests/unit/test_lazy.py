"""Lazy imports: nothing is imported before its first use, and every name in a lazy block is a module."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workloads.lazy import lazy_imports

ROOT = Path(__file__).parents[2]

with lazy_imports(__name__):
    import colorsys
    from wsgiref import util as wsgi_util


def test_a_module_is_imported_at_first_use() -> None:
    """The block binds names; other imports in it and elsewhere are as usual."""
    code = (
        "import sys; from workloads.lazy import lazy_imports\n"
        "with lazy_imports(__name__):\n    import colorsys\n    from wsgiref import util\n"
        "import json\n"
        "print('colorsys' in sys.modules, 'wsgiref.util' in sys.modules, 'json' in sys.modules)\n"
        "util.is_hop_by_hop; print('wsgiref.util' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False True\nTrue\n"


def test_patches_of_a_lazy_module_reach_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colorsys, "rgb_to_hls", lambda *_: "patched")
    assert importlib.import_module("colorsys").rgb_to_hls(0, 0, 0) == "patched"
    monkeypatch.undo()
    assert colorsys.rgb_to_hls(0, 0, 0) == (0.0, 0.0, 0.0)


def test_threads_see_whole_modules() -> None:
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(wsgi_util.is_hop_by_hop("te"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def _lazy_names() -> Iterator[tuple[Path, str]]:
    for package in ("orchestrator", "db"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr).startswith("lazy_imports("):
                    for statement in node.body:
                        assert isinstance(statement, ast.Import | ast.ImportFrom), f"{path}: {ast.unparse(statement)}"
                        prefix = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
                        yield from ((path, prefix + alias.name) for alias in statement.names)


def test_lazy_blocks_name_modules() -> None:
    """A class or a function in one would fail at its first use only."""
    names = list(_lazy_names())
    assert names
    for path, name in names:
        assert importlib.util.find_spec(name) is not None, f"{path.relative_to(ROOT)}: {name} is no module"
