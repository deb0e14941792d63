"""JSON files that are whole at every moment: a temporary file in the same folder, fsync, rename."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Write strict UTF-8 JSON so that a reader sees the old file or the whole new one, also after a power cut.

    Raises:
        OSError: the disk is full or the folder is not writable; the old file, if any, is untouched.
    """
    write_bytes(path, encode_json(data), durable=durable)


def encode_json(data: Any) -> bytes:
    """Strict UTF-8 JSON as our files hold it: a line for each key of an object, values in the fast encoder's form."""
    if not isinstance(data, dict):
        return utf8(_compact(data))
    lines = [f"{_compact(str(key))}: {_compact(value)}" for key, value in data.items()]
    return utf8("{\n " + ",\n ".join(lines) + "\n}\n" if lines else "{}\n")


_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def utf8(text: str) -> bytes:
    """UTF-8 of a JSON text. Half a surrogate pair, as in a file name that is no UTF-8, becomes JSON's escape of it."""
    return text.encode("utf-8", "backslashreplace")


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Temp file in the same folder, fsync, rename.

    Args:
        durable: whether it must outlive a power cut that follows at once.
    """
    folder, last = os.path.split(path)
    name = f"{folder}/.{last}.{os.urandom(8).hex()}"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            written = os.write(descriptor, content)
            while written < len(content):
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
            error.filename = str(path)  # a failed write names no file
        raise


def read_json(path: Path) -> Any:
    """Read strict JSON.

    Raises:
        FileNotFoundError: no such file.
        ValueError: empty, truncated, not UTF-8, not JSON or nested too deeply.
    """
    content = path.read_bytes()
    if not content.strip():
        raise ValueError(f"{path}: empty file")
    try:
        return json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not whole JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply") from error
