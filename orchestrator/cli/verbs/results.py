"""Show results as a table.

One row for each run, with the measurements of its newest successful attempt. In --where, ~ means contains, and an empty
value means not set. JSON and CSV have every column, unrounded, unless --select names some. With --group-by, values are
the median over runs that succeeded and did not diverge, with minimum and maximum, and n is the number of these runs.

--published adds the figures of [[published]] in the experiment file; give the --set options that the runs had.

Example: orchestrate results --where dataset=mnist --where "test_accuracy>0.97" --sort -samples_per_s

Example: orchestrate results --group-by model,strategy,hardware --format latex

Example: orchestrate results --published --set hardware=cpu
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import completion, options, output
from orchestrator.cli.output import Column, Format
from orchestrator.cli.refresh import report_problems, require_results
from orchestrator.errors import InputError
from orchestrator.workspace import DEFAULT_DATABASE, DEFAULT_EXPERIMENT, DEFAULT_RUNS, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, errors, ingest, queries, statistics
    from orchestrator.config import experiment as experiments
    from orchestrator.planning import published as published_figures

ORDER = 110

Row = Mapping[str, Any]

_METRICS = ("test_accuracy", "epoch_time_s", "total_time_s", "samples_per_s", "peak_memory_bytes")
_MAX_NAMED = 5
"""Runs that a note names."""

WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="KEY=VALUE",
        help="Show only runs that meet this condition; = != < <= > >= ~; repeatable.",
        autocompletion=completion.column,
    ),
]
SelectOption = Annotated[
    str, typer.Option("--select", "-s", metavar="KEY,...", help="Columns to show.", autocompletion=completion.columns)
]
GroupByOption = Annotated[
    str,
    typer.Option(
        "--group-by",
        "-g",
        metavar="KEY,...",
        help="Show median (min–max) over runs with equal values of these columns.",
        autocompletion=completion.columns,
    ),
]
SortOption = Annotated[
    str,
    typer.Option(
        "--sort", metavar="KEY", help="Sort by this column; -KEY for descending.", autocompletion=completion.column
    ),
]


def results(
    where: WhereOption = None,
    select: SelectOption = "",
    group_by: GroupByOption = "",
    sort: SortOption = "",
    published: Annotated[
        bool, typer.Option("--published", help="Show published figures of the experiment file beside measured ones.")
    ] = False,
    experiment: options.ExperimentOption = DEFAULT_EXPERIMENT,
    sets: options.SetOption = None,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002 (the option's name)
    json: output.JsonFormatOption = False,
    runs: options.RunsOption = DEFAULT_RUNS,
    database: options.DatabaseOption = DEFAULT_DATABASE,
) -> None:
    workspace = Workspace.at(runs=runs, database=database)
    style = output.resolve_format(format, json)
    by = _parse_columns(group_by, "--group-by")
    if by and published:
        raise InputError("--published is for single runs", where=f"--group-by {group_by}", hint="remove one of them")
    if sets and not published:
        why = "it changes what [[published]] of the experiment file is compared with"
        raise InputError("--set goes with --published", where=f"--set {sets[0]}", why=why, hint="add --published")
    spec = experiments.load(experiment, sets or []) if published else None
    selected = _parse_columns(select, "--select", spec)
    _require_measured(where or [])
    rows = _collect_and_query(workspace, where or [])
    if spec is not None:
        shown: Sequence[Row] = list(published_figures.with_published(rows, spec))
        columns = _published_columns(_run_columns(rows, selected, style), spec)
    elif by:
        # The columns of the group have one value each, which is shown once.
        metrics = [name for name in (selected or _METRICS) if name not in by]
        _require_numbers(metrics)
        shown = statistics.group_rows(rows, by, metrics)
        columns = _group_columns(shown, by, metrics, style)
    else:
        shown, columns = rows, _run_columns(rows, selected, style)
    output.print_rows(_sort(shown, sort) if sort else shown, columns, style)
    for note in (*_table_notes(rows, where or [], by), *_published_notes(shown, experiment, spec), *_run_notes(rows)):
        output.print_message(f"note: {note}")


def _collect_and_query(workspace: Workspace, where: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows that meet the conditions, after reading new results where the database is writable."""
    require_results(workspace)
    if not workspace.runs.is_dir():
        output.print_message(f"note: {workspace.runs}: there is no runs folder, so newer results are missing")
    try:
        with connect.open_store(workspace.database) as store:
            report_problems(ingest.collect(store, workspace.runs).problems)
    except errors.StoreReadOnlyError as error:
        output.print_message(f"note: {error.where}: {error.what}, so newer results are missing")
    with connect.open_store(workspace.database, read_only=True) as store:
        return queries.summaries(store, where)


def _table_notes(rows: Sequence[Row], where: Sequence[str], by: Sequence[str]) -> Iterator[str]:
    if where and not rows:
        yield f"no run has {' and '.join(where)}; = is the whole value (hardware=cpu:2), ~ a part of it"
    elif not rows:
        yield "no runs yet; next: orchestrate submit"
    if by and (differing := statistics.differing_columns(rows, by)):
        yield f"some rows combine runs that differ in {', '.join(differing)}: add these to --group-by, or use --where"
        if not {"code_digest", "packages_digest", "dataset_digest"}.isdisjoint(differing):
            yield "orchestrate plan shows which are stale, orchestrate submit --stale reruns them"


