"""Show tables of results.

One row a run, with what its newest successful attempt measured. ~ means contains, an empty value means not set.
JSON and CSV have every column, and numbers as they are, unless --select names some. With --group-by, numbers are
the median over runs that succeeded and did not diverge, with smallest and largest, n saying how many.

--published shows what [[published]] of the experiment file has for a run; give it the --set that the runs had.

Example: orchestrate results --where dataset=mnist --where "test_accuracy>0.97" --sort -samples_per_s

Example: orchestrate results --group-by model,strategy,hardware --format latex

Example: orchestrate results --published --set hardware=cpu
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import completion, output
from orchestrator.cli.collect_report import say_problems
from orchestrator.cli.options import DatabaseOption, ExperimentOption, RunsOption, SetOption
from orchestrator.cli.workspace_checks import insist_on_results
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace

if TYPE_CHECKING:
    from db.connect import Store
    from orchestrator.config.experiment import ExperimentSpec

ORDER = 110


_METRICS = ("test_accuracy", "epoch_time_s", "total_time_s", "samples_per_s", "peak_memory_bytes")


_NAMED = 5
"""How many runs a note names before it only counts."""


def results(
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            "-w",
            metavar="KEY=VALUE",
            help="Only runs for which this holds; = != < <= > >= ~; repeatable.",
            autocompletion=completion.column,
        ),
    ] = None,
    select: Annotated[
        str,
        typer.Option(
            "--select", "-s", metavar="KEY,...", help="The columns to show.", autocompletion=completion.columns
        ),
    ] = "",
    group_by: Annotated[
        str,
        typer.Option(
            "--group-by",
            "-g",
            metavar="KEY,...",
            help="Show median (min–max) over runs alike in these.",
            autocompletion=completion.columns,
        ),
    ] = "",
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="KEY",
            help="Sort by this column; -KEY for descending.",
            autocompletion=completion.column,
        ),
    ] = "",
    published: Annotated[
        bool, typer.Option("--published", help="Beside each figure, the one that the experiment file has of others.")
    ] = False,
    experiment: ExperimentOption = DEFAULT_EXPERIMENT,
    sets: SetOption = None,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    json: output.JsonFormatOption = False,
    runs: RunsOption = DEFAULT_RUNS,
    database: DatabaseOption = DEFAULT_DATABASE,
) -> None:
    from db import queries, statistics
    from orchestrator.config import experiment as experiments
    from orchestrator.planning.published import beside

    workspace = Workspace.at(runs=runs, database=database)
    style = output.resolve_format(format, json)
    shown: Sequence[Mapping[str, Any]]
    by = _keys(group_by, "--group-by")
    if by and published:
        raise InputError("--published is for single runs", where=f"--group-by {group_by}", hint="remove one of them")
    if sets and not published:
        why = "it changes what [[published]] of the experiment file is compared with"
        raise InputError("--set goes with --published", where=f"--set {sets[0]}", why=why, hint="add --published")
    others = experiments.load(experiment, sets or []) if published else None
    wanted = _keys(select, "--select", others)
    _insist_on_measured(where or [])
    with _collected(workspace) as store:
        rows = queries.summaries(store, where or [])
    if others is not None:
        shown = list(beside(rows, others))
        columns = _published_columns(_run_columns(rows, wanted, style), others)
    elif by:
        # A key is alike in a group: it stands there as it is, once.
        metrics = [name for name in (wanted or _METRICS) if name not in by]
        _insist_on_numbers(metrics)
        shown = statistics.group_rows(rows, by, metrics)
        columns = _group_columns(shown, by, metrics, style)
    else:
        shown = rows
        columns = _run_columns(rows, wanted, style)
    if sort:
        shown = _sorted(shown, sort)
    output.print_rows(shown, columns, style)
    for note in _notes(rows, where or [], by):
        output.print_message(f"note: {note}")
    if others is not None:
        for note in _notes_on_published(shown, experiment, others):
            output.print_message(f"note: {note}")
    _say_unfinished(rows)


@contextmanager
def _collected(workspace: Workspace) -> Iterator[Store]:
    """The store with new results taken in; as it is where it may only be read."""
    from db.connect import open_store
    from db.errors import StoreReadOnlyError
    from db.ingest import collect as take_in

    insist_on_results(workspace)
    if not workspace.runs.is_dir():
        output.print_message(f"note: {workspace.runs}: there is no runs folder, so newer results are not in it")
    try:
        with open_store(workspace.database) as store:
            say_problems(take_in(store, workspace.runs))
    except StoreReadOnlyError as error:
        output.print_message(f"note: {error.where}: {error.what}, so newer results are not in it")
    with open_store(workspace.database, read_only=True) as store:
        yield store


def _notes(rows: Sequence[Mapping[str, Any]], where: Sequence[str], by: Sequence[str]) -> Iterator[str]:
    """What a reader must know of the table as a whole."""
    from db import statistics

    if where and not rows:
        yield f"no run has {' and '.join(where)}; = is the whole value (hardware=cpu:2), ~ a part of it"
    elif not rows:
        yield "there are no runs yet; next: orchestrate submit"
    if by and (unlike := statistics.differing_columns(rows, by)):
        yield f"some rows are over runs that differ in {', '.join(unlike)}: group by them too, or use --where"
        if not {"code_digest", "packages_digest", "dataset_digest"}.isdisjoint(unlike):
            yield "orchestrate plan says which of them are stale, orchestrate submit --stale runs those again"


def _notes_on_published(shown: Sequence[Mapping[str, Any]], experiment: Path, others: ExperimentSpec) -> Iterator[str]:
    from orchestrator.config.experiment import load
    from orchestrator.planning.published import differences

    if not others.published:
        yield f"{experiment} has no [[published]], so there are no figures of others to show"
    if apart := differences(shown, load(experiment, [])):
        yield f"not the work of the published figures: these runs differ from the file in {', '.join(apart)}"


def _say_unfinished(rows: Sequence[Mapping[str, Any]]) -> None:
    """Which rows a reader must not take for good: what failed, what diverged, what is not finished."""
    from db.statistics import is_failed

    failed = [f"{row['label']} ({row['reason'] or row['state']})" for row in rows if is_failed(row)]
    diverged = [str(row["label"]) for row in rows if row["diverged"]]
    unfinished = sum(row["measured_attempt"] is None and not is_failed(row) for row in rows)
    for count, names in (("failed", failed), ("diverged (a loss was NaN or infinite)", diverged)):
        if names:
            more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            output.print_message(f"note: {len(names)} of {len(rows)} runs {count}: {', '.join(names[:_NAMED])}{more}")
    if unfinished:
        output.print_message(f"note: {unfinished} of {len(rows)} runs have no result yet")


def _keys(text: str, option: str, others: ExperimentSpec | None = None) -> list[str]:
    """The columns that an option names, each once; figures of others among them where these are shown."""
    from db.queries import SUMMARY_COLUMNS

    known = [*SUMMARY_COLUMNS, *(_columns_of_others(others) if others is not None else ())]
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    return [_known(name, f"{option} {text}", known) for name in names]


def _known(name: str, where: str, known: Iterable[str]) -> str:
    """The name of a column; one of others, where they are not shown, is no misspelling."""
    from db.queries import require_column
    from orchestrator.planning.published import PREFIX

    names = list(known)
    if name.startswith(PREFIX) and not any(column.startswith(PREFIX) for column in names):
        why = "figures of others come from the experiment file"
        raise InputError(f"no column {name!r}", where=where, why=why, hint="add --published")
    return require_column(name, where, names)


def _columns_of_others(spec: ExperimentSpec) -> list[str]:
    from orchestrator.planning.published import PREFIX, figures

    return [PREFIX + name for name in (*figures(spec), "on")]


def _insist_on_measured(conditions: Sequence[str]) -> None:
    """Raises InputError for a condition on figures of others: the database does not have them."""
    from orchestrator.planning.published import PREFIX

    for text in conditions:
        if text.strip().startswith(PREFIX):
            raise InputError(
                "conditions are on what was measured",
                where=f"--where {text}",
                why="figures of others come from the experiment file",
                hint=f"--where {text.strip().removeprefix(PREFIX)}; --sort takes figures of others",
            )


def _insist_on_numbers(names: Sequence[str]) -> None:
    from db.queries import SUMMARY_COLUMNS

    for name in names:
        if SUMMARY_COLUMNS[name] not in {int, float}:
            raise InputError(
                f"{name} has no median", where="--select", hint="with --group-by, select numbers only; the others group"
            )


def _run_columns(
    rows: Sequence[Mapping[str, Any]], wanted: Sequence[str], style: output.Format
) -> list[str | output.Column]:
    from db.queries import SUMMARY_COLUMNS

    if wanted:
        return list(wanted)
    if style.for_machines:
        return list(SUMMARY_COLUMNS)
    several = len({row["experiment"] for row in rows}) > 1
    return [*(["experiment"] if several else []), "label", output.Column("state", text=_state), *_METRICS]


def _published_columns(measured: Sequence[str | output.Column], spec: ExperimentSpec) -> list[str | output.Column]:
    """Each measured figure that others published too, theirs right of it; all other columns stay as they are.

    Where columns of others were selected, nothing is added.
    """
    from orchestrator.planning.published import PREFIX, figures

    names = [column if isinstance(column, str) else column.name for column in measured]
    if any(name.startswith(PREFIX) for name in names):
        return list(measured)
    both = [name for name in figures(spec) if name not in names]
    columns: list[str | output.Column] = []
    for column, name in [*zip(measured, names, strict=True), *zip(both, both, strict=True)]:
        columns += [column, PREFIX + name] if name in figures(spec) else [column]
    return [*columns, f"{PREFIX}on"]


def _state(row: Mapping[str, Any]) -> str:
    """A state with what a reader must know of it, in one cell."""
    remarks = [str(row["reason"])] if row["reason"] not in {None, "", row["state"]} else []
    remarks += ["diverged"] if row["diverged"] else []
    return f"{row['state']} ({', '.join(remarks)})" if remarks else str(row["state"])


def _group_columns(
    shown: Sequence[Mapping[str, Any]], by: Sequence[str], metrics: Sequence[str], style: output.Format
) -> list[str | output.Column]:
    if style.for_machines:
        spread = [name for m in metrics for name in (m, f"{m}_min", f"{m}_max")]
        return [*by, "n", "failed", "diverged", *spread]
    counts = ["n", *(name for name in ("failed", "diverged") if any(row[name] for row in shown))]
    return [*by, *counts, *(output.Column(m, text=_with_range(m)) for m in metrics)]


def _with_range(name: str) -> Any:
    def text(row: Mapping[str, Any]) -> str:
        median, low, high = (output.format_value(name, row[key]) for key in (name, f"{name}_min", f"{name}_max"))
        return median if low == high else f"{median} ({low}–{high})"

    return text


def _sorted(rows: Sequence[Mapping[str, Any]], sort: str) -> list[Mapping[str, Any]]:
    """Rows by one column; those without a value come last either way."""
    name = sort.removeprefix("-")
    if rows:
        _known(name, f"--sort {sort}", rows[0])
    with_value = sorted((row for row in rows if row[name] is not None), key=lambda row: row[name], reverse=sort != name)
    return [*with_value, *(row for row in rows if row[name] is None)]
