"""Checks of a cluster file: against what Slurm reports about accounts, limits and queues, and script by script."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.slurm import queue_choice
from orchestrator.backends.slurm.records import QueuePair
from orchestrator.cluster import cluster_file_writer, sample_scripts, site_facts
from orchestrator.cluster.profile import ClusterProfile, ClusterQueue, Nodes
from orchestrator.cluster.site_facts import Run, SiteFacts
from orchestrator.doctor.findings import Finding, fail, note, ok
from orchestrator.planning import planner
from orchestrator.planning.plan import Plan
from orchestrator.units import format_time_limit

QUESTIONS = ("sinfo", "partitions", "config", "user", "associations", "qos")
MAX_TRIALS = 24
"""Pairs of script and queue that are tried. Each is a request to the controller, which serves all users."""

_REJECTED = (
    "check in the cluster file: the pair of partition and qos, account, type of GPU, node_gpus, cpus_per_gpu, "
    "mem_per_gpu, and time_limit against the queue's max_time"
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A script to try, and the queues that can take it."""

    name: str
    text: str
    queues: tuple[QueuePair, ...]


def examine(
    profile: ClusterProfile, plan: Plan | None, run: Run, *, user: str, hosts: Sequence[str]
) -> Iterator[Finding]:
    """Check a cluster file against the accounts of ``user`` and the limits that Slurm reports, cheapest first.

    The scripts of the plan are tried; without one, a script for two devices of each type.
    """
    if profile.hostname_pattern and not any(profile.matches(host) for host in hosts):
        what = f"{hosts[-1]} is not a host of {profile.name} (hostname_pattern {profile.hostname_pattern})"
        yield note("host", what, "run this on its login node, or change hostname_pattern in the cluster file")
    answers, unanswered = site_facts.query(run, user, QUESTIONS)
    if "config" not in answers:
        yield fail("slurm", f"Slurm does not answer: {unanswered['config']}", "run this on a login node of the cluster")
        return
    site = site_facts.parse(answers, unanswered)
    yield ok("slurm", f"Slurm {site.version}, cluster {site.cluster}")
    yield _accounting(profile, site, run)
    yield from _account(profile, site)
    yield from _limits(profile, site)
    yield from _queues(profile, site)
    planned = [Trial(script.name, script.text, script.queues) for script in (plan.scripts if plan is not None else ())]
    yield from _trials(planned or _samples(profile))


def profile_findings(profile: ClusterProfile) -> Iterator[Finding]:
    """Check the scripts of a cluster file; needs no Slurm."""
    faults = sample_scripts.profile_faults(profile)
    for fault in faults:
        yield fail("profile", fault.what, fault.hint or "change the cluster file or its template")
    if not faults:
        pairs = [sample for sample in sample_scripts.samples(profile) if sample.hardware.endswith(":2")]
        possible = {sample.hardware[:-2] for sample in pairs if sample.text}
        impossible = {sample.hardware[:-2] for sample in pairs if sample.reason} - possible
        rest = f"; no pair of {', '.join(sorted(impossible))}" if impossible else ""
        yield ok("profile", f"scripts for a pair of {', '.join(sorted(possible)) or 'nothing'} are sound{rest}")


def _accounting(profile: ClusterProfile, site: SiteFacts, run: Run) -> Finding:
    if not site.accounting:
        if profile.accounting == "sacct":
            what = 'this site has none, and accounting = "sacct" requires it'
            return fail("accounting", what, 'accounting = "squeue"')
        return ok("accounting", "this site has none: states come from squeue, scontrol and the runs' own files")
    if profile.accounting == "squeue":
        return note("accounting", "this site has it, and the cluster file does not use it", 'accounting = "auto"')
    answered, text = run("sacct", "-nPX", "--starttime=now", "--format=JobID")
    if not answered:
        what = f"sacct does not answer now: {text.strip()}"
        return note("accounting", what, "states come from squeue and the runs' own files meanwhile")
    return ok("accounting", "sacct answers")


def _account(profile: ClusterProfile, site: SiteFacts) -> Iterator[Finding]:
    if profile.needs_account and not profile.account:
        yield fail("account", f"{profile.name} requires an account", "set account in the cluster file")
        return
    own = {association.account for association in site.accounts}
    named = {profile.account_for(nodes) for _, nodes in _tables(profile)} - {""}
    if own:
        for account in sorted(named - own):
            what = f"{account} is not one of your accounts: {', '.join(sorted(own))}"
            yield fail("account", what, "change account in the cluster file")
        if named <= own:
            default = f"Slurm's default ({cluster_file_writer.account(site)})"
            yield ok("account", ", ".join(sorted(named)) or default)
    elif site.accounting:
        yield note("account", "Slurm does not show your accounts", "ask your site if it rejects jobs")


