"""Times and memory are read as people mean them; ambiguous texts are errors."""

from __future__ import annotations

import datetime

import pytest

from orchestrator.units import (
    QuantityError,
    counted,
    format_memory,
    format_time_limit,
    parse_memory,
    parse_time_limit,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0-04:00:00", 14400),
        ("4:00:00", 14400),
        ("04:00:00", 14400),
        ("90:00:00", 324000),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("90m", 5400),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1d", 86400),
        ("45s", 45),
        ("3650d", 315_360_000),
    ],
)
def test_time_limits(text: str, seconds: int) -> None:
    """Each accepted form has one meaning, which Slurm's form keeps."""
    assert parse_time_limit(text) == seconds
    assert parse_time_limit(format_time_limit(seconds)) == seconds


@pytest.mark.parametrize(
    ("value", "what", "hint"),
    [
        (
            "4:00",
            '"4:00" may be 4 hours 0 minutes, or 4 minutes 0 seconds',
            '"4:00:00" for the first, "0:04:00" for',
        ),
        ("4", '"4" has no unit', 'write "4d", "4h", "4m" or "4s"'),
        (240, "240 has no unit", 'write "240d", "240h", "240m" or "240s"'),
        (datetime.time(4, 0), "this is a TOML time of day", 'quote it: "04:00:00"'),
        ("", '"" is not a time limit', '"0-04:00:00"'),
        ("soon", '"soon" is not a time limit', '"90m"'),
        ("1y", '"1y" is not a time limit', '"2h" or "7d"'),
        ("0-00:00:00", '"0-00:00:00" is zero', '"90m"'),
        ("0m", '"0m" is zero', '"90m"'),
        ("1:75:00", "has a field out of range", '"4:00:00"'),
        ("1-24:00:00", "has a field out of range", '"4:00:00"'),
        ("3651d", '"3651d" is more than ten years', 'write "3650d" at most'),
        ("99999999999999999d", "is more than ten years", '"3650d"'),
        (f"{'9' * 5000}-00:00:00", "is more than ten years", '"3650d"'),
        (True, "True is not a time limit", '"4:00:00"'),
        ("٤:00:00", "is not a time limit", '"4:00:00"'),
    ],
)
def test_invalid_time_limits(value: object, what: str, hint: str) -> None:
    """The message names the error, the hint what to write instead."""
    with pytest.raises(QuantityError) as caught:
        parse_time_limit(value)
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "memory_bytes", "slurm"),
    [
        ("24G", 24 * 1024**3, "24G"),
        ("24 G", 24 * 1024**3, "24G"),
        ("24GiB", 24 * 1024**3, "24G"),
        ("1536M", 1536 * 1024**2, "1536M"),
        ("1T", 1024**4, "1024G"),
        ("1K", 1024, "1M"),
    ],
)
def test_memory(text: str, memory_bytes: int, slurm: str) -> None:
    """Units are powers of 1024; Slurm gets whole units, rounded up."""
    assert parse_memory(text) == memory_bytes
    assert format_memory(memory_bytes) == slurm


@pytest.mark.parametrize(
    ("value", "what", "hint"),
    [
        (24, "24 has no unit", '"24G" or "24M"'),
        ("24", '"24" is not an amount of memory', '"24G"'),
        ("24GB", '"24GB" may mean units of 1000 or of 1024', 'write "24G"'),
        ("1.5G", '"1.5G" is not an amount of memory', '"1536M"'),
        ("0G", '"0G" is zero', '"24G"'),
        ("1025T", '"1025T" is more than any node has', 'write "1048576G" at most'),
        (f"{'9' * 5000}K", "is more than any node has", '"1048576G"'),
        (False, "False is not an amount of memory", '"24G"'),
        (None, "None is not an amount of memory", '"24G"'),
    ],
)
def test_invalid_memory(value: object, what: str, hint: str) -> None:
    """The message names the error, the hint what to write instead."""
    with pytest.raises(QuantityError) as caught:
        parse_memory(value)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_counts_agree_with_their_noun() -> None:
    assert [counted(number, "run") for number in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
    assert [counted(number, "canary", "canaries") for number in (1, 3)] == ["1 canary", "3 canaries"]
