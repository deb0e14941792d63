"""What ``retry`` says when the plan is another one than the one that its runs were sent by."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from orchestrator.backends.slurm.records import ClusterFolder
from orchestrator.cli import output
from orchestrator.cluster import cluster_file
from orchestrator.config import experiment as experiments
from orchestrator.errors import OrchestrateError
from orchestrator.planning import plan_file
from orchestrator.planning.plan import Plan
from orchestrator.workspace import Workspace
from workloads.contract import RunSpec


def say_so(workspace: Workspace, specs: Iterable[RunSpec]) -> None:
    """Tell that runs to be sent again were planned otherwise since, or that the files of the plan were edited."""
    try:
        plan = plan_file.read(workspace.plan_file)
    except (OSError, ValueError):
        return  # nothing is planned here, so there is nothing to differ from
    sent = {spec.run_id: spec.label for spec in specs if spec.target == plan.target}
    if otherwise := [sent[run_id] for run_id in _planned_otherwise(workspace, plan) if run_id in sent]:
        more = f" and {len(otherwise) - 1} more" if len(otherwise) > 1 else ""
        output.talk(f"note: planned otherwise since they were sent: {otherwise[0]}{more}; {_ways_on(plan)}")
    elif edited := _edited(plan) if sent else []:
        say = "say" if len(edited) > 1 else "says"
        output.talk(f"note: the {' and the '.join(edited)} {say} otherwise than the last plan; {_ways_on(plan)}")


def _ways_on(plan: Plan) -> str:
    of_then = "time limit and memory" if plan.site is None else "time limit, memory and job script"
    return f"retry sends with the {of_then} of then, orchestrate submit with what is planned now"


def _planned_otherwise(workspace: Workspace, plan: Plan) -> list[str]:
    """Run ids whose job script in the plan is not the one that was sent last to its cluster for their shape."""
    folder = ClusterFolder(workspace.runs, plan.target)
    new = {script.shape for script in plan.scripts if folder.script(asdict(script.shape)) != script.text}
    return [run.cell.run_id for run in plan.runs if run.shape in new]


def _edited(plan: Plan) -> list[str]:
    """Which sources of the plan were edited; a file that is gone or has mistakes is another verb's to tell of."""
    found = []
    try:
        file = plan.experiment_file
        if file is not None and experiments.load(file, plan.sets).digest != plan.digests["experiment"]:
            found.append("experiment file")
    except OrchestrateError:
        pass
    if plan.site is None:
        return found
    try:
        named = os.environ.get("ORCHESTRATE_CLUSTER")
        profile = cluster_file.choose(
            local=False, named=Path(named) if named else None, cwd=Path.cwd(), hostname=socket.gethostname()
        )
    except OrchestrateError:
        return found
    if profile is not None and profile.name == plan.target and profile.digest != plan.digests["cluster"]:
        found.append("cluster file")
    return found