def _limits(profile: ClusterProfile, site: SiteFacts) -> Iterator[Finding]:
    largest = site.max_array_size - 1
    if profile.array_index_max > largest:
        what = f"array_index_max = {profile.array_index_max}, and this site allows {largest}"
        yield fail("limits", what, f"array_index_max = {largest}")
    submit = cluster_file_writer.max_submit(site)
    if submit and not profile.max_submit:
        what = f"you may have {submit} jobs queued, and the cluster file sets no max_submit"
        yield note("limits", what, f"max_submit = {submit}")
    elif submit and profile.max_submit > submit:
        what = f"max_submit = {profile.max_submit}, and you may have {submit} jobs queued"
        yield fail("limits", what, f"max_submit = {submit}")
    elif profile.array_index_max <= largest:
        queued = f"{profile.max_submit} jobs queued" if profile.max_submit else "no limit of queued jobs is known"
        yield ok("limits", f"arrays up to index {largest}, {queued}")


def _queues(profile: ClusterProfile, site: SiteFacts) -> Iterator[Finding]:
    seen: set[ClusterQueue] = set()
    for place, nodes in _tables(profile):
        for queue in nodes.queue:
            if queue in seen or not queue.partition or (queue.preemptable and not profile.allow_preemptable):
                continue
            seen.add(queue)
            yield from _queue(queue, place, site)


def _queue(queue: ClusterQueue, place: str, site: SiteFacts) -> Iterator[Finding]:
    partition = site.partitions.get(queue.partition)
    if partition is None:
        if site.partitions:
            names = ", ".join(site.partitions)
            yield fail("queue", f"there is no partition {queue.partition} ({place})", f"this cluster has: {names}")
        return
    if not partition.up:
        yield fail("queue", f"partition {queue.partition} is down: jobs would wait in it", f"remove it from {place}")
        return
    limits = {partition.max_time_s}
    limits |= {site.qos[name].max_time_s for name in (queue.qos, partition.qos) if name in site.qos}
    longest = min((limit for limit in limits if limit), default=0)
    if longest and (not queue.max_time_s or queue.max_time_s > longest):
        said = format_time_limit(queue.max_time_s) if queue.max_time_s else "no limit"
        what = f"{queue} ends jobs after {format_time_limit(longest)}, and the cluster file says {said} ({place})"
        yield fail("queue", what, f'max_time = "{format_time_limit(longest)}"')
        return
    allowed = not partition.allow_qos or queue.qos in partition.allow_qos
    if queue.qos and (not allowed or queue.qos in partition.deny_qos):
        open_to = ", ".join(partition.allow_qos) or f"any but {', '.join(partition.deny_qos)}"
        what = f"partition {queue.partition} does not allow qos {queue.qos} ({place})"
        yield fail("queue", what, f"it allows: {open_to}")
    else:
        yield ok("queue", str(queue))


def _tables(profile: ClusterProfile) -> list[tuple[str, Nodes]]:
    tables: list[tuple[str, Nodes]] = [(f"gpu.{kind}", nodes) for kind, nodes in profile.gpu.items()]
    return [*tables, *([("cpu", profile.cpu)] if profile.cpu is not None else [])]


def _samples(profile: ClusterProfile) -> list[Trial]:
    found: dict[str, Trial] = {}
    for sample in sample_scripts.samples(profile):
        if sample.shape is not None and sample.text and sample.hardware not in found:
            pairs = planner.queue_pairs(sample.shape, profile)
            found[sample.hardware] = Trial(sample.hardware, sample.text, pairs)
    return list(found.values())


def _trials(trials: Iterable[Trial]) -> Iterator[Finding]:
    """Submit each script with ``sbatch --test-only`` to each queue that can take it."""
    pairs = [(trial, pair) for trial in trials for pair in trial.queues or (QueuePair(),)]
    with tempfile.TemporaryDirectory(prefix="orchestrate-") as folder:
        script = Path(folder) / "script.sh"
        for trial, pair in pairs[:MAX_TRIALS]:
            script.write_text(trial.text, encoding="utf-8", newline="\n")
            answer = queue_choice.estimate(script, *queue_choice.queue_options(pair))
            if answer.start:
                yield ok("shape", f"{trial.name} in {pair}: would start about {answer.start}")
            else:
                yield fail("shape", f"{trial.name} in {pair}: {answer.rejection}", _REJECTED)
    if len(pairs) > MAX_TRIALS:
        yield note("shape", f"{len(pairs) - MAX_TRIALS} more pairs of script and queue were not tried")
