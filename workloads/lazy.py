"""Imports that run at first use: how the login side keeps the start of a command short.

    with lazy_imports(__name__):
        from db import queries
        from orchestrator.planning import planner

Each name stands for a module, which is imported when one of its attributes is first used, or for a class that only
annotations use. Type checkers, ruff and the tests of the import rules see ordinary imports. PEP 810 makes this a
statement in Python 3.15.
"""

from __future__ import annotations

import builtins
import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

_LOCK = threading.RLock()
"""Held while ``__import__`` is replaced, so that two threads restore it in order."""


class _LazyModule(ModuleType):
    """Stand-in for a module.

    Not ``importlib.util.LazyLoader``: until Python 3.12.3, a second thread sees its module half loaded (gh-114763), and
    it puts unloaded modules into ``sys.modules``, where ``inspect.getmodule`` loads all of them.
    """

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # pytest's monkeypatch restores from it
        return vars(importlib.import_module(self.__name__))

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(importlib.import_module(self.__name__), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(importlib.import_module(self.__name__), name)


@contextmanager
def lazy_imports(importer: str) -> Iterator[None]:
    """Make the ``from PACKAGE import MODULE`` and ``import MODULE`` statements of a block lazy.

    Args:
        importer: ``__name__`` of the module that has the block; other modules import as usual meanwhile.
    """

    def import_lazily(
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 (the signature of __import__)
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if globals is None or globals.get("__name__") != importer:
            return eager(name, globals, locals, fromlist, level)
        if not fromlist:
            return _LazyModule(name)
        return SimpleNamespace(**{module: _LazyModule(f"{name}.{module}") for module in fromlist})

    with _LOCK:
        eager = builtins.__import__
        builtins.__import__ = import_lazily
        try:
            yield
        finally:
            builtins.__import__ = eager
