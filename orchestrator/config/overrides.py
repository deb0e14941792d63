"""``--set KEY=VALUE``: replace every value that a document has for a key, before it is checked.

``--set hardware=KIND``, without a number of devices, changes the kind everywhere and leaves the numbers: a study of
``a100:1`` and ``a100:2`` becomes one of ``cpu:1`` and ``cpu:2``, its conditions and published figures with it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from orchestrator import toml_file
from orchestrator.config.keys import KEYS, Values
from orchestrator.config.tables import axis_tables, condition_tables, tables_of, unknown_key_hint
from orchestrator.errors import Mistake
from orchestrator.toml_file import TomlError
from orchestrator.units import counted

_LONGEST_SHOWN = 60
"""Characters of a ``--set`` text in a message: the text may have thousands."""


@dataclass(slots=True)
class Overrides:
    """What the ``--set`` texts of one call did."""

    keys: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    """What was replaced, in words."""
    mistakes: list[Mistake] = field(default_factory=list)


def apply(document: dict[str, Any], sets: Sequence[str], context: Mapping[str, Any]) -> Overrides:
    """Replace keys in ``document``, axes included; an invalid value replaces nothing.

    Args:
        document: the parsed file, changed in place.
        sets: ``key=value`` texts; a value that is not TOML is taken as text.
        context: for the validators of ``orchestrator.config.keys``.
    """
    overrides = Overrides()
    given: set[str] = set()
    for text in sets:
        where = f"--set {text}"
        key, equals, value_text = (part.strip() for part in text.partition("="))
        if not equals or not key:
            overrides.mistakes.append(Mistake(where, "not of the form KEY=VALUE", "write --set lr=0.1"))
            continue
        if key not in KEYS:
            hint = unknown_key_hint(("defaults", key))
            overrides.mistakes.append(Mistake(where, f"unknown key {toml_file.show(key)}", hint))
            continue
        if key in given:
            overrides.mistakes.append(Mistake(_shortened(where), f"{key} is given twice", "remove one of them"))
            continue
        given.add(key)
        if key == "hardware" and _KIND.fullmatch(value_text):
            replaced = list(_change_kind(document, value_text))
            overrides.keys.add(key)
            overrides.notes.append(
                f"{where} changes the kind and keeps the number of devices, in {counted(len(replaced), 'place')}"
            )
            continue
        try:
            value = _value(value_text)
        except TomlError as error:
            overrides.mistakes.append(Mistake(_shortened(where), error.what, error.hint))
            continue
        mistakes = list(_mistakes(key, value, where, context))
        if mistakes:
            overrides.mistakes += mistakes
            continue
        replaced = list(_replace(document, key, value))
        overrides.keys.add(key)
        overrides.notes.append(f"{where} replaces {', '.join(replaced)}" if replaced else f"{where} adds a default")
    return overrides


def _value(text: str) -> Any:
    """Parse one TOML value; anything else is the text itself. A time of day is text: the shell removed its quotes.

    Raises:
        TomlError: it is TOML that no key takes.
    """
    try:
        parsed = toml_file.parse(f"value = {text}")
    except TomlError as error:
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return text
        raise
    value = parsed["value"]
    return text if len(parsed) > 1 or hasattr(value, "isoformat") else value


def _shortened(where: str) -> str:
    return where if len(where) <= _LONGEST_SHOWN else f"{where[:_LONGEST_SHOWN]}..."


def _mistakes(key: str, value: Any, where: str, context: Mapping[str, Any]) -> Iterator[Mistake]:
    try:
        Values.model_validate({key: value}, context=dict(context))
    except ValidationError as error:
        for mistake in toml_file.mistakes(error, {key: value}, "", unknown_key_hint):
            place = mistake.where.removeprefix(key).lstrip(".")
            yield Mistake(f"{where}: {place}" if place else where, mistake.what, mistake.hint)


def _replace(document: dict[str, Any], key: str, value: Any) -> Iterator[str]:
    """Replace the key everywhere, and add it to the defaults; yield what was replaced."""
    for place, table in axis_tables(document):
        if key in table:
            old = table[key]
            # The lists of a zip keep their length; experiment._axis drops rows that became equal.
            table[key] = [value] * len(old) if isinstance(old, list) else value
            yield f"the axis {place}.{key}"
    for place, table in [*tables_of(document, "when", "set"), *tables_of(document, "include")]:
        if key in table:
            table[key] = value
            yield f"{place}.{key}"
    defaults = document.setdefault("defaults", {})
    if isinstance(defaults, dict):
        if key in defaults:
            yield f"defaults.{key}"
        defaults[key] = value


_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
"""Hardware without a number of devices."""


def _change_kind(document: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Replace the kind of hardware everywhere, conditions included; yield the places."""

    def changed(old: Any) -> Any:
        if isinstance(old, list):
            return [changed(each) for each in old]
        return f"{kind}:{old.partition(':')[2]}" if isinstance(old, str) and ":" in old else old

    values = [
        *tables_of(document, "when", "set"),
        *tables_of(document, "include"),
        ("defaults", document.get("defaults")),
    ]
    for place, table in [*axis_tables(document), *values, *condition_tables(document)]:
        if isinstance(table, dict) and "hardware" in table:
            table["hardware"] = changed(table["hardware"])
            yield f"{place}.hardware"
