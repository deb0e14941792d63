"""What commands print: tables in five formats and JSON on standard output, messages on standard error."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.options import are_written
from workloads.errors import InputError
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from rich import box, cells, console, table, text

Row = Mapping[str, Any]


class Format(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"

    @property
    def for_machines(self) -> bool:
        """Whether values are printed unrounded, without units."""
        return self in {Format.JSON, Format.CSV}


def _check_formats(context: typer.Context, value: Any) -> Any:
    """Return the value of --format or --json; raise InputError where both are given and differ."""
    if are_written(context, "format", "json"):
        named = value if isinstance(value, str) else context.params["format"]
        if named != Format.JSON:
            where = f"--json --format {named}"
            raise InputError("--json and --format name two formats", where=where, hint="remove one of them")
    return value


FormatOption = Annotated[Format, typer.Option("--format", "-f", help="Output format.", callback=_check_formats)]
JsonFormatOption = Annotated[bool, typer.Option("--json", help="Same as --format json.", callback=_check_formats)]
"""For verbs that also have ``--format``."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""For verbs without ``--format``."""


def resolve_format(format: Format, json: bool) -> Format:  # noqa: A002 (the options' names)
    """Return the output format of a verb that has both options."""
    return Format.JSON if json else format


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    """Key of the rows, heading of JSON and CSV."""
    title: str = ""
    """Heading for people; empty: the name with its unit in words."""
    text: Callable[[Row], str] | None = None
    """From a row to what people read; None: by the name's unit."""
    below: int = 0
    """When to move to the lines below a row in a narrow terminal: 1 first (sentences), 2 next (values), 0 never, unless
    no column of the table may move."""

    def cell(self, row: Row) -> str:
        return self.text(row) if self.text else format_value(self.name, row.get(self.name))


def print_rows(
    rows: Iterable[Row],
    columns: Sequence[str | Column],
    format: Format = Format.TABLE,  # noqa: A002 (the option's name)
) -> None:
    """Print rows: rounded and with units for people (table, Markdown, LaTeX), unchanged for machines (JSON, CSV)."""
    known = [column if isinstance(column, Column) else Column(column) for column in columns]
    found = list(rows)
    if format is Format.JSON:
        print_json([{c.name: row.get(c.name) for c in known} for row in found])
    elif format is Format.TABLE:
        _print_table(found, known)
    else:
        render = {Format.CSV: _csv, Format.MARKDOWN: _markdown, Format.LATEX: _latex}[format]
        sys.stdout.write(render(found, known))


def print_json(value: Any) -> None:
    """Print a value as strict JSON; NaN and infinity become null, dataclasses, sets, paths and enums are allowed."""
    print(json.dumps(_json_value(value), ensure_ascii=False, allow_nan=False, indent=2))


def print_message(message: str) -> None:
    """Print a message to the user on standard error."""
    print(printable(message, keep="\n\t"), file=sys.stderr, flush=True)


def print_line(line: str) -> None:
    """Print and flush one line on standard output."""
    print(printable(line), flush=True)


def heading(name: str) -> str:
    """Return a column's heading for people: ``epoch_time_s`` -> ``epoch time (s)``."""
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')}{unit}"
    return f"{name.replace('_', ' ')} (%)" if name in _SHARES else name.replace("_", " ")


def format_value(name: str, value: Any) -> str:
    """Return a value for people, rounded by the unit in its column's name; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _number(name, value)
    return str(value)


_UNITS = {"_bytes": " (GiB)", "_per_s": "/s", "_s": " (s)", "_pct": " (%)", "_j": " (J)", "_w": " (W)"}
_SHARES = frozenset({"test_accuracy", "published_test_accuracy", "precision", "recall", "f1"})


def _number(name: str, value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / 2**30:.3f}"
    if name in _SHARES:
        return f"{100 * value:.2f}"
    if isinstance(value, int):
        return str(value)
    if name.endswith("_per_s"):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    if name.endswith("_s"):
        return f"{value:.1f}" if value >= 100 else f"{value:.3g}" if value < 1 else f"{value:.2f}"
    return f"{value:.6g}"


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LINE_END = re.compile(r"([,.:;]?)[ \t]*(?:\r?\n[ \t]*)+")


def printable(value: str, keep: str = "") -> str:
    """Escape control characters except those to ``keep``, so that no name can command the terminal (ECMA-48 sequences).

    Without a newline in ``keep``, lines are joined.
    """
    if "\n" not in keep:
        value = _LINE_END.sub(lambda m: f"{m[1] or ';'} ", value.strip("\r\n"))
    return _CONTROL.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), value)


_NEVER_FOLDED = frozenset({"run_id", "label"})
"""Columns that people copy from."""
_INDENT = " " * 4
_MAX_NOTE_LINES = 6
"""Lines of one sentence below a row."""
_MIN_NOTE_WIDTH = 20
"""Width of the lines below a row in the narrowest terminal."""


def _print_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print a table in full into a pipe, and fitted to the width of a terminal.

    No number or word is broken. A table that is too wide has its cells folded between words; where that is not enough,
    its last columns move to the lines below their row.
    """
    screen = console.Console(highlight=False)
    # Rich assumes 80 columns for a pipe, and for a dumb terminal without a height, and drops what does not fit.
    wide = console.Console(highlight=False, width=10_000, height=100)
    if not sys.stdout.isatty():
        wide.print(_grid(rows, columns))
        return

    def excess(kept: Sequence[Column]) -> int:
        return wide.measure(_grid(rows, kept)).maximum - screen.width

    kept: Sequence[Column]
    for moved in ((), (1,), (1, 2)):
        kept = [c for c in columns if c.below not in moved]
        if excess(kept) <= 0 or (2 in moved and len(kept) < len(columns)):
            break
    else:
        if widths := _folded_widths(rows, columns, excess(columns)):
            wide.print(_grid(rows, columns, widths))
            return
        kept = next((kept for n in range(len(columns) - 1, 0, -1) if excess(kept := columns[:n]) <= 0), columns[:1])
    _print_with_notes(wide, rows, kept, [c for c in columns if c not in kept], screen.width)


