"""Everything that is printed: five formats, any text, numbers for people and numbers for machines."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from db.statistics import Spread
from orchestrator.cli.output import (
    Column,
    Format,
    format_value,
    heading,
    print_json,
    print_line,
    print_message,
    print_rows,
    resolve_format,
)

HOSTILE = [
    "two words",
    'it\'s "quoted"',
    "$HOME; rm -rf / | cat & # 100% {a}_b ~ ^ \\n",
    "line\nbreak\ttab\rreturn",
    "日本 é \U0001f600",
    "=1+1",
    "[red]not markup[/red]",
    "\x1b[31mESC\x1b[0m \x07",
    "<b>&amp;</b> *star* `code` _under_ [link](x)",
    "half \udc80 surrogate",
    "",
]


def _printed(capsys: pytest.CaptureFixture[str], format: Format, values: list[Any], name: str = "label") -> str:  # noqa: A002
    print_rows([{name: value, "n": 1} for value in values], [name, "n"], format)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_json_and_csv_keep_any_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Read back, it is what it was: newlines, quotes, and a leading = too."""
    texts = [text for text in HOSTILE if "\udc80" not in text]
    assert [row["label"] for row in json.loads(_printed(capsys, Format.JSON, texts))] == texts
    back = list(csv.reader(io.StringIO(_printed(capsys, Format.CSV, texts), newline="")))
    assert [row[0] for row in back] == ["label", *texts]


