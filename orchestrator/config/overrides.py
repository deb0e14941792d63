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
from orchestrator.config.tables import axis_tables, condition_tables, unknown_key_hint, value_tables
from orchestrator.errors import ExperimentError, Mistake
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
    for text in sets:
        try:
            overrides.notes.append(_apply(document, text, overrides.keys, context))
        except ExperimentError as error:
            overrides.mistakes += error.mistakes
    return overrides


def _apply(document: dict[str, Any], text: str, given: set[str], context: Mapping[str, Any]) -> str:
    """Apply one ``--set`` text and add its key to ``given``; return what it did, in words."""
    where = f"--set {text}"
    shown = where if len(where) <= _LONGEST_SHOWN else f"{where[:_LONGEST_SHOWN]}..."
    key, equals, value_text = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ExperimentError([Mistake(where, "not of the form KEY=VALUE", "write --set lr=0.1")])
    if key not in KEYS:
        hint = unknown_key_hint(("defaults", key))
        raise ExperimentError([Mistake(where, f"unknown key {toml_file.show(key)}", hint)])
    if key in given:
        raise ExperimentError([Mistake(shown, f"{key} is given twice", "remove one of them")])
    given.add(key)
    if key == "hardware" and _KIND.fullmatch(value_text):
        places = counted(len(list(_change_kind(document, value_text))), "place")
        return f"{where} changes the kind and keeps the number of devices, in {places}"
    try:
        value = _value(value_text)
        Values.model_validate({key: value}, context=dict(context))
    except TomlError as error:
        raise ExperimentError([Mistake(shown, error.what, error.hint)]) from error
    except ValidationError as error:
        mistakes = [
            Mistake(": ".join(filter(None, [where, toml_file.locate(place[1:], value)])), what, hint)
            for place, what, hint in toml_file.explain(error, unknown_key_hint)
        ]
        raise ExperimentError(mistakes) from error
    replaced = ", ".join(_replace(document, key, value))
    return f"{where} replaces {replaced}" if replaced else f"{where} adds a default"


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


def _replace(document: dict[str, Any], key: str, value: Any) -> Iterator[str]:
    """Replace the key everywhere, and add it to the defaults; yield what was replaced."""
    for place, table in axis_tables(document):
        if key in table:
            old = table[key]
            # The lists of a zip keep their length; experiment._axis drops rows that became equal.
            table[key] = [value] * len(old) if isinstance(old, list) else value
            yield f"the axis {place}.{key}"
    for place, table in value_tables(document):
        if key in table:
            table[key] = value
            yield f"{place}.{key}"
    defaults = document.setdefault("defaults", {})
    if isinstance(defaults, dict):
        defaults[key] = value


_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
"""Hardware without a number of devices."""


def _change_kind(document: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Replace the kind of hardware everywhere, conditions included; yield the places."""

    def changed(old: Any) -> Any:
        if isinstance(old, list):
            return [changed(each) for each in old]
        return f"{kind}:{old.partition(':')[2]}" if isinstance(old, str) and ":" in old else old

    for place, table in [*axis_tables(document), *value_tables(document), *condition_tables(document)]:
        if "hardware" in table:
            table["hardware"] = changed(table["hardware"])
            yield f"{place}.hardware"
