"""Types of the values of ``cluster.toml``, each with its check, its message and its hint."""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from orchestrator.cluster.sbatch_options import OWNED_DIRECTIVES, Vendor
from orchestrator.plugins import nearest
from orchestrator.toml_file import Problem, TomlError, decode, invalid, invalid_values, quantity, show
from orchestrator.units import LARGEST, parse_memory, parse_time_limit

SHIPPED_TEMPLATE = "slurm.sh.j2"
"""The job script that a user's template extends."""
WHOLE_NODE = 0
"""Bytes of memory that mean all of a node (``--mem=0``)."""
VISIBLE_ENV = {Vendor.NVIDIA: "CUDA_VISIBLE_DEVICES", Vendor.AMD: "ROCR_VISIBLE_DEVICES"}

_Entry = TypeVar("_Entry")
_Item = TypeVar("_Item")
_OWNED_ENV = frozenset({"PYTHONSAFEPATH", "SUBMITIT_EXECUTOR", *VISIBLE_ENV.values()})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def one_of(words: type[StrEnum]) -> BeforeValidator:
    """Make the validator of a word of an enumeration."""

    def check(value: object) -> StrEnum:
        if value not in list(words):
            raise invalid(f"{show(value)} is not one of {', '.join(words)}", nearest(str(value), words))
        return words(str(value))

    return BeforeValidator(check)


def _line(value: str) -> str:
    if not value.isprintable():
        raise invalid(f"{show(value)} contains a line end or another control character", "write it on one line")
    return value


def _directive(value: str) -> str:
    if found := sorted(set("$`\\\"'") & set(_line(value))):
        what = f"{show(value)} contains {found[0]}, and #SBATCH lines expand no variables"
        raise invalid(what, "write the value itself")
    return value


def _matching(pattern: str, what: str, hint: str) -> AfterValidator:
    """Make the validator of a text that matches a regular expression as a whole."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise invalid(f"{show(value)} is not {what}", hint)
        return value

    return AfterValidator(check)


def expand(value: str, places: Mapping[str, str]) -> str:
    """Expand ``~``, ``$VARIABLE``, ``{user}`` and the other places, as jobs run without this shell's variables.

    Raises:
        PydanticCustomError: a variable is not set, or a place is unknown.
    """
    expanded = os.path.expandvars(value)
    if "$" in expanded:
        name = expanded[expanded.index("$") :].split("/")[0]
        raise invalid(f"{show(value)}: {name} is not set here", "set it before the command, or write the value itself")
    path = _fill(value, expanded, places)
    return os.path.expanduser(path) if value.startswith("~") else path  # noqa: PTH111 (Path("") is ".")


def _fill(value: str, path: str, places: Mapping[str, str]) -> str:
    """Replace ``{user}`` and the other places; a brace that is left would become part of a folder's name."""
    for word in re.findall(r"\{(\w+)\}", path):
        if word not in places and word != "user":
            raise invalid(f"{show(value)}: {{{word}}} is unknown", "known are {user} and, where it is set, {scratch}")
        path = path.replace(f"{{{word}}}", places[word] if word in places else _user())
    if left := re.search(r"[^/]*[{}][^/]*", path):
        raise invalid(f"{show(value)}: {left[0]} names no place", "write {user} or {scratch}, with both braces")
    return path


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise invalid(
            "{user} is unknown: this account has no user name on this machine", "write the name itself, or set USER"
        ) from error


def _expanded(value: str, info: ValidationInfo) -> str:
    return expand(_line(value), info.context or {})


def _absolute(value: str, info: ValidationInfo) -> str:
    path = _expanded(value, info)
    if path and not path.startswith("/"):
        raise invalid(f"{show(value)} is not an absolute path", "write the path from /: jobs run in other folders")
    return path


def _on_nodes(value: str, info: ValidationInfo) -> str:
    """Check a folder whose variables are set on compute nodes only."""
    path = _fill(value, _line(value), info.context or {})
    if path and path[0] not in "/$":
        raise invalid(f"{show(value)} is not an absolute path", 'write a folder of the node, such as "$TMPDIR"')
    return path


