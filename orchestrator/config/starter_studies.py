"""The starter studies that ``orchestrate init`` writes: commented experiment files shipped in ``templates/studies``."""

from __future__ import annotations

import tomllib

from orchestrator.errors import InputError
from orchestrator.plugins import nearest
from orchestrator.shipped_files import toml_files


def names() -> list[str]:
    """Every shipped study, ``demo`` first."""
    return sorted(toml_files("studies"), key=lambda name: (name != "demo", name))


def read(name: str) -> str:
    """The text of a study's experiment file.

    Raises:
        InputError: no such study is shipped.
    """
    studies = toml_files("studies")
    if name not in studies:
        raise InputError(
            f'there is no study "{name}"', hint=nearest(name, studies) or f"there are: {', '.join(names())}"
        )
    return studies[name]


def summary(name: str) -> str:
    """One sentence: the study's ``description``."""
    return str(tomllib.loads(read(name)).get("description", ""))
