"""``doctor --probe``: short jobs of the strategy ``probe`` that report what compute nodes see.

They use the same plan, script, queue, ranks and files as other runs, in a folder of their own below the runs folder,
which is removed when nothing was wrong.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from db import connect, submissions
from orchestrator.backends.base import Attempt
from orchestrator.backends.slurm.executor import REJECTION_HINT
from orchestrator.cluster import sample_scripts
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.config import experiment as experiments
from orchestrator.doctor.findings import Finding, Level, fail, note, ok
from orchestrator.environment.interpreter import Packages
from orchestrator.planning import planner
from orchestrator.planning.plan import Plan, PlannedRun
from orchestrator.submission import submitter
from orchestrator.tracking import tracker
from orchestrator.tracking.recovery import NOT_STARTED
from orchestrator.tracking.tracker import RunStatus
from orchestrator.units import counted
from orchestrator.workspace import Workspace
from workloads.files.event_log import read_events
from workloads.files.json_file import read_json
from workloads.files.run_dir import AttemptDir, RunDir

POLL_S = 1.0
"""Between two checks of the jobs' own files, seconds; Slurm is queried no more often than the cluster file allows."""
CLOCK_TOLERANCE_S = 5.0
"""Clocks that differ less agree, seconds: NFS clients see a new file with a delay (nfs(5), attribute caching)."""
MAX_PROBES = 8
TIME_LIMIT = "5m"


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """One probe: on which hardware, checking which data set."""

    hardware: str
    dataset: str


def choose_probes(plan: Plan | None, profile: ClusterProfile) -> list[ProbeSpec]:
    """Return probes that cover each hardware and each data set of the plan; without one, each type of the cluster."""
    if plan is not None and plan.runs:
        hardware = list(dict.fromkeys(str(run.cell.train.hardware) for run in plan.runs))
        datasets = list(dict.fromkeys(run.cell.train.dataset for run in plan.runs))
    else:
        names = [sample.hardware for sample in sample_scripts.samples(profile) if sample.text]
        hardware = list(dict.fromkeys(name for name in names if not name.startswith("cpu") or not profile.gpu))
        datasets = ["digits"]
    count = max(len(hardware), len(datasets)) if hardware else 0
    probes = [ProbeSpec(hardware[i % len(hardware)], datasets[i % len(datasets)]) for i in range(count)]
    return probes[:MAX_PROBES]


def probe(
    workspace: Workspace, profile: ClusterProfile, plan: Plan | None, packages: Packages, *, patience_s: float
) -> Iterator[Finding]:
    """Submit probes, wait for ``patience_s`` seconds, cancel those that have not ended, and yield what they found.

    They check the workspace's data root, and compare ``packages``, which this machine sees, with those on the nodes.
    """
    probes = choose_probes(plan, profile)
    if not probes:
        yield note("probe", "no probe is possible: nothing can run on this cluster")
        return
    submitter.prepare_runs_folder(workspace.runs)
    folder = Path(tempfile.mkdtemp(dir=workspace.runs, prefix="doctor-"))
    with tempfile.TemporaryDirectory(prefix="orchestrate-") as local:
        files = Workspace.at(
            runs=folder / "runs",
            database=str(Path(local) / "results.db"),
            data_root=workspace.data_root,
            experiment=folder / "experiment.toml",
        )
        findings = list(dict.fromkeys(_Session(files, packages, patience_s).run(profile, probes)))
    yield from findings
    if all(finding.level is Level.OK for finding in findings):
        yield ok("runs", f"{workspace.runs}: nodes write there, and it is read here")
        shutil.rmtree(folder, ignore_errors=True)
    else:
        yield note("probe", f"the files of the probes are in {folder}", "remove it when you have read them")