@pytest.mark.parametrize("format", [Format.TABLE, Format.MARKDOWN, Format.LATEX])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_stays_in_its_line_and_commands_nothing(
    format: Format,  # noqa: A002
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As many lines as without it, and no control character."""
    plain = _printed(capsys, format, ["x"])
    hostile = _printed(capsys, format, [text])
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", hostile)


def test_a_table_shows_text_as_it_is_and_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe is not a terminal of 80 columns, and brackets are no markup."""
    out = _printed(capsys, Format.TABLE, ["[red]not markup[/red]", "x" * 300])
    assert "[red]not markup[/red]" in out
    assert "x" * 300 in out
    assert r"line; break\ttab\rreturn" in _printed(capsys, Format.TABLE, ["line\nbreak\ttab\rreturn"])


@pytest.mark.parametrize("columns", ["0", "5", "80"])
def test_a_narrow_terminal_loses_no_cell(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rich alone would print nothing at all, without a word."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    names = [f"column{n}" for n in range(30)]
    print_rows([{name: f"value-of-{name}" for name in names}], names, Format.TABLE)
    shown = capsys.readouterr().out
    assert [name for name in names if not re.search(rf"value-of-{name}\b", shown)] == []


@pytest.mark.parametrize("width", [10, 40, 60, 80, 100])
def test_no_number_and_no_word_is_broken_in_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where cells folded between their words do not fit either, the last columns stand below their row."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    spread = Column("test_accuracy", text=lambda row: f"{row['test_accuracy']} (97.50–97.78)")
    row = {"model": "vit_tiny", "strategy": "pipeline-parallel", "state": "succeeded", "test_accuracy": 98.33}
    row |= {"epoch_time_s": 1234.5, "total_time_s": 12345.6, "samples_per_s": 1000.0}
    print_rows([row, {**row, "model": "cnn"}], [spread if name == "test_accuracy" else name for name in row])
    lines = _lines(capsys)
    words = " ".join(lines).replace(",", "").split()
    for whole in ("vit_tiny", "pipeline-parallel", "succeeded", "98.33", "(97.50–97.78)", "1234.5", "12345.6", "1000"):
        assert words.count(whole) == (1 if whole == "vit_tiny" else 2)
    assert width < 40 or max(map(len, lines)) <= width
    first = next(line for line in lines if "vit_tiny" in line)
    assert "succeeded" in first or width < 60


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rank 0 failed\n  no room\n\nask", "rank 0 failed; no room; ask"),
        ("tried:\r\nA\n", "tried: A"),
        ("It ended.\nThen it began.", "It ended. Then it began."),
    ],
)
def test_lines_of_a_message_are_joined(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a table, in a line of its own, in a full-screen view; what is said on standard error keeps its lines."""
    print_line(text)
    assert capsys.readouterr().out == f"{shown}\n"
    print_rows([{"why": text}], ["why"], Format.MARKDOWN)
    assert capsys.readouterr().out.splitlines()[-1] == f"| {shown} |"


_WHY = "GPU 0 has 42.9 GB, 80 GB planned; not sent again: " + "mend expect_mem_gb in the cluster file, " * 4 + "or ask."
_ENDED = {"run_id": "a414347b3324a416", "label": "vit_tiny-local_sgd-a100x2-s0", "state": "wrong_hardware", "why": _WHY}
_STATUS: list[str | Column] = [
    "run_id",
    "label",
    "state",
    Column("why", below=1),
    Column("attempt", below=2),
    Column("epoch", below=2),
]


def _in_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("LINES", raising=False)  # test runners set it; with it a dumb terminal is as wide as it says
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    other = {**_ENDED, "run_id": "b414347b3324a416", "state": "running", "why": "", "epoch": "2/10"}
    print_rows([{**_ENDED, "attempt": 2}, {**other, "attempt": 1}], _STATUS)
    return _lines(capsys)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()]


@pytest.mark.parametrize("width", [70, 80, 100, 120])
def test_what_does_not_fit_a_terminal_stands_below_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """Run ids and labels are never folded, no line is too long, and no word of the reason is lost."""
    lines = _in_terminal(monkeypatch, capsys, width)
    assert max(map(len, lines)) <= width
    ended, running = (next(i for i, line in enumerate(lines) if line.startswith(f" {c}414347b3324a416")) for c in "ab")
    assert lines[ended].split()[:3] == list(_ENDED.values())[:3]
    assert lines[running].split()[:3] == ["b414347b3324a416", _ENDED["label"], "running"]
    below = " ".join(" ".join(lines[ended + 1 : running]).split())
    assert below.startswith(_WHY) and running - ended <= 6
    if width < 90:
        assert below.endswith(" attempt: 2") and lines[running + 1].split() == ["attempt:", "1,", "epoch:", "2/10"]
    else:
        assert lines[running].split()[3:] == ["1", "2/10"]


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_what_fits_a_terminal_is_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    lines = _in_terminal(monkeypatch, capsys, 400)
    if term == "dumb":  # has 80 columns, whatever it says
        assert lines[-2].split() == ["attempt:", "1,", "epoch:", "2/10"]
    else:
        assert len([line for line in lines if line]) == 4 and any(_WHY in line for line in lines)


def test_very_long_sentences_are_cut_in_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {**_ENDED, "why": "word " * 500 + "end"}
    print_rows([row], _STATUS)
    assert row["why"] in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_rows([row], _STATUS)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 12 and "…" in shown


def test_run_ids_and_labels_are_not_folded_where_other_columns_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_rows([_ENDED], ["run_id", "label", "state", "why"])
    lines = _lines(capsys)
    assert any(line.startswith(" a414347b3324a416   vit_tiny-local_sgd-a100x2-s0   ") for line in lines)
    assert max(map(len, lines)) <= 100 and len(lines) > 6


def test_markdown_means_its_text_literally(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells are not split by |, and underscores inside names stay as people write them."""
    out = _printed(capsys, Format.MARKDOWN, ["vit_tiny | *x* `y` <b> $z$ _u_"])
    assert out.splitlines() == [
        "| label | n |",
        "| --- | ---: |",
        r"| vit_tiny \| \*x\* \`y\` \<b\> \$z\$ \_u\_ | 1 |",
    ]


def test_latex_is_a_tabular_with_every_special_character_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    out = _printed(capsys, Format.LATEX, ['$a_b$ & 100% {#} ~^\\ <|> "q" [x]'])
    assert out.splitlines() == [
        r"\begin{tabular}{lr}",
        r"\hline",
        r"label & n \\",
        r"\hline",
        r"\$a\_b\$ \& 100\% \{\#\} \textasciitilde{}\textasciicircum{}\textbackslash{} "
        r"\textless{}\textbar{}\textgreater{} \textquotedbl{}q\textquotedbl{} {[}x{]} & 1 \\",
        r"\hline",
        r"\end{tabular}",
    ]


@pytest.mark.optional
def test_latex_compiles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")
    table = _printed(capsys, Format.LATEX, [text for text in HOSTILE if text.isascii()])
    preamble = "\\documentclass{article}\\usepackage[T1]{fontenc}\\begin{document}\n"
    (tmp_path / "t.tex").write_text(f"{preamble}{table}\\end{{document}}\n")
    command = ["pdflatex", "-halt-on-error", "-interaction=batchmode", "t.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


class _Case(NamedTuple):
    name: str
    value: Any
    text: str


@pytest.mark.parametrize(
    "case",
    [
        _Case("test_accuracy", 0.98765, "98.77"),
        _Case("test_accuracy", 1, "100.00"),
        _Case("precision", "bf16", "bf16"),
        _Case("peak_memory_bytes", 3 * 2**29, "1.500"),
        _Case("epoch_time_s", 0.01234, "0.0123"),
        _Case("epoch_time_s", 30.234, "30.23"),
        _Case("total_time_s", 1337.46, "1337.5"),
        _Case("samples_per_s", 12345.6, "12346"),
        _Case("samples_per_s", 0.5, "0.5"),
        _Case("lr", 0.1, "0.1"),
        _Case("seed", 1234567, "1234567"),
        _Case("train_loss", float("nan"), "nan"),
        _Case("channels_last", True, "yes"),
        _Case("test_loss", None, ""),
    ],
)
def test_numbers_for_people_have_the_unit_of_their_name(case: _Case) -> None:
    assert format_value(case.name, case.value) == case.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_accuracy", "test accuracy (%)"),
        ("peak_memory_bytes", "peak memory (GiB)"),
        ("epoch_time_s", "epoch time (s)"),
        ("samples_per_s", "samples/s"),
        ("gpu_utilization_pct", "gpu utilization (%)"),
        ("batch_size", "batch size"),
    ],
)
def test_headings_say_the_unit(name: str, expected: str) -> None:
    assert heading(name) == expected