def _each(value: object, check: Callable[[str, object], _Entry | None], example: str) -> dict[str, _Entry]:
    """Check every entry of a table and report all errors; entries for which ``check`` returns None are left out."""
    if not isinstance(value, dict):
        raise invalid(f"{show(value)} is not a table", f"write {example}")
    found: list[Problem] = []
    checked: dict[str, _Entry] = {}
    for name, given in value.items():
        try:
            if (kept := check(name, given)) is not None:
                checked[name] = kept
        except PydanticCustomError as error:
            wrong = (error.context or {})["mistakes"]
            found += [((name, *below), what, hint) for below, what, hint in wrong]
    if found:
        raise invalid_values(found)
    return checked


def _extra(value: object, info: ValidationInfo) -> dict[str, str | bool]:
    def check(name: str, given: object) -> str | bool:
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            raise invalid("not the long name of an sbatch option", 'such as "mail-type", without dashes')
        for owned, keys in OWNED_DIRECTIVES.items():
            if owned.startswith(name):  # sbatch accepts abbreviations, as getopt_long does
                raise invalid(f"--{owned} is set for each run", f"use {keys}" if keys else "remove it")
        if given is True:
            return True
        if not isinstance(given, str) or not given:
            raise invalid(f"{show(given)} is not a value", f'write a text, as in {name} = "1", or true')
        return _directive(_expanded(given, info))

    return _each(value, check, 'extra = { "mail-type" = "END" }')


def _env(value: object) -> dict[str, str]:
    def check(name: str, given: object) -> str | None:
        if not _VARIABLE.fullmatch(name):
            raise invalid("not the name of a variable")
        if name in _OWNED_ENV or name.startswith("SLURM_"):
            raise invalid("this variable is set for each run", "remove it")
        if not isinstance(given, str):
            raise invalid(f"{show(given)} is not a text", f'quote it: "{show(given)}"')
        if "$" in given:
            raise invalid("variables are not expanded here", f'write in prologue: "export {name}=..."')
        return _line(given) or None

    return _each(value, check, 'env = { NCCL_DEBUG = "INFO" }')


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise invalid(f"{show(value)} is not a regular expression: {error}") from error
    return value


def _template(value: str, info: ValidationInfo) -> str:
    path = _absolute(value, info)
    if path and not Path(path).is_file():
        raise invalid(f"file {path} does not exist")
    try:
        decode(Path(path).read_bytes() if path else b"")
    except OSError as error:
        raise invalid(f"cannot read {path}: {error.strerror}", "make it readable for you") from error
    except TomlError as error:
        raise invalid(f"{path}: {error.where}: {error.what}", error.hint) from error
    if Path(path).name == SHIPPED_TEMPLATE:
        raise invalid(f"{SHIPPED_TEMPLATE} is the name of the template that yours extends", "rename yours")
    return path


Line = Annotated[str, AfterValidator(_line)]
Directive = Annotated[str, AfterValidator(_directive)]
Names = Annotated[
    Directive,
    _matching(r"[A-Za-z0-9_.@:+/=,-]*", "a name that Slurm accepts", "use letters, digits and _ . - @ : + / = ,"),
]
"""Accounts, partitions or QOS, one or several."""
Folder = Annotated[str, AfterValidator(_absolute)]
Interpreter = Annotated[Folder, AfterValidator(lambda path: path or sys.executable)]
"""Of jobs; empty in the file: the one that runs this command."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Factor = Annotated[float, Field(ge=1, le=100)]
TimeLimit = Annotated[int, quantity(parse_time_limit)]
Memory = Annotated[int, quantity(parse_memory)]
NodeMemory = Annotated[int | None, quantity(lambda value: WHOLE_NODE if value == "all" else parse_memory(value))]
"""Bytes, or ``"all"`` of the node."""
Arch = Annotated[
    str,
    _matching(r"[A-Za-z0-9_]+", "an architecture", 'write what "uname -m" prints there: "x86_64", "aarch64"'),
]
GresType = Annotated[
    str,
    _matching(r"[A-Za-z0-9_.-]*", "a type of GPU", 'write the part between the colons: "a100" of gpu:a100:4'),
]
Variable = Annotated[
    str, _matching(r"([A-Za-z_][A-Za-z0-9_]*)?", "the name of a variable", 'such as "CUDA_VISIBLE_DEVICES"')
]
FolderOnNodes = Annotated[str, AfterValidator(_on_nodes)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Template = Annotated[str, AfterValidator(_template)]
Environment = Annotated[dict[str, str], BeforeValidator(_env)]
Extra = Annotated[dict[str, str | bool], BeforeValidator(_extra)]
Listed = Annotated[tuple[_Item, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""A list in the file, a tuple here."""