def _published_notes(shown: Sequence[Row], experiment: Path, spec: experiments.ExperimentSpec | None) -> Iterator[str]:
    if spec is None:
        return
    if not spec.published:
        yield f"{experiment} has no [[published]], so there are no published figures to show"
    if differing := published_figures.differing_settings(shown, experiments.load(experiment, [])):
        yield f"the published figures are for other work: these runs differ from the file in {', '.join(differing)}"


def _run_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which runs failed, which diverged, and how many have no result yet."""
    failed = [f"{row['label']} ({row['reason'] or row['state']})" for row in rows if statistics.is_failed(row)]
    diverged = [str(row["label"]) for row in rows if row["diverged"]]
    unfinished = sum(row["measured_attempt"] is None and not statistics.is_failed(row) for row in rows)
    for what, names in (("failed", failed), ("diverged (a loss was NaN or infinite)", diverged)):
        if names:
            more = f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            yield f"{len(names)} of {len(rows)} runs {what}: {', '.join(names[:_MAX_NAMED])}{more}"
    if unfinished:
        yield f"{unfinished} of {len(rows)} runs have no result yet"


def _parse_columns(text: str, option: str, spec: experiments.ExperimentSpec | None = None) -> list[str]:
    """Return the columns that the text of an option names, without duplicates; the figures of ``spec`` are some too."""
    known = list(queries.SUMMARY_COLUMNS)
    if spec is not None:
        known += [published_figures.PREFIX + name for name in (*published_figures.figures(spec), "on")]
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    return [_require_column(name, f"{option} {text}", known) for name in names]


def _require_column(name: str, where: str, known: Iterable[str]) -> str:
    prefix = published_figures.PREFIX
    columns = list(known)
    # Without --published, these columns are not misspelled but missing.
    if name.startswith(prefix) and not any(column.startswith(prefix) for column in columns):
        why = "published figures come from the experiment file"
        raise InputError(f"no column {name!r}", where=where, why=why, hint="add --published")
    return queries.require_column(name, where, columns)


def _require_measured(conditions: Sequence[str]) -> None:
    """Raise InputError for a condition on published figures, which the database does not have."""
    for condition in conditions:
        name = condition.strip()
        if name.startswith(published_figures.PREFIX):
            raise InputError(
                "conditions select by measured values",
                where=f"--where {condition}",
                why="published figures come from the experiment file",
                hint=f"--where {name.removeprefix(published_figures.PREFIX)}; --sort accepts published figures",
            )


def _require_numbers(names: Sequence[str]) -> None:
    for name in names:
        if queries.SUMMARY_COLUMNS[name] not in {int, float}:
            hint = "select only numbers with --group-by, and group by the others"
            raise InputError(f"{name} has no median", where="--select", hint=hint)


def _run_columns(rows: Sequence[Row], selected: Sequence[str], style: Format) -> list[str | Column]:
    if selected:
        return list(selected)
    if style.for_machines:
        return list(queries.SUMMARY_COLUMNS)
    first = ["experiment"] if len({row["experiment"] for row in rows}) > 1 else []
    return [*first, "label", Column("state", text=_describe_state), *_METRICS]


def _published_columns(measured: Sequence[str | Column], spec: experiments.ExperimentSpec) -> list[str | Column]:
    """Return the columns with each published figure to the right of the measured one, unless some were selected."""
    prefix = published_figures.PREFIX
    figures = published_figures.figures(spec)
    names = [column if isinstance(column, str) else column.name for column in measured]
    if any(name.startswith(prefix) for name in names):
        return list(measured)
    missing = [name for name in figures if name not in names]
    columns: list[str | Column] = []
    for column, name in [*zip(measured, names, strict=True), *zip(missing, missing, strict=True)]:
        columns += [column, prefix + name] if name in figures else [column]
    return [*columns, f"{prefix}on"]


def _describe_state(row: Row) -> str:
    remarks = [str(row["reason"])] if row["reason"] not in {None, "", row["state"]} else []
    remarks += ["diverged"] if row["diverged"] else []
    return f"{row['state']} ({', '.join(remarks)})" if remarks else str(row["state"])


def _group_columns(
    shown: Sequence[Row], by: Sequence[str], metrics: Sequence[str], style: Format
) -> list[str | Column]:
    if style.for_machines:
        spread = [name for m in metrics for name in (m, f"{m}_min", f"{m}_max")]
        return [*by, "n", "failed", "diverged", *spread]
    counts = ["n", *(name for name in ("failed", "diverged") if any(row[name] for row in shown))]
    return [*by, *counts, *(Column(m, text=_with_range(m)) for m in metrics)]


def _with_range(name: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        median, low, high = (output.format_value(name, row[key]) for key in (name, f"{name}_min", f"{name}_max"))
        return median if low == high else f"{median} ({low}–{high})"

    return text


def _sort(rows: Sequence[Row], option: str) -> list[Row]:
    """Return rows sorted by one column, those without a value last in either direction."""
    name = option.removeprefix("-")
    if rows:
        _require_column(name, f"--sort {option}", rows[0])
    with_value = [row for row in rows if row[name] is not None]
    with_value.sort(key=lambda row: row[name], reverse=name != option)
    return [*with_value, *(row for row in rows if row[name] is None)]
