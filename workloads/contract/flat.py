"""A dataclass as a mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(f.name for f in fields(kind))
    return names, attrgetter(*names)


def flat(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name. ``asdict`` copies all values and takes several times as long."""
    names, values = _fields_of(value.__class__)
    return dict(zip(names, values(value), strict=True))


def known_fields(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a JSON object has for the fields of a dataclass; keys of other versions are ignored."""
    return {name: data[name] for name in _fields_of(kind)[0] if name in data}
