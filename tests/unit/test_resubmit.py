"""Recovery at work without a cluster: what store and files say becomes a decision, and a decision an attempt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from db.connect import Store, open_store
from db.submissions import StatusUpdate, attempt_histories, record_intents, update_statuses
from orchestrator import cli
from orchestrator.backends import leases
from orchestrator.backends.base import Attempt, Receipt, Request, Status
from orchestrator.backends.slurm.queue_choice import StartEstimate
from orchestrator.backends.slurm.records import ClusterFolder, ClusterLimits
from orchestrator.submission import resubmit, submitter
from orchestrator.tracking import tracker
from orchestrator.tracking.assess import Assessment, assess_runs, resource_limits
from orchestrator.tracking.recovery import Decision, FailureClass, RecoveryAction
from orchestrator.workspace import Workspace
from workloads.contract import (
    Execution,
    Expectation,
    Hardware,
    RecoveryRecord,
    ResourceShape,
    RunSpec,
    State,
    TrainConfig,
)
from workloads.contract.flat import from_flat
from workloads.files.event_log import EventLog
from workloads.files.json_file import read_json
from workloads.files.run_dir import RunDir

GB = 2**30
SHAPE = ResourceShape(
    gpu="a100",
    ranks_per_node=2,
    ask_gpus_per_node=2,
    cpus_per_rank=3,
    mem_bytes=4 * GB,
    time_limit_s=3600,
    partition="htc",
    qos="public",
)
NODES = {"a100": {"mem_bytes": 64 * GB, "mem_style": "node", "max_time_s": {"htc/public": 5400}}}
SITE = ClusterLimits(name="sol", nodes=NODES, recovery={"lost": 1, "unheard_of": 9})


class FakeExecutor:
    """Accepts requests up to its limit, or rejects all; records them."""

    cancel_wait_s = 0.0

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.superseded: list[int] = []
        self.limit: int | None = None
        self.refusal = ""
        self.reason = ""

    def capacity(self) -> int | None:
        return self.limit

    def submit(self, requests: list[Request], *, wait: bool = True) -> list[Receipt]:
        if self.refusal:
            return [Receipt(d.token, State.FAILED, reason="rejected", message=self.refusal) for d in requests]
        self.submitted += requests
        for request in requests:
            request.materialize()
        return [Receipt(d.token, State.PENDING, job_id=f"7_{i}", reason="queued") for i, d in enumerate(requests)]

    def status(self, attempts: Any, *, fresh: bool = False) -> list[Status]:
        return [Status(attempt.recorded, self.reason) for attempt in attempts]

    def cancel(self, attempts: Any) -> None: ...

    def supersede(self, attempts: list[Attempt]) -> None:
        self.superseded += [attempt.number for attempt in attempts]

    def ensure_running(self) -> None: ...


class Campaign:
    """Runs that were submitted to a cluster, and how they ended."""

    def __init__(self, store: Store, workspace: Workspace, executor: FakeExecutor) -> None:
        self.store, self.workspace, self.executor = store, workspace, executor

    def send(self, *, retries: int = 0, seed: int = 0, shape: ResourceShape = SHAPE) -> RunDir:
        train = TrainConfig(
            model="cnn", dataset="digits", strategy="probe", hardware=Hardware("a100", 2), cpus=6, seed=seed
        )
        spec = RunSpec(
            run_id=train.run_id(),
            label=f"probe-s{seed}",
            experiment="e",
            train=train,
            execution=Execution(time_limit_s=3600, mem_bytes=4 * GB, retries=retries),
            expect=Expectation(ranks=2, nodes=1, gpus_per_node=2, cpus_per_rank=3),
            target="sol",
            data_root="",
        )
        run = RunDir.of(self.workspace.runs, spec.run_id)
        run.write_spec(spec)
        record_intents(self.store, self.workspace.runs, [(spec, shape)], "sol")
        return run

    def end(
        self, run: RunDir, state: State, reason: str = "", number: int = 1, *, checkpoint: bool = True, node: str = "n1"
    ) -> None:
        attempt = run.attempt(number).create()
        log = EventLog(attempt.events())
        log.write("start", rank=0, node=node)
        if checkpoint:
            log.write("checkpoint", epoch=1)
        log.close()
        Status(state, reason, "how it ended").write_exit(attempt)
        update_statuses(self.store, [StatusUpdate(run.run_id, number, state, reason=reason, message="how it ended")])

    def assessment(self, run: RunDir) -> Assessment:
        return assess_runs(self.store, self.workspace.runs)[run.run_id]

    def recover(self) -> list[str]:
        """Do what is due; what was said."""
        said: list[str] = []
        due = [o for o in assess_runs(self.store, self.workspace.runs).values() if o.decision.action.resubmits]
        if due:
            resubmit.recover(self.workspace, due, said.append)
        return said


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Campaign]:
    monkeypatch.setenv(leases.DOMAIN_VARIABLE, str(tmp_path))
    executor = FakeExecutor()
    monkeypatch.setattr(tracker, "find_executor", lambda target, runs: executor)
    monkeypatch.setattr(submitter, "_with_code", lambda runs, wanted, target, current_code: list(wanted))
    monkeypatch.setattr(resubmit.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(resubmit.queue_choice, "estimate", lambda *_: StartEstimate(start="2026-11-28T02:48:23"))
    runs = tmp_path / "runs"
    runs.mkdir()
    ClusterFolder(runs, "sol").keep(SITE, {})
    database = str(tmp_path / "results.db")
    with open_store(database) as store:
        yield Campaign(store, Workspace(runs=runs, database=database, data_root=None), executor)


def test_from_a_time_out_to_the_next_attempt(campaign: Campaign) -> None:
    """The raised limit is in the spec, the shape, the options of sbatch, the store and the files; and it is counted."""
    run = campaign.send()
    campaign.end(run, State.TIMEOUT, "time_limit")
    assert campaign.assessment(run).message == (
        "will be resubmitted with a time limit of 0-01:30:00 instead of 0-01:00:00 (1 of 4 for timeout)"
    )
    assert campaign.recover() == [
        "probe-s0: timeout; resubmitted with a time limit of 0-01:30:00 instead of 0-01:00:00 after attempt 1 "
        "(1 of 4 for timeout), as attempt 2"
    ]
    (request,) = campaign.executor.submitted
    assert request.spec.execution == Execution(time_limit_s=5400, mem_bytes=4 * GB)
    assert request.submission.shape.time_limit_s == 5400 and request.submission.shape.arguments == {
        "time": "0-01:30:00"
    }
    assert request.submission.shape.script == SHAPE.key(), "the script is the one that the plan showed"
    told = read_json(run.attempt(2).submission)
    assert (told["time_limit_s"], told["shape"]) == (5400, request.submission.shape.to_json())
    (status,) = tracker.statuses(campaign.store, campaign.workspace.runs)
    assert (status.state, status.recovery, status.recoveries) == (State.PENDING, "raise_time", 1)
    assert status.recovery_message.startswith("resubmitted with a time limit of 0-01:30:00")
    (records,) = attempt_histories(campaign.store).values()
    assert [record.recovery for record in records] == [None, from_flat(RecoveryRecord, told["recovery"])]
    assert campaign.recover() == [], "what is under way is left alone"
    # The cap is reached: it goes on with what it had, under the same script.
    campaign.end(run, State.TIMEOUT, "time_limit", 2)
    campaign.recover()
    assert campaign.executor.submitted[-1].submission.shape == request.submission.shape


def test_other_classes_add_to_the_same_request(campaign: Campaign) -> None:
    run = campaign.send()
    campaign.end(run, State.TIMEOUT, "time_limit")
    campaign.recover()
    campaign.end(run, State.OUT_OF_MEMORY, "host_memory", 2)
    campaign.recover()
    campaign.end(run, State.NODE_FAIL, "node_fail", 3)
    campaign.recover()
    assert campaign.executor.submitted[-1].submission.shape.arguments == {
        "time": "0-01:30:00",
        "mem": "8G",
        "exclude": "n1",
    }
    assert campaign.executor.superseded == [3], "only what Slurm might start again"
    assert campaign.assessment(run).recoveries == 3


@pytest.mark.parametrize(
    ("style", "argument"),
    [("node", {"mem": "8G"}), ("per_gpu", {"mem-per-gpu": "4G"}), ("per_cpu", {"mem-per-cpu": "1366M"})],
)
def test_memory_is_requested_in_the_form_of_the_site(style: str, argument: dict[str, str]) -> None:
    site = ClusterLimits(name="sol", nodes={"a100": {"mem_style": style}})
    decision = Decision(action=RecoveryAction.RAISE_MEMORY, time_limit_s=3600, mem_bytes=8 * GB)
    assert resubmit.next_shape(SHAPE, decision, site).arguments == argument


def test_an_unchanged_resubmission_keeps_its_shape() -> None:
    """It joins an array with others of that shape; on this machine there are no options of sbatch."""
    same = Decision(action=RecoveryAction.RESUBMIT, time_limit_s=3600, mem_bytes=4 * GB)
    assert resubmit.next_shape(SHAPE, same, SITE) == SHAPE
    longer = Decision(action=RecoveryAction.RAISE_TIME, time_limit_s=7200, mem_bytes=None)
    assert resubmit.next_shape(SHAPE, longer, None) == replace(SHAPE, time_limit_s=7200, mem_bytes=None)


def test_resource_limits_of_a_cluster() -> None:
    """The limit is the queue's, or the longest if Slurm may choose another; nodes that the user excludes stay so."""
    assert resource_limits(SHAPE, 3600, SITE).max_time_s == 5400
    assert resource_limits(replace(SHAPE, qos="other"), 3600, SITE).max_time_s == 0
    queues = {"a100": {"max_time_s": {"htc/public": 5400, "public/public": 9000}}}
    assert (
        resource_limits(SHAPE, 3600, ClusterLimits(name="s", nodes=queues, queue_choice="earliest")).max_time_s == 9000
    )
    assert resource_limits(SHAPE, 3600, ClusterLimits(name="s", excluded="n7,n8")).excluded == ("n7", "n8")
    assert resource_limits(
        replace(SHAPE, arguments={"exclude": "n1"}), 3600, ClusterLimits(name="s", excluded="n7")
    ).excluded == ("n1",)
    here = resource_limits(ResourceShape(), 60, None)
    assert not here.takes_mem and not here.has_nodes


