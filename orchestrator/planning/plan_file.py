"""The one file that ``plan`` leaves for ``submit``: compact, whole or absent, and refused once edited."""

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
from workloads.files.json_file import write_bytes

PLAN_VERSION = 3


def save(plan: Plan, path: Path) -> None:
    """Write the plan file; shapes and executions once each, of a training configuration what is not default."""
    tables = _Tables()
    data = {
        "plan_version": PLAN_VERSION,
        "experiment": plan.experiment,
        "target": plan.target,
        "created_at": plan.created_at,
        "experiment_file": str(plan.experiment_file or ""),
        "sets": plan.sets,
        "digests": plan.digests,
        "merged": plan.merged,
        "gpu_hours": asdict(plan.gpu_hours),
        "checks": [asdict(check) for check in plan.checks],
        "runs_folder": str(plan.runs_folder),
        "data_root": str(plan.data_root or ""),
        "dataset_digests": plan.dataset_digests,
        "runs": [
            [
                run.cell.run_id,
                run.cell.label,
                run.state.value,
                run.why,
                tables.index(run.shape),
                tables.index(run.cell.execution),
                run.cell.train.identity(),
            ]
            for run in plan.runs
        ],
        "excluded": [[e.fields, e.rule, e.why] for e in plan.excluded],
        "site": asdict(plan.cluster) if plan.cluster else None,
        "packages": plan.packages,
        "scripts": [[s.name, tables.index(s.shape), s.text, [asdict(pair) for pair in s.queues]] for s in plan.scripts],
        "tables": tables.rows,
    }
    # Escaped: paths may hold bytes that are no UTF-8.
    body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()[1:]
    write_bytes(path, _SEAL_START + _seal(body) + body)


_SEAL_START = b'{"seal":"'


def _seal(body: bytes) -> bytes:
    """Shows that a plan file is as it was written: an edited one would send runs that are not what their ids say."""
    return hashlib.sha256(body).hexdigest().encode() + b'",'


class _Tables:
    """Shapes and executions are few and shared by many runs; the plan file holds each once."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._index: dict[ResourceShape | Execution, int] = {}

    def index(self, value: ResourceShape | Execution) -> int:
        if value not in self._index:
            self._index[value] = len(self.rows)
            self.rows.append(value.to_json() if isinstance(value, ResourceShape) else asdict(value))
        return self._index[value]


def read(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it was not written by this version, is damaged, or was edited.
    """
    content = path.read_bytes()
    head = len(_SEAL_START) + len(_seal(b""))
    if content[:head] != _SEAL_START + _seal(content[head:]):
        raise ValueError(f"{path}: damaged or edited, or not a plan of this version")
    data = json.loads(content)
    if data.get("plan_version") != PLAN_VERSION:
        raise ValueError(f"{path}: not a plan of this version")
    try:
        rows = data["tables"]
        shapes = {i: ResourceShape.from_json(row) for i, row in enumerate(rows) if "ranks_per_node" in row}
        executions = {i: Execution(**row) for i, row in enumerate(rows) if "hang_timeout_s" in row}
        runs = []
        for run_id, label, action, why, shape, execution, identity in data["runs"]:
            train = TrainConfig.from_json({k: v for k, v in identity.items() if k != "v"})
            cell = Cell(train=train, execution=executions[execution], run_id=run_id, label=label)
            runs.append(PlannedRun(cell, shapes[shape], CellState(action), why))
        return Plan(
            experiment=data["experiment"],
            target=data["target"],
            digests=data["digests"],
            runs=runs,
            excluded=[Excluded(fields=f, rule=r, why=w) for f, r, w in data["excluded"]],
            merged=data["merged"],
            gpu_hours=GpuHours(**data["gpu_hours"]),
            checks=[Check(**check) for check in data["checks"]],
            runs_folder=Path(data["runs_folder"]),
            data_root=Path(data["data_root"]) if data["data_root"] else None,
            dataset_digests=data["dataset_digests"],
            scripts=[Script(n, shapes[s], t, tuple(QueuePair(**pair) for pair in q)) for n, s, t, q in data["scripts"]],
            cluster=ClusterLimits.from_json(data["site"]) if data["site"] else None,
            packages=data["packages"],
            created_at=data["created_at"],
            experiment_file=Path(data["experiment_file"]) if data["experiment_file"] else None,
            sets=tuple(data["sets"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged plan ({error})") from error