@dataclass(slots=True)
class _Session:
    """Probes in a workspace of their own."""

    files: Workspace
    packages: Packages
    patience_s: float
    submitted_at: float = 0.0
    seen_at: dict[str, float] = field(default_factory=dict)
    """Run id to when this machine first saw that it had started, seconds since the epoch."""

    def run(self, profile: ClusterProfile, probes: Sequence[ProbeSpec]) -> Iterator[Finding]:
        self.files.experiment.write_text(_experiment(probes), encoding="utf-8")
        spec = experiments.load(self.files.experiment)
        plan = planner.make_plan(self.files, spec, profile, None, {}, [], self.packages)
        for excluded in plan.excluded:
            yield fail("probe", f"{excluded.fields['hardware']}: {excluded.why}")
        self.submitted_at = time.time()
        # Without its checks of the data: those are about this machine, and would keep the probes from being submitted.
        result = submitter.submit_plan(self.files, replace(plan, checks=[]))
        for message in dict.fromkeys(receipt.message for receipt in result.rejected):
            yield fail("probe", f"rejected by Slurm: {message}", REJECTION_HINT)
        statuses = self._wait()
        for run in plan.runs:
            status = statuses.get(run.cell.run_id)
            if status is not None and status.reason != "rejected":
                yield from self._findings(run, status)

    def _wait(self) -> dict[str, RunStatus]:
        """Wait for the probes, cancel those that are still live, and return the last states."""
        deadline = time.monotonic() + self.patience_s
        with connect.open_store(self.files.database) as store:
            while True:
                tracker.refresh(store, self.files.runs)
                statuses = {status.run_id: status for status in tracker.statuses(store, self.files.runs)}
                for run_id in statuses.keys() - self.seen_at.keys():
                    if self._attempt(run_id).events().exists():
                        self.seen_at[run_id] = time.time()
                if not any(status.state.live for status in statuses.values()) or time.monotonic() >= deadline:
                    break
                time.sleep(POLL_S)
            records = submissions.live_attempts(store)
        for target in {record.target for record in records}:
            executor = tracker.find_executor(target, self.files.runs)
            if executor is not None:
                executor.cancel([Attempt.of(self.files.runs, r) for r in records if r.target == target])
        return statuses

    def _attempt(self, run_id: str) -> AttemptDir:
        return RunDir.of(self.files.runs, run_id).attempt(1)

    def _findings(self, run: PlannedRun, status: RunStatus) -> Iterator[Finding]:
        hardware = str(run.cell.train.hardware)
        if status.state.live:
            why = status.message or status.reason or status.state.value
            ended = f"did not end within {self.patience_s:.0f} s ({status.state.value}: {why}), and was cancelled"
            yield note("probe", f"{hardware}: {ended}", "try again later, or with more --probe-minutes")
            return
        attempt = self._attempt(run.cell.run_id)
        events, _ = read_events(attempt.events(), 0, "start", "world", "data")
        by_kind = {event["event"]: event for event in reversed(events)}
        if status.state.ended_badly:
            what = f"{hardware}: {status.state.value}: {status.message or status.reason}"
            fix = NOT_STARTED.get(status.reason, "").partition(",")[0]
            logs = f"its logs: {status.job_id}* in {self.files.runs / 'jobs'}"
            yield fail("probe", what, f"{fix}; {logs}" if fix else logs)
        else:
            yield ok("probe", _describe_world(hardware, by_kind.get("world", {})))
        yield from _data(run.cell.train.dataset, by_kind.get("data"))
        yield from _clock(by_kind.get("start"), self.submitted_at, self.seen_at.get(run.cell.run_id))
        if not status.state.ended_badly:
            yield from _environment(attempt, self.packages)


def _experiment(probes: Sequence[ProbeSpec]) -> str:
    lines = ['name = "doctor"', "[defaults]", 'model = "cnn"', "epochs = 1", f'time_limit = "{TIME_LIMIT}"']
    lines += ['strategy = { name = "probe", look_at_data = true }']
    for spec in probes:
        lines += ["[[include]]", f"hardware = {json.dumps(spec.hardware)}", f"dataset = {json.dumps(spec.dataset)}"]
    return "\n".join([*lines, ""])


def _describe_world(hardware: str, world: Mapping[str, Any]) -> str:
    ranks = world.get("ranks", [])
    nodes = ", ".join(dict.fromkeys(rank["host"] for rank in ranks))
    devices = len({(rank["node"], device) for rank in ranks for device in rank["devices"]})
    cores = len({(rank["node"], core) for rank in ranks for core in rank["cores"]})
    counts = ", ".join(counted(n, word) for n, word in ((len(ranks), "rank"), (devices, "device"), (cores, "core")))
    return f"{hardware}: {counts} on {nodes}{'; the ranks met' if len(ranks) > 1 else ''}"


def _data(dataset: str, event: Mapping[str, Any] | None) -> Iterator[Finding]:
    if event is None:
        return
    for problem in event["problems"]:
        what = f"{dataset}, seen from a node: {problem['where']}: {problem['what']}"
        yield fail("data", what, f"{problem['fix']}; it must be on a disk that compute nodes see")
    if not event["problems"]:
        yield ok("data", f"{dataset}, seen from a node")


def _clock(start: Mapping[str, Any] | None, submitted_at: float, seen_at: float | None) -> Iterator[Finding]:
    """Compare clocks: a job cannot start before it was submitted, nor after its start was seen here."""
    if start is None or seen_at is None:
        return
    node = start.get("node") or start.get("host")
    ahead_s, behind_s = start["time"] - seen_at, submitted_at - start["time"]
    if max(ahead_s, behind_s) > CLOCK_TOLERANCE_S:
        how = f"{ahead_s:.0f} s ahead of" if ahead_s > behind_s else f"{behind_s:.0f} s behind"
        what = f"the clock of {node} is at least {how} this machine's"
        yield note("clock", what, "report it to your site; measured durations are valid, each is from one machine")
    else:
        yield ok("clock", f"{node} and this machine agree, as far as a job can tell")


def _environment(attempt: AttemptDir, packages: Packages) -> Iterator[Finding]:
    with contextlib.suppress(OSError, ValueError):
        about = read_json(attempt.result).get("provenance") or {}
        what = f"Python {about.get('python')} at {about.get('executable')} on {about.get('hostname')}"
        digest = about.get("packages_digest", "")
        if packages.digest and digest and packages.digest != digest:
            fix = "check PYTHONPATH and modules in the prologue: jobs should find the packages that python finds here"
            yield note("environment", f"{what} has other packages than here", fix)
        else:
            yield ok("environment", what)
