"""ResourceShape + ClusterProfile -> the job script, byte for byte what Slurm gets. The only user of Jinja.

What only a submission knows (job name, array range, dependency) is not in the text. A site replaces blocks of the
template (``directives``, ``setup``, ``launch``, ``teardown``) with a template of its own that extends ``slurm.sh.j2``.
"""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Mapping
from enum import IntEnum
from importlib import resources as package_files
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
from orchestrator.units import format_time_limit
from workloads.contract import ResourceShape
from workloads.files.run_dir import jobs_folder

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

SIGNAL = "USR2"
"""Announces the time limit; NCCL may catch USR1."""
SIGNAL_LEAD_S = 90


class ScriptExit(IntEnum):
    """Exit codes of a script that could not start its run; a run's own codes are others."""

    PROLOGUE = 90
    INTERPRETER = 91
    LAUNCHER = 92
    FOLDER = 93


Directives = dict[str, str | bool]
"""Long option name to value; True for an option without one."""


def render(shape: ResourceShape, profile: ClusterProfile, *, runs: Path, python: str) -> str:
    """The text of the job script for all runs of a shape.

    Args:
        shape: what one run occupies.
        profile: the cluster it goes to.
        runs: absolute path of the runs folder.
        python: absolute path of the interpreter, unless the profile has one for these nodes.

    Raises:
        InputError: the path of the runs folder cannot be said to Slurm, or the user's template is wrong.
    """
    jobs = _sayable(jobs_folder(runs))
    nodes = _nodes(shape, profile)
    whole = shape.ask_gpus_per_node > shape.gpus_per_node
    wanted = directives(shape, profile, jobs=jobs)
    values: dict[str, Any] = {
        "shape": shape,
        "profile": profile,
        "directives": [_option(name, value) for name, value in wanted.items()],
        "environment": _environment(shape, profile, nodes),
        "first_path": f"{profile.slurm_bin}:" if profile.slurm_bin else "",
        "last_path": DEFAULT_PATH,
        "exits": ScriptExit,
        "prologue": [*nodes.prologue, *profile.prologue],
        "python": nodes.python or python,
        "jobs": jobs,
        "srun": shlex.join(_srun(shape, profile, nodes)),
        "num_visible": shape.gpus_per_node if whole else 0,
        "show_devices": _show_devices(shape, nodes) if whole else "",
    }
    text = _render(profile.template, values).replace("\r", "")
    _check(text, wanted, profile)
    return text


