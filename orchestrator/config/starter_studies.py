"""The starter studies that ``orchestrate init`` writes: commented experiment files shipped in ``templates/studies``."""

from __future__ import annotations

import tomllib
from importlib import resources

from orchestrator.errors import InputError
from orchestrator.plugins import nearest


def names() -> list[str]:
    """Every shipped study, ``demo`` first."""
    found = [
        entry.name.removesuffix(".toml")
        for entry in resources.files("templates").joinpath("studies").iterdir()
        if entry.name.endswith(".toml")
    ]
    return sorted(found, key=lambda name: (name != "demo", name))


def read(name: str) -> str:
    """The text of a study's experiment file.

    Raises:
        InputError: no such study is shipped.
    """
    shipped = names()
    if name not in shipped:
        raise InputError(
            f'there is no study "{name}"', hint=nearest(name, shipped) or f"there are: {', '.join(shipped)}"
        )
    return resources.files("templates").joinpath("studies", f"{name}.toml").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """One sentence: the study's ``description``."""
    return str(tomllib.loads(read(name)).get("description", ""))
