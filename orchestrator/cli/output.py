"""All that the command line prints: tables in five formats and JSON to standard output, talk to standard error."""

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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import all_written
from workloads.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Format(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"

    @property
    def for_machines(self) -> bool:
        """Whether values are written as they are, not rounded for people."""
        return self in {Format.JSON, Format.CSV}


def _alone(context: typer.Context, value: Any) -> Any:
    """The value of --format or --json.

    Raises:
        InputError: both were given, and they differ; raised by the second one.
    """
    if all_written(context, "format", "json"):
        asked = value if isinstance(value, str) else context.params["format"]
        if asked != Format.JSON:
            where = f"--json --format {asked}"
            raise InputError("two formats are asked for", where=where, hint="leave one of them out")
    return value


FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How to print.", callback=_alone)]
JsonFormatOption = Annotated[bool, typer.Option("--json", help="Same as --format json.", callback=_alone)]
"""Of a verb that has ``--format``."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""Of a verb that has not."""


def chosen(format: Format, json: bool) -> Format:  # noqa: A002 (the options' names)
    """The format of a command that has both options."""
    return Format.JSON if json else format


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    """Key of the rows, heading of JSON and CSV."""
    title: str = ""
    """Heading for people; empty: the name with its unit in words."""
    text: Callable[[Mapping[str, Any]], str] | None = None
    """From a row to what people read; None: by the name's unit."""
    below: int = 0
    """In a terminal that is too narrow, it goes below its row: 1, sentences, before 2, values. 0: it stays,
    unless no column of the table says otherwise."""

    def cell(self, row: Mapping[str, Any]) -> str:
        return self.text(row) if self.text else pretty(self.name, row.get(self.name))


def rows(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[str | Column],
    format: Format = Format.TABLE,  # noqa: A002 (the option's name)
    *,
    title: str = "",
) -> None:
    """Print rows. For people with units and rounding (table, Markdown, LaTeX), for machines as they are (JSON, CSV)."""
    known = [column if isinstance(column, Column) else Column(column) for column in columns]
    found = list(rows)
    if format is Format.JSON:
        facts([{c.name: row.get(c.name) for c in known} for row in found])
    elif format is Format.CSV:
        sys.stdout.write(_csv(found, known))
    elif format is Format.MARKDOWN:
        sys.stdout.write(_markdown(found, known))
    elif format is Format.LATEX:
        sys.stdout.write(_latex(found, known))
    else:
        _table(found, known, title)


def facts(value: Any) -> None:
    """Print a value as strict JSON: NaN and infinity become null; dataclasses, sets, paths and enums are understood."""
    print(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=2))


def talk(text: str) -> None:
    """Say something to the person at the terminal, on standard error."""
    print(visible(text, keep="\n\t"), file=sys.stderr, flush=True)


def line(text: str) -> None:
    """Print a line of data, at once."""
    print(visible(text), flush=True)


def heading(name: str) -> str:
    """The heading of a column of numbers, for people: ``epoch_time_s`` -> ``epoch time (s)``."""
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')}{unit}"
    return f"{name.replace('_', ' ')} (%)" if name in _SHARES else name.replace("_", " ")


def pretty(name: str, value: Any) -> str:
    """A value for people, rounded by the unit in its column's name. Nothing for what was not measured."""
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


def visible(text: str, keep: str = "") -> str:
    """Text in one line, unless newlines are kept, with other control characters as escapes: an ESC commands no
    terminal."""
    if "\n" not in keep:
        text = _LINE_END.sub(lambda m: f"{m[1] or ';'} ", text.strip("\r\n"))
    return _CONTROL.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


_NEVER_FOLDED = frozenset({"run_id", "label"})
"""What people copy."""
_INDENT = " " * 4
_MOST_LINES = 6
"""Of a sentence below a row."""
_LEAST_WIDTH = 20
"""Of the lines below a row, however narrow the terminal."""


def _table(found: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str) -> None:
    """Print a table: whole into a pipe; in a terminal as wide as that is, whatever does not fit below its row.

    No number or word is broken: where the table does not fit, its cells are folded between words; where that is not
    enough, the last columns go below.
    """
    from rich.console import Console

    screen = Console(highlight=False)
    # Rich takes a pipe for a terminal of 80 columns, and leaves out what a narrow one cannot hold.
    wide = Console(highlight=False, width=10_000, height=100)  # with no height a dumb terminal has 80 columns again
    if not sys.stdout.isatty():
        wide.print(_grid(found, columns, title))
        return

    def excess(kept: Sequence[Column]) -> int:
        return wide.measure(_grid(found, kept, title)).maximum - screen.width

    kept: Sequence[Column]
    for gone in ((), (1,), (1, 2)):
        kept = [c for c in columns if c.below not in gone]
        if excess(kept) <= 0 or (2 in gone and len(kept) < len(columns)):
            break
    else:
        if widths := _folded(found, columns, excess(columns)):
            wide.print(_grid(found, columns, title, widths))
            return
        kept = next((kept for n in range(len(columns) - 1, 0, -1) if excess(kept := columns[:n]) <= 0), columns[:1])
    aside = [c for c in columns if c not in kept]
    _print_with_notes(wide, _grid(found, kept, title), found, aside, screen.width)