def _folded_widths(rows: Sequence[Row], columns: Sequence[Column], excess: int) -> list[int]:
    """Return column widths that save ``excess`` cells, the widest first; empty where a word would break."""
    widths, least = [], []
    for c in columns:
        texts = [printable(value) for value in (_heading(rows, c), *(c.cell(row) for row in rows))]
        widths.append(max(map(cells.cell_len, texts)))
        words = [word for value in texts for word in value.split()]
        least.append(widths[-1] if c.name in _NEVER_FOLDED else max(map(cells.cell_len, words), default=0))
    if sum(widths) - sum(least) < excess:
        return []
    for _ in range(excess):
        _, i = max((width, i) for i, width in enumerate(widths) if width > least[i])
        widths[i] -= 1
    return widths


def _grid(rows: Sequence[Row], columns: Sequence[Column], widths: Sequence[int] = ()) -> table.Table:
    """Return a table with one line for each row, unless widths are given."""
    grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, c in enumerate(columns):
        grid.add_column(
            text.Text(printable(_heading(rows, c))),
            justify="right" if _is_numeric(rows, c) else "left",
            width=widths[i] if widths else None,
            no_wrap=not widths,
        )
    for row in rows:
        grid.add_row(*(text.Text(printable(c.cell(row))) for c in columns))
    return grid


def _print_with_notes(
    wide: console.Console, rows: Sequence[Row], kept: Sequence[Column], moved: Sequence[Column], width: int
) -> None:
    """Print a table with one line for each row, and below each row the columns that moved."""
    with wide.capture() as captured:
        wide.print(_grid(rows, kept))
    *lines, last = captured.get().splitlines()
    head = len(lines) - len(rows)
    print(*lines[:head], sep="\n")
    for line, row in zip(lines[head:], rows, strict=True):
        print(line)
        texts = {c: printable(c.cell(row)) for c in moved}
        notes = [(value, _MAX_NOTE_LINES) for c, value in texts.items() if c.below == 1]
        values = ", ".join(f"{_heading(rows, c)}: {value}" for c, value in texts.items() if c.below != 1 and value)
        for note, max_lines in (*notes, (values, None)):
            wrapped = textwrap.wrap(
                note,
                max(width, _MIN_NOTE_WIDTH) - len(_INDENT),
                max_lines=max_lines,
                placeholder=" …",
                break_long_words=False,
                break_on_hyphens=False,
            )
            print(*(_INDENT + piece for piece in wrapped), sep="\n", end="\n" * bool(wrapped))
    print(last)


def _csv(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([c.name for c in columns])
    for row in rows:
        writer.writerow(["" if row.get(c.name) is None else _json_value(row[c.name]) for c in columns])
    return stream.getvalue()


def _markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    head, *body = _text_rows(rows, columns, _markdown_text)
    rule = ["---:" if _is_numeric(rows, c) else "---" for c in columns]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *body))


def _latex(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return a ``tabular`` that needs no package."""
    alignment = "".join("r" if _is_numeric(rows, c) else "l" for c in columns)
    head, *body = [" & ".join(line) + r" \\" for line in _text_rows(rows, columns, _latex_text)]
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _text_rows(rows: Sequence[Row], columns: Sequence[Column], escape: Callable[[str], str]) -> list[list[str]]:
    """Return the heading and the rows as people read them."""
    return [[escape(_heading(rows, c)) for c in columns], *([escape(c.cell(row)) for c in columns] for row in rows)]


_MARKDOWN_SPECIAL = re.compile(r"[\\`*<>&\[\]|~$]|(?<!\w)_|_(?!\w)|^[#+=-]")


def _markdown_text(value: str) -> str:
    return _MARKDOWN_SPECIAL.sub(lambda m: "\\" + m[0], printable(value))


_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    # After \\, LaTeX reads "[" as the start of its optional argument.
    "[": "{[}",
    "]": "{]}",
    **{c: "\\" + c for c in "&%$#_{}"},
}


def _latex_text(value: str) -> str:
    return "".join(_LATEX_SPECIAL.get(c, c) for c in printable(value))


def _heading(rows: Sequence[Row], column: Column) -> str:
    has_text = any(isinstance(row.get(column.name), str) for row in rows)
    return column.title or (column.name.replace("_", " ") if has_text else heading(column.name))


def _is_numeric(rows: Sequence[Row], column: Column) -> bool:
    values = [row.get(column.name) for row in rows]
    return any(isinstance(v, (int, float)) for v in values) and not any(isinstance(v, (str, bool)) for v in values)


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _json_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_json_value(v) for v in value)
    return value