def test_machines_get_names_and_numbers_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """No rounding, no unit; not measured is null in JSON and empty in CSV."""
    row = {"test_accuracy": 1 / 3, "peak_memory_bytes": 2**30, "test_loss": None, "diverged": False}
    print_rows([row], list(row), Format.JSON)
    assert json.loads(capsys.readouterr().out) == [row]
    print_rows([row], list(row), Format.CSV)
    expected = f"test_accuracy,peak_memory_bytes,test_loss,diverged\n{1 / 3},{2**30},,False\n"
    assert capsys.readouterr().out == expected


def test_a_precision_that_is_a_text_has_no_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """``precision`` names a share in the table ``classes`` and a number format in ``runs``."""
    print_rows([{"precision": "bf16"}], ["precision"], Format.MARKDOWN)
    assert capsys.readouterr().out.startswith("| precision |")
    print_rows([{"precision": 0.5}], ["precision"], Format.MARKDOWN)
    assert capsys.readouterr().out.startswith("| precision (%) |")


def test_no_rows_are_an_empty_table_and_an_empty_list(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([], ["a", "b"], Format.JSON)
    assert capsys.readouterr().out == "[]\n"
    print_rows([], ["a", "b"], Format.CSV)
    assert capsys.readouterr().out == "a,b\n"
    print_rows([], ["a", "b"])
    assert "a" in capsys.readouterr().out


def test_a_column_may_say_its_own_text_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    column = Column("n", "how many", lambda row: f"{row['n']} of 9")
    print_rows([{"n": 3}], [column], Format.MARKDOWN)
    assert capsys.readouterr().out.splitlines()[0::2] == ["| how many |", "| 3 of 9 |"]
    print_rows([{"n": 3}], [column], Format.JSON)
    assert json.loads(capsys.readouterr().out) == [{"n": 3}]


def test_facts_are_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    """What a program of ours hands over: dataclasses, enums, paths, sets, and numbers JSON lacks."""

    class Word(StrEnum):
        DONE = "done"

    print_json(
        {"a": float("inf"), "p": Path("/x"), "s": {2, 1}, "w": Word.DONE, "d": Spread(1, 0, float("nan"), 2), 3: (1,)}
    )
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None,
        "p": "/x",
        "s": [1, 2],
        "w": "done",
        "d": {"median": 1, "low": 0, "high": None, "n": 2},
        "3": [1],
    }


def test_talk_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_message("left out: a\x1b[2Jb\nsecond line")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "left out: a\\x1b[2Jb\nsecond line\n")


def test_json_is_short_for_its_format() -> None:
    assert resolve_format(Format.TABLE, True) is Format.JSON
    assert resolve_format(Format.CSV, False) is Format.CSV


def test_any_text_can_be_printed_in_the_c_locale() -> None:
    """As the command line sets it up; neither table nor JSON fails on what ASCII lacks."""
    code = (
        "from orchestrator import cli; cli.run(['--help']);"
        "from orchestrator.cli.output import *;"
        r"[print_rows([{'label': '\u65e5\u672c \xe9'}], ['label'], f) for f in Format]; print_message('\u65e5\u672c')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": ""},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().count("日本 é") == 5
    assert done.stderr.decode() == "日本\n"
