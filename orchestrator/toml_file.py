"""TOML files: from text to values, and pydantic's errors in our words, each with its place in the file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from orchestrator.errors import Mistake
from orchestrator.units import QuantityError
from workloads.contract import INT64

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a document down to a value."""
Problem = tuple[KeyPath, str, str]
"""(place, what, hint)"""


class TomlTable(BaseModel):
    """A table of a file: no unknown key, no silent conversion but int to float; a list becomes a tuple where typed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_BARE_VALUE = re.compile(r"true|false|[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII)
_UNQUOTED = re.compile(r"(?P<key>[A-Za-z_]+) *= *(?P<value>[A-Za-z0-9][\w.:/ -]*)\s*(?:#.*)?$")


class TomlError(ValueError):
    """Text that is not TOML: ``where`` (``line 3, column 5``), ``what``, ``hint``."""

    def __init__(self, where: str, what: str, hint: str) -> None:
        self.where = where
        self.what = what
        self.hint = hint
        super().__init__(f"{where}: {what}")


def decode(content: bytes) -> str:
    """The text of a file in UTF-8, with or without a byte order mark; raises TomlError for other bytes."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise TomlError(f"line {line}", what, "save the file as UTF-8") from error


MAX_DEPTH = 100
"""Levels of tables and lists: no file of ours has more than ten."""


def parse(content: str | bytes) -> dict[str, Any]:
    """Parse a document whose depth and numbers are bounded, so that messages can show any value of it.

    Raises:
        TomlError: the content is not TOML in UTF-8, is nested too deeply, or has a number of more than 64 bits.
    """
    text = content if isinstance(content, str) else decode(content)
    try:
        document = tomllib.loads(text)
    except RecursionError as error:
        raise TomlError(f"line {_deepest_line(text)}", *_TOO_DEEP) from error
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = _AT.search(message)
        what = _AT.sub("", message)
        if at is None or at[1] is None:
            raise TomlError("end of file", f"not TOML: {what}", "") from error
        line = text.split("\n")[int(at[1]) - 1].strip()
        unquoted = _UNQUOTED.fullmatch(line)
        hint = f'put the text in quotes: {unquoted["key"]} = "{unquoted["value"].strip()}"' if unquoted else ""
        raise TomlError(f"line {at[1]}, column {at[2]}", f"not TOML: {what}", hint) from error
    except ValueError as error:  # CPython limits int() to 4300 digits (CVE-2020-10735)
        longest = max(_DIGITS.finditer(text), key=lambda found: len(found[0]))
        raise TomlError(f"line {text.count(chr(10), 0, longest.start()) + 1}", *_TOO_LARGE) from error
    _check_values(document)
    return document


_DIGITS = re.compile(r"[0-9_]+", re.ASCII)
_TOO_DEEP = ("nested too deeply", "no key takes lists or tables nested so deeply")
_TOO_LARGE = ("a whole number of more than 64 bits", "no key takes so large a number")


def _deepest_line(text: str) -> int:
    """Return the line with the innermost bracket."""
    depth, line, deepest = 0, 1, (0, 1)
    for character in text:
        line += character == "\n"
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, (depth, line), key=lambda place: place[0])
    return deepest[1]


def _check_values(document: dict[str, Any]) -> None:
    waiting: list[tuple[KeyPath, Any]] = [((), document)]
    while waiting:
        place, value = waiting.pop()
        if len(place) > MAX_DEPTH:
            raise TomlError(locate(place[:3], document), *_TOO_DEEP)
        if isinstance(value, int) and value not in INT64:
            raise TomlError(locate(place, document), *_TOO_LARGE)
        below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        waiting += [((*place, step), inner) for step, inner in below]


