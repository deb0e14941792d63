"""Times and amounts of memory, as people write them in TOML files and as Slurm takes them; counts in words."""

from __future__ import annotations

import datetime
import re

_SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d\d))?(?::(?P<third>\d\d))?", re.ASCII)
_WORDED_TIME = re.compile(r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s)?", re.ASCII)
_MEMORY = re.compile(r"(?P<number>\d+) ?(?P<unit>[KMGT])(?P<suffix>|i?B)", re.ASCII)

LARGEST = 2**32 - 1
"""Largest whole number of a key: every framework takes it as a seed, JSON and SQL hold it exactly."""
LONGEST_S = 3650 * 86400
"""Ten years: longer than any site's limit, and within what databases, Slurm and clocks hold."""
MOST_MEMORY_BYTES = 1024 * 1024**4
"""Largest memory of a node."""

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_UNIT_BYTES = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}

_TIME_HINT = 'write a text such as "0-04:00:00" (days-hours:minutes:seconds), "4:00:00", "90m", "2h" or "7d"'
_MEMORY_HINT = 'write a text such as "24G" or "1536M" (units of 1024, as Slurm counts them)'


def counted(number: int, one: str, many: str = "") -> str:
    """Return ``1 run`` or ``2 runs``; ``many`` is the plural where it is not the singular with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


class QuantityError(ValueError):
    """A time or an amount of memory is invalid; ``hint`` says what to write instead."""

    def __init__(self, what: str, hint: str) -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what}: {hint}")


def parse_time_limit(value: object) -> int:
    """Parse a time limit to seconds: ``D-HH:MM:SS``, ``D-HH:MM``, ``D-HH``, ``HH:MM:SS``, ``2h``, ``1h30m``.

    Raises:
        QuantityError: the value is not such a text, is zero, or is ambiguous.
    """
    if isinstance(value, datetime.time):
        raise QuantityError("this is a TOML time of day", f'quote it: "{value.isoformat()}"')
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise _without_unit(str(value))
    if not isinstance(value, str):
        raise QuantityError(f"{value!r} is not a time limit", _TIME_HINT)
    seconds = _time_s(value.strip())
    if seconds <= 0:
        raise QuantityError(f'"{value}" is zero', _TIME_HINT)
    if seconds > LONGEST_S:
        raise QuantityError(f'"{value}" is more than ten years', f'write "{LONGEST_S // _DAY_S}d" at most')
    return seconds


def _number(digits: str | None) -> int:
    """Convert at most 18 digits, which exceed every limit already: CPython limits ``int()`` to 4300 of them."""
    return int((digits or "").lstrip("0")[:18] or 0)


def _time_s(text: str) -> int:
    if text and (worded := _WORDED_TIME.fullmatch(text)):
        days, hours, minutes, seconds = (_number(n) for n in worded.groups())
        return days * _DAY_S + hours * _HOUR_S + minutes * _MINUTE_S + seconds
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        raise QuantityError(f'"{text}" is not a time limit', _TIME_HINT)
    first, second, third = _number(match["first"]), _number(match["second"]), _number(match["third"])
    if match["days"] is None:
        if match["second"] is None:
            raise _without_unit(text, f'"{text}"')
        if match["third"] is None:
            # sbatch reads two fields as minutes:seconds (man sbatch, --time); most people mean hours:minutes.
            raise QuantityError(
                f'"{text}" may be {first} hours {second} minutes, or {first} minutes {second} seconds',
                f'write "{text}:00" for the first, "0:{first:02}:{second:02}" for the second',
            )
    if second > 59 or third > 59 or (match["days"] is not None and first > 23):
        raise QuantityError(f'"{text}" has a field out of range (23 h after days, 59 min, 59 s)', _TIME_HINT)
    return _number(match["days"]) * _DAY_S + first * _HOUR_S + second * _MINUTE_S + third


def _without_unit(number: str, quoted: str = "") -> QuantityError:
    units = [f'"{number}{unit}"' for unit in _WORDED_TIME.groupindex]
    return QuantityError(f"{quoted or number} has no unit", f"write {', '.join(units[:-1])} or {units[-1]}")


def format_time_limit(seconds: int) -> str:
    """Return ``D-HH:MM:SS``, the only form of ``sbatch --time`` that names every unit."""
    days, rest = divmod(seconds, _DAY_S)
    hours, rest = divmod(rest, _HOUR_S)
    minutes, rest = divmod(rest, _MINUTE_S)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"


def parse_memory(value: object) -> int:
    """Parse an amount of memory to bytes: ``24G``, ``1536M``, ``24GiB``; units are powers of 1024.

    Raises:
        QuantityError: the value is not such a text, or is zero.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise QuantityError(f"{value} has no unit", f'write "{value}G" or "{value}M"')
    if not isinstance(value, str):
        raise QuantityError(f"{value!r} is not an amount of memory", _MEMORY_HINT)
    match = _MEMORY.fullmatch(value.strip())
    if match is None:
        raise QuantityError(f'"{value}" is not an amount of memory', _MEMORY_HINT)
    if match["suffix"] == "B":
        hint = f'write "{match["number"]}{match["unit"]}" (units of 1024, as Slurm counts)'
        raise QuantityError(f'"{value}" may mean units of 1000 or of 1024', hint)
    memory_bytes = _number(match["number"]) * _UNIT_BYTES[match["unit"]]
    if memory_bytes == 0:
        raise QuantityError(f'"{value}" is zero', _MEMORY_HINT)
    if memory_bytes > MOST_MEMORY_BYTES:
        hint = f'write "{format_memory(MOST_MEMORY_BYTES)}" at most'
        raise QuantityError(f'"{value}" is more than any node has', hint)
    return memory_bytes


def format_memory(memory_bytes: int) -> str:
    """Return what ``sbatch --mem`` takes: ``G`` where it is exact, else ``M``, rounded up."""
    if memory_bytes % _UNIT_BYTES["G"] == 0:
        return f"{memory_bytes // _UNIT_BYTES['G']}G"
    return f"{-(-memory_bytes // _UNIT_BYTES['M'])}M"
