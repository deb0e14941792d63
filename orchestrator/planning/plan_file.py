"""The file that ``plan`` leaves for ``submit``: compact, written whole or not at all, rejected once edited."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.backends.slurm.records import ClusterLimits, QueuePair
from orchestrator.planning.matrix import Cell, Excluded
from orchestrator.planning.plan import CellState, Check, GpuHours, Plan, PlannedRun, Script
from workloads.contract import Execution, ResourceShape, TrainConfig
from workloads.contract.flat import flat, from_flat
from workloads.files.json_file import write_bytes

PLAN_VERSION = 3

_JSON_FIELDS = ("experiment", "target", "created_at", "digests", "merged", "dataset_digests", "packages", "sets")
"""Fields of a plan that are JSON as they are."""


def save(plan: Plan, path: Path) -> None:
    """Write the plan file. It holds shapes and executions once each, and only the identity of a configuration."""
    tables: dict[ResourceShape | Execution, int] = {}

    def index(value: ResourceShape | Execution) -> int:
        return tables.setdefault(value, len(tables))

    data = {
        "plan_version": PLAN_VERSION,
        **{name: getattr(plan, name) for name in _JSON_FIELDS},
        "experiment_file": str(plan.experiment_file or ""),
        "gpu_hours": asdict(plan.gpu_hours),
        "checks": [asdict(check) for check in plan.checks],
        "runs_folder": str(plan.runs_folder),
        "data_root": str(plan.data_root or ""),
        "runs": [
            [
                run.cell.run_id,
                run.cell.label,
                run.state.value,
                run.why,
                index(run.shape),
                index(run.cell.execution),
                run.cell.train.identity(),
            ]
            for run in plan.runs
        ],
        "excluded": [[e.fields, e.rule, e.why] for e in plan.excluded],
        "site": asdict(plan.cluster) if plan.cluster else None,
        "scripts": [[s.name, index(s.shape), s.text, [asdict(pair) for pair in s.queues]] for s in plan.scripts],
    }
    data["tables"] = [value.to_json() if isinstance(value, ResourceShape) else flat(value) for value in tables]
    # ASCII: paths may contain bytes that are not UTF-8 (surrogateescape), which json writes as \udcXX.
    body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()[1:]
    write_bytes(path, _SEAL_START + _seal(body) + body)


_SEAL_START = b'{"seal":"'


def _seal(body: bytes) -> bytes:
    """Digest of the rest of the file: runs of an edited plan would not be what their run ids say."""
    return hashlib.sha256(body).hexdigest().encode() + b'",'


def read(path: Path) -> Plan:
    """Read a plan file; raise ValueError if it is from another version, damaged or edited."""
    content = path.read_bytes()
    head = len(_SEAL_START) + len(_seal(b""))
    if content[:head] != _SEAL_START + _seal(content[head:]):
        raise ValueError(f"{path}: damaged or edited, or not a plan of this version")
    data = json.loads(content)
    if data.get("plan_version") != PLAN_VERSION:
        raise ValueError(f"{path}: not a plan of this version")
    try:
        return _plan(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged plan ({error})") from error


def _plan(data: dict[str, Any]) -> Plan:
    tables = list(enumerate(data["tables"]))
    shapes = {i: from_flat(ResourceShape, row) for i, row in tables if "ranks_per_node" in row}
    executions = {i: Execution(**row) for i, row in tables if "hang_timeout_s" in row}
    runs = []
    for run_id, label, state, why, shape, execution, identity in data["runs"]:
        train = TrainConfig.from_json({k: v for k, v in identity.items() if k != "v"})
        cell = Cell(train=train, execution=executions[execution], run_id=run_id, label=label)
        runs.append(PlannedRun(cell, shapes[shape], CellState(state), why))
    return Plan(
        **{name: data[name] for name in _JSON_FIELDS if name != "sets"},
        sets=tuple(data["sets"]),
        runs=runs,
        excluded=[Excluded(fields=f, rule=r, why=w) for f, r, w in data["excluded"]],
        gpu_hours=GpuHours(**data["gpu_hours"]),
        checks=[Check(**check) for check in data["checks"]],
        runs_folder=Path(data["runs_folder"]),
        data_root=Path(data["data_root"]) if data["data_root"] else None,
        scripts=[Script(n, shapes[s], t, tuple(QueuePair(**pair) for pair in q)) for n, s, t, q in data["scripts"]],
        cluster=from_flat(ClusterLimits, data["site"]) if data["site"] else None,
        experiment_file=Path(data["experiment_file"]) if data["experiment_file"] else None,
    )
