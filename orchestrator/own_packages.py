"""Import ``db``, ``templates`` and ``workloads`` from this installation, whatever else has these names.

Other projects use these names too, and a folder in PYTHONPATH or the working directory comes before an installed
package. Moving this installation to the front of ``sys.path`` would move everything in ``site-packages`` with it, so a
finder answers for these three names alone. Commands, the queue and supervisors import ``orchestrator`` first and have
it. Jobs import ``workloads`` first: where it is shadowed, ``environment.snapshot`` puts a copy on their path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NAMES = ("db", "templates", "workloads")
ROOT = Path(__file__).resolve().parents[1]


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)], target) if path is None and fullname in NAMES else None


def install() -> None:
    """Make the import system use our packages for their names; safe to repeat."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def shadowing() -> Iterator[tuple[str, Path]]:
    """Yield each name under which Python alone would import something else, and where that is."""
    yield from _elsewhere(PathFinder.find_spec(name) for name in NAMES)


def imported_intruder() -> tuple[str, Path] | None:
    """Return a package that took one of our names before we could, as ``sitecustomize`` can, and where it is."""
    return next(_elsewhere(getattr(sys.modules.get(name), "__spec__", None) for name in NAMES), None)


def _elsewhere(specs: Iterable[ModuleSpec | None]) -> Iterator[tuple[str, Path]]:
    for spec in filter(None, specs):
        place = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
        if place and not (found := Path(place).resolve()).is_relative_to(ROOT):
            yield spec.name, found
