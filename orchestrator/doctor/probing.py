"""``doctor --probe``: short jobs of the strategy ``probe`` that tell what compute nodes see.

They go through the same plan, script, queue, ranks and files as real runs, in a folder of their own below the runs
folder, which is taken away when nothing was wrong.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.backends.slurm.executor import REJECTION_HINT
from orchestrator.cluster import sample_scripts
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.config import experiment as experiments
from orchestrator.doctor.findings import Finding, fail, note, ok
from orchestrator.environment.interpreter import Packages
from orchestrator.planning import planner
from orchestrator.planning.plan import Plan, PlannedRun
from orchestrator.submission import submitter
from orchestrator.tracking import tracker
from orchestrator.tracking.recovery import NOT_STARTED
from orchestrator.tracking.tracker import RunStatus
from orchestrator.workspace import Workspace
from workloads.files.event_log import read_events
from workloads.files.json_file import read_json
from workloads.files.run_dir import AttemptDir, RunDir

POLL_S = 1.0
"""Between looks at the jobs' own files; Slurm is asked no more often than the cluster file says."""
CLOCK_TOLERANCE_S = 5.0
"""Two clocks that differ less agree: a job's first word travels over a network disk."""
MOST_PROBES = 8
TIME_LIMIT = "5m"


@dataclass(frozen=True, slots=True)
class Wish:
    """One probe: on which hardware, looking at which data set."""

    hardware: str
    dataset: str


def wishes(plan: Plan | None, profile: ClusterProfile) -> list[Wish]:
    """A probe of each hardware of the plan, each of its data sets looked at; without a plan, of each type there is."""
    if plan is not None and plan.runs:
        hardware = list(dict.fromkeys(str(run.cell.train.hardware) for run in plan.runs))
        datasets = list(dict.fromkeys(run.cell.train.dataset for run in plan.runs))
    else:
        made = [made for made in sample_scripts.samples(profile) if made.text]
        hardware = list(dict.fromkeys(m.hardware for m in made if not m.hardware.startswith("cpu") or not profile.gpu))
        datasets = ["digits"]
    count = max(len(hardware), len(datasets)) if hardware else 0
    every = [Wish(hardware[i % len(hardware)], datasets[i % len(datasets)]) for i in range(count)]
    return every[:MOST_PROBES]


def probe(
    workspace: Workspace, profile: ClusterProfile, plan: Plan | None, packages: Packages, *, patience_s: float
) -> Iterator[Finding]:
    """Send probes, wait for them, and say what they saw; those that do not start in time are cancelled.

    Args:
        workspace: of the runs; its data root is what the nodes look at.
        profile: the cluster.
        plan: the experiment's, if there is one.
        packages: of the jobs' interpreter, as they are here.
        patience_s: how long to wait.
    """
    wanted = wishes(plan, profile)
    if not wanted:
        yield note("probe", "no probe is possible: nothing can run on this cluster")
        return
    submitter.prepare_runs_folder(workspace.runs)
    folder = Path(tempfile.mkdtemp(dir=workspace.runs, prefix="doctor-"))
    with tempfile.TemporaryDirectory(prefix="orchestrate-") as local:
        place = Workspace.at(
            runs=folder / "runs",
            database=str(Path(local) / "results.db"),
            data_root=workspace.data_root,
            experiment=folder / "experiment.toml",
        )
        findings = list(dict.fromkeys(_go_through(place, profile, wanted, packages, patience_s)))
    yield from findings
    if all(finding.level == "ok" for finding in findings):
        yield ok("runs", f"{workspace.runs}: nodes write there, and it is read here")
        shutil.rmtree(folder, ignore_errors=True)
    else:
        yield note("probe", f"the files of the probes are in {folder}", "remove it when you have read them")


def _go_through(
    place: Workspace, profile: ClusterProfile, wanted: Sequence[Wish], packages: Packages, patience_s: float
) -> Iterator[Finding]:
    place.experiment.write_text(_experiment(wanted), encoding="utf-8")
    spec = experiments.load(place.experiment)
    made = planner.make_plan(place, spec, profile, None, {}, [], packages)
    for excluded in made.excluded:
        yield fail("probe", f"{excluded.fields['hardware']}: {excluded.why}")
    # What is wrong with the data here is said elsewhere; this is about how the nodes see it.
    plan = replace(made, checks=[])
    sent_at = time.time()
    done = submitter.submit_plan(place, plan)
    for message in dict.fromkeys(receipt.message for receipt in done.rejected):
        yield fail("probe", f"refused by Slurm: {message}", REJECTION_HINT)
    seen_at, statuses = _wait(place, patience_s)
    for run in plan.runs:
        status = statuses.get(run.cell.run_id)
        if status is not None and status.reason != "refused":
            yield from _tell(place, run, status, sent_at, seen_at.get(run.cell.run_id), packages, patience_s)


def _experiment(wanted: Sequence[Wish]) -> str:
    lines = ['name = "doctor"', "[defaults]", 'model = "cnn"', "epochs = 1", f'time_limit = "{TIME_LIMIT}"']
    lines += ['strategy = { name = "probe", look_at_data = true }']
    for wish in wanted:
        lines += ["[[include]]", f"hardware = {json.dumps(wish.hardware)}", f"dataset = {json.dumps(wish.dataset)}"]
    return "\n".join([*lines, ""])


