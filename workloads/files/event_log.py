"""Append-only JSON lines: the events of one rank of one attempt."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from workloads.files.json_file import utf8

_PROCESS_START = time.monotonic()
_EVENT_START = '{"event":"'
"""Begin of each line that :class:`EventLog` writes."""


class EventLog:
    """Writer of an event file.

    Each line has ``event``, ``time`` (seconds since the epoch, this host's clock) and ``t_s`` (seconds since this
    process started, monotonic: durations are differences of ``t_s``, never of ``time``). One ``write`` call per line,
    so a killed process leaves at most one broken line at the end, which :func:`read_events` leaves for later.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # End the broken line of a killed predecessor, or ours would become part of it.
        if os.fstat(self._descriptor).st_size:
            with open(path, "rb") as stream:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    os.write(self._descriptor, b"\n")

    def write(self, event: str, **data: Any) -> None:
        """Append one event; floats that JSON lacks become null."""
        line = {"event": event, "time": time.time(), "t_s": time.monotonic() - _PROCESS_START, **data}
        text = json.dumps(_finite(line), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        os.write(self._descriptor, utf8(text) + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


def read_events(path: Path, offset: int = 0, *kinds: str) -> tuple[list[dict[str, Any]], int]:
    """Read whole lines from a byte offset on; return their events and the offset for the next call.

    Skips a broken line in the middle (its writer was killed, or the disk was full) and leaves a last line without its
    newline for the next call. A missing file has no events.

    Args:
        path: the file.
        offset: what the last call returned.
        kinds: names of the events to return; none for all. Most other lines, such as those with every step's time, are
            skipped without being parsed.
    """
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            content = stream.read()
    except FileNotFoundError:
        return [], offset
    end = content.rfind(b"\n") + 1
    lines = content[:end].splitlines()
    if kinds:
        wanted = tuple(f'{_EVENT_START}{kind}"'.encode() for kind in kinds)
        lines = [line for line in lines if line.startswith(wanted) or not line.startswith(_EVENT_START.encode())]
    events = [e for e in _parse(lines) if isinstance(e, dict) and isinstance(e.get("event"), str)]
    return [e for e in events if not kinds or e["event"] in kinds], offset + end


def _parse(lines: list[bytes]) -> list[Any]:
    """Return the values of JSON lines; parses them as one array when none is broken, which is much faster."""
    try:
        values: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):
            return values
    except (ValueError, RecursionError):
        pass
    values = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