def _folded(found: Sequence[Mapping[str, Any]], columns: Sequence[Column], excess: int) -> list[int]:
    """Widths of columns that are so much narrower in all, the widest ones first; none where a word would break."""
    from rich.cells import cell_len

    widths, least = [], []
    for c in columns:
        texts = [visible(text) for text in (_heading(found, c), *(c.cell(row) for row in found))]
        widths.append(max(map(cell_len, texts)))
        words = [word for text in texts for word in text.split()]
        least.append(widths[-1] if c.name in _NEVER_FOLDED else max(map(cell_len, words), default=0))
    if sum(widths) - sum(least) < excess:
        return []
    for _ in range(excess):
        _, i = max((width, i) for i, width in enumerate(widths) if width > least[i])
        widths[i] -= 1
    return widths


def _grid(
    found: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str, widths: Sequence[int] = ()
) -> Table:
    """A table; of one line a row, unless widths are given."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for i, c in enumerate(columns):
        table.add_column(
            Text(visible(_heading(found, c))),
            justify="right" if _is_numeric(found, c) else "left",
            width=widths[i] if widths else None,
            no_wrap=not widths,
        )
    for row in found:
        table.add_row(*(Text(visible(c.cell(row))) for c in columns))
    return table


def _print_with_notes(
    console: Console, grid: Table, found: Sequence[Mapping[str, Any]], aside: Sequence[Column], width: int
) -> None:
    """Print a table of one line a row, and below each row what has no column in it."""
    with console.capture() as captured:
        console.print(grid)
    *lines, last = captured.get().splitlines()
    head = len(lines) - len(found)
    print(*lines[:head], sep="\n")
    for line_, row in zip(lines[head:], found, strict=True):
        print(line_)
        texts = {c: visible(c.cell(row)) for c in aside}
        notes = [(text, _MOST_LINES) for c, text in texts.items() if c.below == 1]
        values = ", ".join(f"{_heading(found, c)}: {text}" for c, text in texts.items() if c.below != 1 and text)
        for note, max_lines in (*notes, (values, None)):
            lines_ = textwrap.wrap(
                note,
                max(width, _LEAST_WIDTH) - len(_INDENT),
                max_lines=max_lines,
                placeholder=" …",
                break_long_words=False,
                break_on_hyphens=False,
            )
            print(*(_INDENT + text for text in lines_), sep="\n", end="\n" * bool(lines_))
    print(last)


def _csv(found: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([c.name for c in columns])
    for row in found:
        writer.writerow(["" if row.get(c.name) is None else _plain(row[c.name]) for c in columns])
    return stream.getvalue()


def _markdown(found: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    lines = [
        [_markdown_text(_heading(found, c)) for c in columns],
        ["---:" if _is_numeric(found, c) else "---" for c in columns],
        *([_markdown_text(c.cell(row)) for c in columns] for row in found),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _latex(found: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """A ``tabular`` that needs no package."""
    alignment = "".join("r" if _is_numeric(found, c) else "l" for c in columns)
    head, *body = [
        " & ".join(cells) + r" \\"
        for cells in [
            [_latex_text(_heading(found, c)) for c in columns],
            *([_latex_text(c.cell(row)) for c in columns] for row in found),
        ]
    ]
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


_MARKDOWN_SPECIAL = re.compile(r"[\\`*<>&\[\]|~$]|(?<!\w)_|_(?!\w)|^[#+=-]")


def _markdown_text(text: str) -> str:
    return _MARKDOWN_SPECIAL.sub(lambda m: "\\" + m[0], visible(text))


_LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    # Behind a line's end, LaTeX would read "[" as that command's option.
    "[": "{[}",
    "]": "{]}",
    **{c: "\\" + c for c in "&%$#_{}"},
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX_SPECIAL.get(c, c) for c in visible(text))


def _heading(found: Sequence[Mapping[str, Any]], column: Column) -> str:
    has_text = any(isinstance(row.get(column.name), str) for row in found)
    return column.title or (column.name.replace("_", " ") if has_text else heading(column.name))


def _is_numeric(found: Sequence[Mapping[str, Any]], column: Column) -> bool:
    values = [row.get(column.name) for row in found]
    return any(isinstance(v, (int, float)) for v in values) and not any(isinstance(v, (str, bool)) for v in values)


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    return value
