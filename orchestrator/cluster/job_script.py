"""ResourceShape + ClusterProfile -> the job script, byte for byte what Slurm gets.

Job name, array range and dependency are arguments of ``sbatch`` instead, as they differ for each submission. A site
replaces blocks of the template (``directives``, ``setup``, ``launch``, ``teardown``) with its own template, which
extends ``slurm.sh.j2``.
"""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Mapping
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2

from orchestrator.cluster import script_lint
from orchestrator.cluster.profile import ClusterProfile, CpuNodes, GpuNodes
from orchestrator.cluster.sbatch_options import DROPPABLE, CpusBy, GpuRequest, Launcher, Requeue, Vendor
from orchestrator.cluster.value_types import SHIPPED_TEMPLATE
from orchestrator.errors import InputError
from orchestrator.plugins import nearest
from orchestrator.shipped_files import jinja_environment
from orchestrator.units import format_time_limit
from workloads.contract import ResourceShape
from workloads.files.run_dir import jobs_folder

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

SIGNAL = "USR2"
"""Announces the time limit. Not USR1, which NCCL may catch (submitit, core/job_environment.py)."""
SIGNAL_LEAD_S = 90


class ScriptExit(IntEnum):
    """Exit codes of a script that cannot start its run; runs do not use them."""

    PROLOGUE = 90
    INTERPRETER = 91
    LAUNCHER = 92
    FOLDER = 93


def render(shape: ResourceShape, profile: ClusterProfile, *, runs: Path, python: str) -> str:
    """Render the job script of all runs of a shape.

    Args:
        shape: resources of one run.
        profile: the cluster.
        runs: absolute path of the runs folder.
        python: absolute path of the interpreter, unless the profile has one for these nodes.

    Raises:
        InputError: Slurm cannot take the path of the runs folder, or the user's template has an error.
    """
    jobs = _slurm_safe(jobs_folder(runs))
    nodes = _nodes(shape, profile)
    planned = directives(shape, profile, jobs=jobs)
    whole_node = shape.ask_gpus_per_node > shape.gpus_per_node
    values: dict[str, Any] = {
        "shape": shape,
        "profile": profile,
        "directives": [_option(name, value) for name, value in planned.items()],
        "environment": _environment(shape, profile, nodes),
        "first_path": f"{profile.slurm_bin}:" if profile.slurm_bin else "",
        "last_path": DEFAULT_PATH,
        "exits": ScriptExit,
        "prologue": [*nodes.prologue, *profile.prologue],
        "python": nodes.python or python,
        "jobs": jobs,
        "srun": shlex.join(_srun(shape, profile, nodes)),
        "num_visible": shape.gpus_per_node if whole_node else 0,
        "show_devices": _show_devices(shape, nodes) if whole_node else "",
    }
    text = _render(profile.template, values).replace("\r", "")
    for fault in chain(script_lint.script_faults(text, planned, profile.forbid), script_lint.launch_faults(text)):
        raise InputError(fault.what, where=profile.template or SHIPPED_TEMPLATE, hint=fault.hint)
    return text