def test_the_last_node_is_not_excluded(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is queried before a node is excluded; if it has no other, the run keeps its state and message, and the
    decision stands with its remedy until people send it again."""
    asked: list[tuple[str, ...]] = []
    answers = ["", "Requested node configuration is not available"]

    def estimate(script: Path, *arguments: str) -> StartEstimate:
        asked.append(arguments)
        return StartEstimate(rejection=answers[len(asked) - 1])

    monkeypatch.setattr(resubmit.queue_choice, "estimate", estimate)
    runs = [campaign.send(seed=seed) for seed in (0, 1)]
    for run in runs:
        campaign.end(run, State.WRONG_HARDWARE, "wrong_hardware")
    campaign.recover()
    assert [d.submission.shape.arguments for d in campaign.executor.submitted] == [{"exclude": "n1"}] * 2
    for run in runs:
        campaign.end(run, State.WRONG_HARDWARE, "wrong_hardware", 2, node="n2")
    why = (
        "not resubmitted: without n1, n2 Slurm has no node for it (Requested node configuration is not available); "
        "correct type, expect_name or expect_mem_gb in the cluster file, then orchestrate submit"
    )
    assert campaign.recover() == [f"probe-s{seed}: wrong_hardware; {why}" for seed in (0, 1)]
    assert asked == [("--exclude=n1",), ("--exclude=n1,n2",)], "once for both runs"
    assert len(campaign.executor.submitted) == 2 and campaign.recover() == []
    for status in tracker.statuses(campaign.store, campaign.workspace.runs):
        assert (status.state, status.attempt, status.recovery) == (State.WRONG_HARDWARE, 2, "stop")
        assert (status.message, status.recovery_message) == ("how it ended", why)


@pytest.mark.parametrize("refusal", ["", "Unable to contact slurm controller (connect failure)"])
def test_a_node_is_excluded_unless_it_is_the_last(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    monkeypatch.setattr(resubmit.queue_choice, "estimate", lambda *_: StartEstimate(rejection=refusal))
    campaign.end(campaign.send(), State.NODE_FAIL, "node_fail")
    campaign.recover()
    assert campaign.executor.submitted[0].submission.shape.arguments == {"exclude": "n1"}


def test_a_rejected_resubmission_keeps_the_cause(campaign: Campaign) -> None:
    """The message has what ended the run first, then why Slurm rejected the resubmission."""
    run = campaign.send()
    campaign.end(run, State.TIMEOUT, "time_limit")
    campaign.executor.refusal = "Requested time limit is invalid"
    assert campaign.recover() == ["resubmission was rejected: Requested time limit is invalid"]
    (status,) = tracker.statuses(campaign.store, campaign.workspace.runs)
    assert (status.state, status.reason, status.attempt) == (State.FAILED, "rejected", 2)
    assert status.message == "how it ended; its resubmission was rejected: Requested time limit is invalid"
    assert Status.read_exit(run.attempt(2)) == Status(State.FAILED, "rejected", status.message)
    assert status.recovery_message.endswith("was rejected; orchestrate submit submits the run as it is planned now")


def _verb(campaign: Campaign, *argv: str) -> int:
    return cli.run([*argv, "--runs", str(campaign.workspace.runs), "--db", campaign.workspace.database])


def test_logs_of_an_attempt_that_never_ran_name_the_previous_one(
    campaign: Campaign, capsys: pytest.CaptureFixture[str]
) -> None:
    run = campaign.send()
    campaign.end(run, State.TIMEOUT, "time_limit")
    campaign.executor.refusal = "Requested time limit is invalid"
    campaign.recover()
    assert _verb(campaign, "logs", "probe-s0") == 1
    said = capsys.readouterr().err
    assert (
        f"run {run.run_id} attempt 2 has no such logs: it wrote none, or orchestrate clean --logs removed them\n"
        "  why: it is failed: how it ended; its resubmission was" in said
    )
    assert said.endswith("\n  fix: orchestrate logs probe-s0 --attempt 1\n")


@pytest.mark.parametrize(
    ("count", "said"), [(1, "Slurm is still ending 1 of them"), (2, "Slurm is still ending 2 of them")]
)
def test_cancel_counts_what_slurm_has_not_ended_yet(
    campaign: Campaign,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    said: str,
) -> None:
    from orchestrator.cli.verbs import cancel

    for seed in range(count):
        run = campaign.send(seed=seed)
        update_statuses(campaign.store, [StatusUpdate(run.run_id, 1, State.PENDING, job_id="7")])
    monkeypatch.setattr(cancel, "_cancel", lambda *_: [])
    assert _verb(campaign, "cancel", "--all") == 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "hint"),
    [("", "it is under way"), ("cancelling", "it is being cancelled; retry it when orchestrate status")],
)
def test_retry_of_a_live_run(campaign: Campaign, capsys: pytest.CaptureFixture[str], reason: str, hint: str) -> None:
    run = campaign.send()
    update_statuses(campaign.store, [StatusUpdate(run.run_id, 1, State.RUNNING)])
    campaign.executor.reason = reason
    assert _verb(campaign, "retry", "probe-s0") == 2
    assert f"(probe-s0) is running: nothing to retry\n  fix: {hint}" in capsys.readouterr().err


def test_a_retry_uses_all_nodes_again() -> None:
    """retry includes the nodes again that recovery excluded; raised time and memory stay."""
    out = Decision(action=RecoveryAction.EXCLUDE_NODE, time_limit_s=3600, mem_bytes=4 * GB, excluded=("n1",))
    assert resubmit.without_exclusions(resubmit.next_shape(SHAPE, out, SITE)) == SHAPE
    both = Decision(action=RecoveryAction.EXCLUDE_NODE, time_limit_s=7200, mem_bytes=4 * GB, excluded=("n1",))
    kept = resubmit.without_exclusions(resubmit.next_shape(SHAPE, both, SITE))
    assert (kept.arguments, kept.script) == ({"time": "0-02:00:00"}, SHAPE.key())
    assert resubmit.without_exclusions(ResourceShape()) == ResourceShape()


def test_at_the_submit_limit_a_run_stays_due(campaign: Campaign) -> None:
    runs = [campaign.send(seed=seed) for seed in (0, 1)]
    for run in runs:
        campaign.end(run, State.LOST, "unknown_to_slurm")
    campaign.executor.limit = 1
    assert len(campaign.recover()) == 1
    assert sorted(campaign.assessment(run).decision.action for run in runs) == ["none", "resubmit"]


def test_two_commands_at_once_resubmit_a_run_once(campaign: Campaign) -> None:
    """Both decide before either submits."""
    run = campaign.send()
    campaign.end(run, State.PREEMPTED, "preempted")
    due = [campaign.assessment(run)]
    for _ in range(2):
        resubmit.recover(campaign.workspace, due, lambda text: None)
    assert len(campaign.executor.submitted) == 1 and [a.number for a in run.attempts()] == [1, 2]


def test_a_held_run_is_not_resubmitted(campaign: Campaign) -> None:
    run = campaign.send()
    campaign.end(run, State.LOST, "no_sign_of_life")
    run.attempt(1).held.touch()
    assert campaign.recover() == [] and "it was cancelled; orchestrate retry" in campaign.assessment(run).message


def test_program_errors_are_bounded_by_retries(campaign: Campaign) -> None:
    runs = {retries: campaign.send(retries=retries, seed=retries) for retries in (0, 1)}
    for run in runs.values():
        campaign.end(run, State.FAILED, "hang")
    campaign.recover()
    assert [d.spec.run_id for d in campaign.executor.submitted] == [runs[1].run_id]
    campaign.end(runs[1], State.FAILED, "hang", 2)
    assert campaign.recover() == []
    assert campaign.assessment(runs[1]).message.startswith("not resubmitted: after 1 of 1 for program_error")


def test_a_timeout_needs_a_checkpoint_of_its_attempt(campaign: Campaign) -> None:
    run = campaign.send()
    campaign.end(run, State.TIMEOUT, "time_limit", checkpoint=False)
    assert campaign.recover() == [] and "no checkpoint was written" in campaign.assessment(run).message


def test_an_unreadable_spec_is_reported(campaign: Campaign) -> None:
    run = campaign.send()
    campaign.end(run, State.LOST, "no_sign_of_life")
    run.spec.write_text("{")
    assert [text.partition(":")[0] for text in campaign.recover()] == [f"run {run.run_id} cannot be resubmitted"]


@pytest.mark.parametrize(
    ("nodes", "complaint", "exit_nodes", "found"),
    [
        (["n1", "n1"], None, "", "n1"),
        (["n1", "n2"], None, "", ""),
        (["n1", "n2"], 1, "", "n2"),
        ([], None, "n5", "n5"),
        ([], None, "n[5-6]", ""),
        ([], None, "", ""),
    ],
)
def test_the_node_at_fault(
    campaign: Campaign, nodes: list[str], complaint: int | None, exit_nodes: str, found: str
) -> None:
    """The only one, or that of the rank that recorded the failure; unknown if there were several."""
    run = campaign.send()
    attempt = run.attempt(1).create()
    for rank, node in enumerate(nodes):
        log = EventLog(attempt.events(rank))
        log.write("start", rank=rank, node=node)
        if rank == complaint:
            log.write("error", failure_class="wrong_hardware", message="small")
        log.close()
    Status(State.NODE_FAIL, "node_fail", "", nodes=exit_nodes).write_exit(attempt)
    update_statuses(campaign.store, [StatusUpdate(run.run_id, 1, State.NODE_FAIL, reason="node_fail")])
    assert campaign.assessment(run).decision.excluded == ((found,) if found else ())


def test_an_unknown_cluster_decides_nothing(campaign: Campaign) -> None:
    run = campaign.send()
    campaign.end(run, State.LOST, "no_sign_of_life")
    (campaign.workspace.runs / "sites" / "sol" / "site.json").unlink()
    assert campaign.assessment(run).decision == Decision(action=RecoveryAction.NONE)


def test_keys_of_other_versions_are_ignored(campaign: Campaign) -> None:
    """``unheard_of`` in the site's file; and a profile's own numbers count."""
    run = campaign.send()
    campaign.end(run, State.PREEMPTED, "preempted")
    folder = ClusterFolder(campaign.workspace.runs, "sol")
    folder.keep(ClusterLimits(**{**asdict(SITE), "recovery": {"preempted": 0, "unheard_of": 1}}), {})
    assert campaign.assessment(run).decision.failure is FailureClass.PREEMPTED
    assert campaign.recover() == []