def _wait(place: Workspace, patience_s: float) -> tuple[dict[str, float], dict[str, RunStatus]]:
    """When each run was first seen to have started, and its last state; what goes on after that is cancelled."""
    from db.connect import open_store
    from db.submissions import live_attempts

    deadline = time.monotonic() + patience_s
    seen_at: dict[str, float] = {}
    with open_store(place.database) as store:
        while True:
            tracker.refresh(store, place.runs)
            statuses = {status.run_id: status for status in tracker.statuses(store, place.runs)}
            for run_id in statuses.keys() - seen_at.keys():
                if _attempt(place, run_id).events().exists():
                    seen_at[run_id] = time.time()
            going_on = [status for status in statuses.values() if status.state.live]
            if not going_on or time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        records = live_attempts(store)
        for target in {record.target for record in records}:
            executor = tracker.find_executor(target, place.runs)
            if executor is not None:
                tokens = [(_attempt(place, r.run_id), r.token or "") for r in records if r.target == target]
                executor.cancel(tokens)
    return seen_at, statuses


def _attempt(place: Workspace, run_id: str) -> AttemptDir:
    return RunDir.of(place.runs, run_id).attempt(1)


def _tell(
    place: Workspace,
    run: PlannedRun,
    status: RunStatus,
    sent_at: float,
    seen_at: float | None,
    packages: Packages,
    patience_s: float,
) -> Iterator[Finding]:
    hardware = str(run.cell.train.hardware)
    if status.state.live:
        why = status.message or status.reason or status.state.value
        what = f"{hardware}: did not end within {patience_s:.0f} s ({status.state.value}: {why}), and was cancelled"
        yield note("probe", what, "try again later, or with more --probe-minutes")
        return
    attempt = _attempt(place, run.cell.run_id)
    events, _ = read_events(attempt.events(), 0, "start", "world", "data")
    by_kind = {event["event"]: event for event in reversed(events)}
    if status.state.ended_badly:
        what = f"{hardware}: {status.state.value}: {status.message or status.reason}"
        mend = NOT_STARTED.get(status.reason, "").partition(",")[0]
        yield fail("probe", what, f"{mend and mend + '; '}its logs: {status.job_id}* in {place.runs / 'jobs'}")
    else:
        yield ok("probe", _sight(hardware, by_kind.get("world", {})))
    yield from _data(run.cell.train.dataset, by_kind.get("data"))
    yield from _clock(by_kind.get("start"), sent_at, seen_at)
    if not status.state.ended_badly:
        yield from _environment(attempt, packages)


def _sight(hardware: str, world: Mapping[str, Any]) -> str:
    ranks = world.get("ranks", [])
    nodes = ", ".join(dict.fromkeys(rank["host"] for rank in ranks))
    devices = len({(rank["node"], device) for rank in ranks for device in rank["devices"]})
    cores = len({(rank["node"], core) for rank in ranks for core in rank["cores"]})
    counts = ((len(ranks), "rank"), (devices, "device"), (cores, "core"))
    said = ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counts)
    met = "; the ranks met" if len(ranks) > 1 else ""
    return f"{hardware}: {said} on {nodes}{met}"


def _data(dataset: str, told: Mapping[str, Any] | None) -> Iterator[Finding]:
    if told is None:
        return
    for problem in told["problems"]:
        what = f"{dataset}, seen from a node: {problem['where']}: {problem['what']}"
        yield fail("data", what, f"{problem['fix']}; it must be on a disk that compute nodes see")
    if not told["problems"]:
        yield ok("data", f"{dataset}, seen from a node")


def _clock(start: Mapping[str, Any] | None, sent_at: float, seen_at: float | None) -> Iterator[Finding]:
    """A job cannot start before it was sent, nor after it was seen: its own time says otherwise where clocks differ."""
    if start is None or seen_at is None:
        return
    node = start.get("node") or start.get("host")
    ahead_s, behind_s = start["time"] - seen_at, sent_at - start["time"]
    if max(ahead_s, behind_s) > CLOCK_TOLERANCE_S:
        how = f"{ahead_s:.0f} s ahead of" if ahead_s > behind_s else f"{behind_s:.0f} s behind"
        what = f"the clock of {node} is at least {how} this machine's"
        yield note("clock", what, "durations are measured on one machine each and hold; tell your site")
    else:
        yield ok("clock", f"{node} and this machine agree, as far as a job can tell")


def _environment(attempt: AttemptDir, packages: Packages) -> Iterator[Finding]:
    with contextlib.suppress(OSError, ValueError):
        about = read_json(attempt.result).get("provenance") or {}
        what = f"Python {about.get('python')} at {about.get('executable')} on {about.get('hostname')}"
        there, here = about.get("packages_digest", ""), packages.digest
        if here and there and here != there:
            fix = (
                "see PYTHONPATH and modules in the prologue: jobs should not find other packages than python does here"
            )
            yield note("environment", f"{what} has other packages than here", fix)
        else:
            yield ok("environment", what)