def directives(shape: ResourceShape, profile: ClusterProfile, *, jobs: str) -> dict[str, str | bool]:
    """The ``#SBATCH`` options of a shape, in their order in the script.

    Empty values are left out, and options that the site forbids and a job can do without.
    """
    nodes = _nodes(shape, profile)
    batch_only = "B:" if profile.launcher is Launcher.NONE else ""
    lead_s = min(SIGNAL_LEAD_S, shape.time_limit_s // 10)
    options: dict[str, str | int | bool] = {
        "nodes": shape.nodes,
        "ntasks-per-node": _tasks_per_node(shape, profile),
        **_cpus(shape, profile, nodes),
        **(_gpus(shape, profile, nodes) if isinstance(nodes, GpuNodes) else {}),
        **nodes.mem_style.option(shape.mem_bytes, gpus=shape.ask_gpus_per_node, cpus=shape.cpus_per_node),
        "time": format_time_limit(shape.time_limit_s),
        "partition": shape.partition,
        "qos": shape.qos,
        "account": profile.account_for(nodes),
        "constraint": nodes.constraint,
        "exclusive": nodes.exclusive,
        "output": f"{jobs}/slurm-%A_%a.out",
        "open-mode": "append",
        "export": profile.export,
        "requeue": profile.requeue is Requeue.REQUEUE,
        "no-requeue": profile.requeue is not Requeue.REQUEUE,
        "signal": f"{batch_only}{SIGNAL}@{lead_s}",
        **profile.extra,
    }
    dropped = DROPPABLE & set(profile.forbid)
    return {k: v if v is True else str(v) for k, v in options.items() if v and k not in dropped}


def _nodes(shape: ResourceShape, profile: ClusterProfile) -> CpuNodes | GpuNodes:
    nodes = profile.nodes(shape.node_kind)
    assert nodes is not None, f"a shape of cluster {profile.name} has nodes there"
    return nodes


def _tasks_per_node(shape: ResourceShape, profile: ClusterProfile) -> int:
    return shape.ranks_per_node if profile.launcher is Launcher.SRUN else 1


def _cpus(shape: ResourceShape, profile: ClusterProfile, nodes: CpuNodes | GpuNodes) -> dict[str, int]:
    """The option that requests cores; none where the site decides."""
    tasks = _tasks_per_node(shape, profile)
    shares = {CpusBy.TASK: tasks, CpusBy.GPU: shape.ask_gpus_per_node, CpusBy.NONE: 0}[nodes.cpus_by]
    return {nodes.cpus_by.directive: shape.cpus_per_node // shares} if shares else {}


def _gpus(shape: ResourceShape, profile: ClusterProfile, nodes: GpuNodes) -> dict[str, str]:
    """The option that requests GPUs; none where the partition implies them."""
    per_node = shape.ask_gpus_per_node
    count = {
        GpuRequest.GRES: per_node,
        GpuRequest.GPUS: per_node * shape.nodes,
        GpuRequest.GPUS_PER_NODE: per_node,
        GpuRequest.GPUS_PER_TASK: per_node // _tasks_per_node(shape, profile),
        GpuRequest.NONE: 0,
    }[nodes.request]
    words = ["gpu" if nodes.request is GpuRequest.GRES else "", nodes.type, str(count)]
    return {nodes.request.directive: ":".join(filter(None, words))} if count else {}


def _srun(shape: ResourceShape, profile: ClusterProfile, nodes: CpuNodes | GpuNodes) -> list[str]:
    """Options of the job step. They repeat the job's: since Slurm 22.05, srun does not inherit --cpus-per-task."""
    tasks = _tasks_per_node(shape, profile)
    options: dict[str, object] = {"nodes": shape.nodes, "ntasks": shape.nodes * tasks, "ntasks-per-node": tasks}
    if nodes.cpus_by is CpusBy.TASK:
        options |= _cpus(shape, profile, nodes)
    options |= {"kill-on-bad-exit": 1, "wait": 60, "unbuffered": True}
    return [*(_option(name, value) for name, value in options.items()), *profile.srun_args]


def _show_devices(shape: ResourceShape, nodes: CpuNodes | GpuNodes) -> str:
    """Bash that leaves the first of a node's devices visible to a rank.

    It runs in the rank: Slurm sets the variable anew for each job step, and unsets it where it knows of no GPUs.
    """
    assert isinstance(nodes, GpuNodes), "devices are GPUs"
    name = nodes.visible_devices_variable
    every = ",".join(map(str, range(shape.ask_gpus_per_node)))
    return f'export {name}="$(cut -d, -f1-{shape.gpus_per_node} <<<"${{{name}:-{every}}}")"; exec "$@"'


def _environment(shape: ResourceShape, profile: ClusterProfile, nodes: CpuNodes | GpuNodes) -> dict[str, str]:
    """Variables of every rank; ``env`` of the cluster file overrides those that it may set."""
    environment = {
        "SUBMITIT_EXECUTOR": "slurm",
        # A user's db.py or workloads.py in the working directory must not shadow ours (python -P, since 3.11).
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(shape.cpus_per_rank),
        # Compute nodes often have no route to the internet: a download must fail at once, not after a time-out.
        "HF_HUB_OFFLINE": "1",
    }
    if profile.stage:
        environment["ORCHESTRATE_STAGE"] = profile.stage
    if isinstance(nodes, GpuNodes) and nodes.vendor is Vendor.NVIDIA:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if nodes.cpus_by is CpusBy.TASK and profile.launcher is not Launcher.NONE:
        # For a user's own srun in the prologue or template, which does not inherit --cpus-per-task (Slurm 22.05).
        environment["SRUN_CPUS_PER_TASK"] = str(shape.cpus_per_node // _tasks_per_node(shape, profile))
    return environment | profile.env


def _option(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def _slurm_safe(folder: Path) -> str:
    """Check that Slurm and submitit take the path of a folder as it is."""
    text = str(folder)
    wrong = next((c for c in text if c in "%\\" or not c.isprintable()), None)
    if wrong is not None:
        raise InputError(
            f"the path of the runs folder contains {wrong!r}",
            where=text,
            why="Slurm and submitit replace or drop it in the names of log files",
            hint="name another folder with --runs",
        )
    if not folder.is_absolute():
        raise InputError("the path of the runs folder is not absolute", where=text, hint="write it from / on")
    return text


def _render(user_template: str, values: dict[str, Any]) -> str:
    environment = jinja_environment("jobs", *([str(Path(user_template).parent)] if user_template else []))
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    name = Path(user_template).name if user_template else SHIPPED_TEMPLATE
    try:
        return environment.get_template(name).render(values)
    except Exception as error:  # a user's template is a program and may raise anything
        what, hint = _explain(error, values)
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f.lineno for f in frames if not f.filename.startswith("<") and not f.filename.endswith(".py")]
        line = getattr(error, "lineno", None) or (inside[-1] if inside else None)
        where = f"{user_template or name}{f': line {line}' if line else ''}"
        raise InputError(f"cannot render the template: {what}", where=where, hint=hint) from error


_NO_ATTRIBUTE = re.compile(r"'[\w.]*?(\w+) object' has no attribute '(\w+)'")
_UNDEFINED = re.compile(r"'(\w+)' is undefined")


def _explain(error: Exception, values: Mapping[str, Any]) -> tuple[str, str]:
    """Explain an error of a template, and how to fix it; for an unknown name, suggest the nearest known one."""
    if isinstance(error, RecursionError):
        return "it extends or includes itself, or is nested too deeply", f'extend "{SHIPPED_TEMPLATE}"'
    if isinstance(error, UnicodeDecodeError):
        return "a file that it extends or includes is not UTF-8", "save that file as UTF-8"
    message = str(error)
    if not isinstance(error, jinja2.TemplateError):
        return f"{type(error).__name__}: {message}", "correct the expression on that line"
    if found := _UNDEFINED.search(message):
        return message, nearest(found[1], values)
    found = _NO_ATTRIBUTE.search(message)
    owner = next((name for name, value in values.items() if found and type(value).__name__ == found[1]), None)
    if found is None or owner is None:
        return message, ""
    return f"{owner} has no '{found[2]}'", nearest(found[2], (n for n in dir(values[owner]) if not n.startswith("_")))
