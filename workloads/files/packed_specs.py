"""The specs of many runs in one file: shared values once, and per run only its own.

    {"common": {"target": "sol", "train.model": "cnn", ...}, "own": ["run_id", "label", "train.seed"], "runs": [[...]]}

A thousand runs of one study differ in a few values, so the file has a tenth of the size of their ``spec.json`` files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from workloads.contract import SPEC_VERSION, Execution, Expectation, RunSpec, TrainConfig
from workloads.files.json_file import encode_json

_NAMES = [f.name for f in fields(RunSpec) if f.name != "train"]
_NAMES += [f"train.{f.name}" for f in fields(TrainConfig)]
_values_of = attrgetter(*("train.hardware.text" if name == "train.hardware" else name for name in _NAMES))


def pack_specs(specs: Sequence[RunSpec]) -> bytes:
    """Return the content of a file of one spec or more."""
    columns = dict(zip(_NAMES, zip(*map(_values_of, specs), strict=True), strict=True))
    constant = {
        n for n, values in columns.items() if all(v == values[0] for v in values) and len(set(map(type, values))) == 1
    }
    own = [name for name in _NAMES if name == "run_id" or name not in constant]  # 1, 1.0 and true differ
    common = {name: _plain(columns[name][0]) for name in _NAMES if name not in own}
    runs = [list(map(_plain, row)) for row in zip(*(columns[name] for name in own), strict=True)]
    return encode_json({"spec_version": SPEC_VERSION, "common": common, "own": own, "runs": runs})


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, (Execution, Expectation)) else value


def _is_constant(column: tuple[Any, ...]) -> bool:
    """Whether all values are the same; 1, 1.0 and true differ."""
    return column.count(column[0]) == len(column) and len(set(map(type, column))) == 1


def unpack_specs(content: bytes, indexes: Iterable[int] | None = None) -> list[RunSpec]:
    """Return all specs in a content, or those at some indexes. Raises ValueError: damaged, or of a newer version."""
    try:
        packed = json.loads(content)
        rows = packed["runs"] if indexes is None else [packed["runs"][index] for index in indexes]
        return [_spec(packed, row) for row in rows]
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a file of specs: {error!r}") from error


def _spec(packed: dict[str, Any], row: list[Any]) -> RunSpec:
    values = {**packed["common"], **dict(zip(packed["own"], row, strict=True))}
    train = {name.removeprefix("train."): values.pop(name) for name in list(values) if name.startswith("train.")}
    return RunSpec.from_json({"spec_version": packed["spec_version"], **values, "train": train})