def directives(shape: ResourceShape, profile: ClusterProfile, *, jobs: str) -> Directives:
    """The ``#SBATCH`` lines of a shape as options, in the order in which they are written.

    An empty value is never written, and what the site forbids and a job can do without is left out.
    """
    nodes = _nodes(shape, profile)
    launched_by_srun = profile.launcher is Launcher.SRUN
    tasks_per_node = shape.ranks_per_node if launched_by_srun else 1
    batch_only = "B:" if profile.launcher is Launcher.NONE else ""
    lead_s = min(SIGNAL_LEAD_S, shape.time_limit_s // 10)
    options: dict[str, str | int | bool] = {
        "nodes": shape.nodes,
        "ntasks-per-node": tasks_per_node,
        **_cpus(shape, nodes, tasks_per_node),
        **(_gpus(shape, nodes, shape.ask_gpus_per_node, tasks_per_node) if isinstance(nodes, GpuNodes) else {}),
        **_memory(shape, nodes),
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


def _cpus(shape: ResourceShape, nodes: CpuNodes | GpuNodes, tasks_per_node: int) -> dict[str, int]:
    shares = {CpusBy.TASK: tasks_per_node, CpusBy.GPU: shape.ask_gpus_per_node, CpusBy.NONE: 0}[nodes.cpus_by]
    return {nodes.cpus_by.directive: shape.cpus_per_node // shares} if shares else {}


def _gpus(shape: ResourceShape, nodes: GpuNodes, per_node: int, tasks_per_node: int) -> dict[str, str]:
    """The one option that asks for GPUs; none where the partition says it."""
    count = {
        GpuRequest.GRES: per_node,
        GpuRequest.GPUS: per_node * shape.nodes,
        GpuRequest.GPUS_PER_NODE: per_node,
        GpuRequest.GPUS_PER_TASK: per_node // tasks_per_node,
        GpuRequest.NONE: 0,
    }[nodes.request]
    words = ["gpu" if nodes.request is GpuRequest.GRES else "", nodes.type, str(count)]
    return {nodes.request.directive: ":".join(filter(None, words))} if count else {}


def _memory(shape: ResourceShape, nodes: CpuNodes | GpuNodes) -> dict[str, str]:
    """The one option that asks for memory; none where the site decides."""
    return nodes.mem_style.option(shape.mem_bytes, gpus=shape.ask_gpus_per_node, cpus=shape.cpus_per_node)


def _srun(shape: ResourceShape, profile: ClusterProfile, nodes: CpuNodes | GpuNodes) -> list[str]:
    """Options of the job step: said again where srun does not take them over from the job in every version."""
    tasks_per_node = shape.ranks_per_node if profile.launcher is Launcher.SRUN else 1
    options: dict[str, object] = {
        "nodes": shape.nodes,
        "ntasks": shape.nodes * tasks_per_node,
        "ntasks-per-node": tasks_per_node,
    }
    if nodes.cpus_by is CpusBy.TASK:
        options |= _cpus(shape, nodes, tasks_per_node)
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
    """What every rank gets; the cluster file has the last word where it may have one."""
    environment = {
        "SUBMITIT_EXECUTOR": "slurm",
        # A user's own db.py or workloads.py in the working directory must not shadow ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(shape.cpus_per_rank),
        # Compute nodes often have no way out; a download must fail at once and not after a time-out.
        "HF_HUB_OFFLINE": "1",
    }
    if profile.stage:
        environment["ORCHESTRATE_STAGE"] = profile.stage
    if isinstance(nodes, GpuNodes) and nodes.vendor is Vendor.NVIDIA:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if nodes.cpus_by is CpusBy.TASK and profile.launcher is not Launcher.NONE:
        tasks_per_node = shape.ranks_per_node if profile.launcher is Launcher.SRUN else 1
        environment["SRUN_CPUS_PER_TASK"] = str(shape.cpus_per_node // tasks_per_node)
    return environment | profile.env


def _option(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"


def _sayable(folder: Path) -> str:
    """The folder as a text that Slurm and submitit take as it is."""
    text = str(folder)
    wrong = next((c for c in text if c in "%\\" or not c.isprintable()), None)
    if wrong is not None:
        raise InputError(
            f"the path of the runs folder holds {wrong!r}",
            where=text,
            why="Slurm and submitit replace or drop it in the names of log files",
            hint="name another folder with --runs",
        )
    if not folder.is_absolute():
        raise InputError("the path of the runs folder is not absolute", where=text, hint="jobs run elsewhere")
    return text


def _render(user_template: str, values: dict[str, Any]) -> str:
    shipped = jinja2.FileSystemLoader(str(package_files.files("templates") / "jobs"))
    own = [jinja2.FileSystemLoader(str(Path(user_template).parent))] if user_template else []
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([shipped, *own]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 (a shell script, not a page; values are quoted for the shell)
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    name = Path(user_template).name if user_template else SHIPPED_TEMPLATE
    try:
        return environment.get_template(name).render(values)
    except Exception as error:  # a template is a program of the user's: anything may go wrong in it
        what, hint = _fault(error, values)
        where = ": ".join(filter(None, [user_template or name, _line(error)]))
        raise InputError(f"the template cannot be filled: {what}", where=where, hint=hint) from error


def _line(error: Exception) -> str:
    """Where in a template an error came up, as far as is known; lines of Jinja and of ours do not count."""
    line = getattr(error, "lineno", None)
    if line is None:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f.lineno for f in frames if not f.filename.startswith("<") and not f.filename.endswith(".py")]
        line = inside[-1] if inside else None
    return f"line {line}" if line else ""


def _fault(error: Exception, values: Mapping[str, Any]) -> tuple[str, str]:
    """What is wrong with a template, and what to do."""
    if isinstance(error, jinja2.TemplateError):
        return _unknown_name(str(error), values)
    if isinstance(error, RecursionError):
        return "it extends or includes itself, or is nested too deeply", f'extend "{SHIPPED_TEMPLATE}"'
    if isinstance(error, UnicodeDecodeError):
        return "a file that it extends or includes is not UTF-8", "save that file as UTF-8"
    return f"{type(error).__name__}: {error}", "mend the expression there"


_NO_ATTRIBUTE = re.compile(r"'[\w.]*?(\w+) object' has no attribute '(\w+)'")
_UNDEFINED = re.compile(r"'(\w+)' is undefined")


def _unknown_name(said: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """What Jinja says of a name that does not exist, in the template's words, with the nearest that does."""
    if found := _UNDEFINED.search(said):
        return said, nearest(found[1], values)
    found = _NO_ATTRIBUTE.search(said)
    owner = next((name for name, value in values.items() if found and type(value).__name__ == found[1]), None)
    if found is None or owner is None:
        return said, ""
    known = (name for name in dir(values[owner]) if not name.startswith("_"))
    return f"{owner} has no '{found[2]}'", nearest(found[2], known)


def _check(text: str, wanted: Directives, profile: ClusterProfile) -> None:
    """Slurm reads ``#SBATCH`` only in column 0 and before the first command, and says nothing about the others.

    It says as little of a script that ends well and has started nothing.
    """
    fault = next(chain(script_lint.script_faults(text, wanted, profile.forbid), script_lint.launch_faults(text)), None)
    if fault is not None:
        raise InputError(fault.what, where=profile.template or SHIPPED_TEMPLATE, hint=fault.hint)
