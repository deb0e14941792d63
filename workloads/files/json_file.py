"""JSON files that a reader sees whole: temporary file in the same folder, fsync, rename."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write strict UTF-8 JSON; a reader sees the old file or the whole new one, also after a power cut or OSError."""
    write_bytes(path, encode_json(data), durable=durable)


def encode_json(data: Any) -> bytes:
    """Return strict UTF-8 JSON in the form of our files: one line per key of an object."""
    if not isinstance(data, dict):
        return utf8(_compact(data))
    # json.dumps(indent=...) formats nested values with the slow Python encoder; per value the C encoder is used.
    lines = [f"{_compact(str(key))}: {_compact(value)}" for key, value in data.items()]
    return utf8("{\n " + ",\n ".join(lines) + "\n}\n" if lines else "{}\n")


_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def utf8(text: str) -> bytes:
    r"""Encode a JSON text; a lone surrogate, from a file name that is not UTF-8, becomes its JSON escape ``\udcXX``."""
    return text.encode("utf-8", "backslashreplace")


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a temporary file beside the target and rename it: rename(2) replaces the target atomically.

    A ``durable`` file survives a power cut that follows at once.
    """
    folder, last = os.path.split(path)
    name = f"{folder}/.{last}.{os.urandom(8).hex()}"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            written = 0
            while written < len(content):  # write(2) may write less than it was given
                written += os.write(descriptor, content[written:])
            os.fchmod(descriptor, 0o644)  # whatever the umask
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # errors of os.write name no file
        raise


def read_json(path: Path) -> Any:
    """Read strict JSON. Raises FileNotFoundError, and ValueError for a damaged file, one not in UTF-8, or no JSON."""
    content = path.read_bytes()
    if not content.strip():
        raise ValueError(f"{path}: empty file")
    try:
        return json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not whole JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises what :func:`read_json` raises, and ValueError for another JSON value."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a JSON object")
    return data


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing, damaged or holds another JSON value."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