def show(value: object) -> str:
    """Write a value about as TOML does, for messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"' if value.isprintable() else repr(value)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return str(value)


def locate(place: Sequence[str | int], document: Any) -> str:
    """Name a place, as ``matrix.lr[1]``; without the index where the document has a single value instead of a list."""
    text = ""
    here = document
    for step in place:
        if isinstance(step, int):
            if isinstance(here, list):
                text += f"[{step}]"
                here = here[step] if step < len(here) else None
            continue
        key = step if _BARE_KEY.fullmatch(step) else show(step)
        text += f".{key}" if text else key
        here = here.get(step) if isinstance(here, Mapping) else None
    return text


def invalid(what: str, hint: str = "") -> PydanticCustomError:
    """Make the error that a validator raises for its value."""
    return invalid_values([((), what, hint)])


def invalid_values(mistakes: Sequence[Problem]) -> PydanticCustomError:
    """Make the error that a validator raises for several values; places are below its own."""
    return PydanticCustomError("mistakes", "{count} mistakes", {"count": len(mistakes), "mistakes": list(mistakes)})


def quantity(parse: Callable[[object], int]) -> PlainValidator:
    """Make the validator of a time or an amount of memory from its parser in ``orchestrator.units``."""

    def check(value: object) -> int:
        try:
            return parse(value)
        except QuantityError as error:
            raise invalid(error.what, error.hint) from error

    return PlainValidator(check)


def mistakes(
    error: ValidationError, document: Any, where: str, unknown: Callable[[KeyPath], str], above: KeyPath = ()
) -> list[Mistake]:
    """Turn every error of a validation into a mistake with its place in the file.

    Args:
        error: of pydantic.
        document: the parsed file, to tell a single value from a list of one.
        where: name of the file in messages.
        unknown: gives the hint for an unknown key at a place below ``above``.
        above: place of the validated table.
    """
    return [
        Mistake(": ".join(filter(None, [where, locate((*above, *place), document)])), what, hint)
        for place, what, hint in explain(error, unknown)
    ]


def explain(error: ValidationError, unknown: Callable[[KeyPath], str]) -> list[Problem]:
    """Translate the errors of a validation."""
    return [problem for details in error.errors(include_url=False) for problem in _explain(details, unknown)]


def _explain(details: ErrorDetails, unknown: Callable[[KeyPath], str]) -> list[Problem]:
    place: KeyPath = details["loc"]
    context = details.get("ctx", {})
    kind = details["type"]
    if kind == "mistakes":
        return [(place + below, what, hint) for below, what, hint in context["mistakes"]]
    if kind == "extra_forbidden":
        return [(place, f"unknown key {show(place[-1])}", unknown(place))]
    if kind == "missing":
        return [(place[:-1], f'"{place[-1]}" is missing', f'add "{place[-1]}"')]
    return [(place, *_describe(kind, details["input"], context, str(place[-1]) if place else ""))]


_TABLES_OF = frozenset({"queue", "zip", "when", "exclude", "published"})
"""Keys that hold lists of tables."""
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _describe(kind: str, value: object, context: Mapping[str, Any], key: str) -> tuple[str, str]:
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        return (
            f"{show(value)} is out of range",
            f"write a value of {words} {bound if isinstance(bound, int) else format(bound, 'g')}",
        )
    if kind == "too_short":
        return "an empty list: the product over it has no cell", "add a value, or remove the key"
    if kind not in _KINDS:
        return f"{show(value)} is not allowed here", "cluster.example.toml and the README show every key"
    return f"{show(value)} is not {_KINDS[kind]}", _hint(kind, value, key)


def _hint(kind: str, value: object, key: str) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind in {"int_type", "float_type", "bool_type"} and isinstance(value, str):
        return f"write {value} without quotes" if _BARE_VALUE.fullmatch(value) else ""
    if kind == "string_type" and isinstance(value, int | float):
        return f'put the text in quotes: "{show(value)}"'
    if kind == "string_type" and hasattr(value, "isoformat"):
        return f'this is a TOML date or time; quote it: "{value}"'
    if _KINDS[kind] == "a list":
        if key in _TABLES_OF or isinstance(value, Mapping):
            return f"an array of tables has two brackets on each side, such as [[{key}]]"
        return f"write {key} = [{show(value)}]"
    if _KINDS[kind] == "a table":
        return "write { key = value }, or a table in brackets"
    if isinstance(value, list):
        return "write one value; lists of values to try go into [matrix]"
    return ""
