"""Decide what recovery does about a failed run. Pure: the decision depends on its arguments only.

Each class of failure has its own action, bound and counter. The counters start again when a person submits the run with
``submit`` or ``retry``. Recovery never changes anything that would change the experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.cluster.profile import Recovery
from orchestrator.cluster.value_types import WHOLE_NODE
from orchestrator.units import LONGEST_S, MOST_MEMORY_BYTES, format_memory, format_time_limit
from workloads.contract import State

NOT_ACCEPTED = frozenset({"rejected", "no_script", "refused"})
"""Reasons of attempts that no queue accepted. ``refused`` is the former word, which existing stores hold."""


class FailureClass(StrEnum):
    """What went wrong; those with a bound in the cluster file are keys of ``[cluster.NAME.recovery]``."""

    TIMEOUT = "timeout"
    HOST_MEMORY = "host_memory"
    DEVICE_MEMORY = "device_memory"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    WRONG_HARDWARE = "wrong_hardware"
    LOST = "lost"
    PROGRAM_ERROR = "program_error"
    """The run's own failure or hang, which would most likely happen again."""


class RecoveryAction(StrEnum):
    """What recovery does about a failure. Each new attempt continues from the last checkpoint."""

    NONE = "none"
    RAISE_TIME = "raise_time"
    RAISE_MEMORY = "raise_memory"
    EXCLUDE_NODE = "exclude_node"
    RESUBMIT = "resubmit"
    """Without a change."""
    STOP = "stop"
    """A person has to act first."""

    @classmethod
    def _missing_(cls, value: object) -> RecoveryAction | None:
        # The former word, which existing stores hold.
        return cls.RESUBMIT if value == "send_again" else None

    @property
    def resubmits(self) -> bool:
        """Whether the run gets a new attempt."""
        return self not in {RecoveryAction.NONE, RecoveryAction.STOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """One attempt of a run, as far as recovery depends on it."""

    state: State
    reason: str = ""
    resubmitted_for: FailureClass | None = None
    """The failure that recovery submitted it for; None if a person submitted it."""
    has_checkpoint: bool = False
    """Whether it wrote one, and so got further than earlier attempts."""
    node: str = ""
    """The node at fault, or the only one it had; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """What the newest attempt had, and what its target allows."""

    time_limit_s: int
    max_time_s: int = 0
    """Of its partition and QOS; 0: no limit."""
    mem_bytes: int | None = None
    """Host memory per node; ``WHOLE_NODE`` is all of it, None is the site's default."""
    max_mem_bytes: int = 0
    """Of a node; 0: unknown."""
    takes_mem: bool = True
    """Whether the site accepts memory requests."""
    has_nodes: bool = True
    """Whether there are other nodes."""
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What recovery does about the newest attempt of a run."""

    action: RecoveryAction
    failure: FailureClass | None = None
    number: int = 0
    """Counts the resubmissions for this class of failure, from 1."""
    bound: int = 0
    why: str = ""
    """For ``stop``: the cause, and what to do."""
    time_limit_s: int = 0
    mem_bytes: int | None = None
    excluded: tuple[str, ...] = ()
    changes: str = ""
    """Describes what the new attempt gets that the last one did not have."""

    @property
    def message(self) -> str:
        """One sentence for people; empty for ``none``."""
        if self.action is RecoveryAction.NONE:
            return ""
        if self.action is RecoveryAction.STOP:
            return f"not resubmitted: {self.why}"
        changes = f" with {self.changes}" if self.changes else ""
        return f"will be resubmitted{changes} ({self.number} of {self.bound} for {self.failure})"


def failure_of(state: State, reason: str) -> FailureClass | None:
    """Return the class of a failure; None for a success, a cancellation, or an attempt that no queue accepted."""
    if state is State.OUT_OF_MEMORY:
        return FailureClass.DEVICE_MEMORY if reason == "device_memory" else FailureClass.HOST_MEMORY
    if state is State.FAILED and reason not in NOT_ACCEPTED:
        return FailureClass.PROGRAM_ERROR
    return FailureClass(state.value) if state.value in list(FailureClass) else None


def decide(history: Sequence[PastAttempt], policy: Recovery, limits: ResourceLimits, *, retries: int = 0) -> Decision:
    """Decide what to do about the newest attempt of a ``history``, which has at least one, oldest first.

    ``retries`` is the run's own bound: how often to resubmit it after a program error.
    """
    last = history[-1]
    failure = failure_of(last.state, last.reason)
    if failure is None:
        if last.resubmitted_for is not None and last.reason in NOT_ACCEPTED:
            why = "the resubmission was rejected; orchestrate submit submits the run as it is planned now"
            return Decision(action=RecoveryAction.STOP, why=why)
        return Decision(action=RecoveryAction.NONE)
    own = {FailureClass.PROGRAM_ERROR: retries, FailureClass.DEVICE_MEMORY: 0}
    bound = own[failure] if failure in own else int(getattr(policy, failure.value))
    done = sum(past.resubmitted_for is failure for past in since_last_submit(history))
    why = _why_useless(failure, last, limits)
    if not why and done >= bound:
        hint = _HINT_BY_REASON.get(last.reason) or _HINT[failure]
        why = f"after {done} of {bound} for {failure}; {hint}" if done else hint
    if why:
        return Decision(action=RecoveryAction.STOP, failure=failure, number=done, bound=bound, why=why)
    return _resubmit(failure, last, policy, limits, number=done + 1, bound=bound)


def since_last_submit(history: Sequence[PastAttempt]) -> Sequence[PastAttempt]:
    """Return the newest attempt that a person submitted, and those that recovery submitted after it."""
    firsts = [index for index, past in enumerate(history) if past.resubmitted_for is None]
    return history[firsts[-1] if firsts else 0 :]


_SUBMIT = "then orchestrate submit"
"""``retry`` repeats what was submitted, except for the code; ``submit`` uses the files as they are now."""
_HINT = {
    FailureClass.TIMEOUT: f"raise time_limit, {_SUBMIT}",
    FailureClass.HOST_MEMORY: f"raise mem, {_SUBMIT}",
    FailureClass.DEVICE_MEMORY: "",
    FailureClass.NODE_FAIL: "report it to the site; orchestrate retry continues the run",
    FailureClass.PREEMPTED: "orchestrate retry continues the run, or use a queue without preemption",
    FailureClass.WRONG_HARDWARE: f"correct type, expect_name or expect_mem_gb in the cluster file, {_SUBMIT}",
    FailureClass.LOST: "find out what became of it, then orchestrate retry",
    FailureClass.PROGRAM_ERROR: (
        "correct the program, then orchestrate retry; with retries in experiment.toml recovery resubmits it"
    ),
}
NOT_STARTED = {
    "prologue": f"correct prologue in the cluster file, {_SUBMIT}",
    "interpreter": f"correct python in the cluster file, {_SUBMIT}",
    "launcher": f"correct slurm_bin or launcher in the cluster file, {_SUBMIT}",
}
"""Reason -> what to do about a job script that could not start the program."""
_HINT_BY_REASON = NOT_STARTED | {
    "input": f"correct what its message names in the experiment file, {_SUBMIT}",
    "dataset": "repair the data set with orchestrate data check and data prepare, then orchestrate retry",
}


def no_node_left(failure: FailureClass, excluded: Sequence[str], rejection: str) -> str:
    """Explain why a run is not resubmitted: excluding these nodes would leave none, as Slurm's ``rejection`` says."""
    return f"without {', '.join(excluded)} Slurm has no node for it ({rejection}); {_HINT[failure]}"


def _why_useless(failure: FailureClass, last: PastAttempt, limits: ResourceLimits) -> str:
    """Return why a resubmission is useless and what to do; empty if it may help."""
    if failure is FailureClass.DEVICE_MEMORY:
        return (
            "the memory of a device was full, and each remedy changes the experiment: a smaller batch_size, more "
            "chunks, another strategy (fsdp, gpipe, pipeline), or devices with more memory"
        )
    if failure is FailureClass.TIMEOUT and not last.has_checkpoint:
        limit = format_time_limit(limits.time_limit_s)
        return f"no checkpoint was written within {limit}; raise time_limit or lower checkpoint_every, {_SUBMIT}"
    if failure is FailureClass.HOST_MEMORY:
        return _why_no_memory(limits)
    if failure is FailureClass.WRONG_HARDWARE and not limits.has_nodes:
        return "this machine has other hardware than planned; plan again"
    return ""


def _why_no_memory(limits: ResourceLimits) -> str:
    if not limits.has_nodes:
        return "this machine's memory was full; run fewer runs at once, or use a larger machine"
    if not limits.takes_mem:
        return "this site accepts no memory request; request more cores or devices"
    if limits.mem_bytes is None:
        return f"the site sets the memory; set mem, {_SUBMIT}"
    if limits.mem_bytes == WHOLE_NODE or 0 < limits.max_mem_bytes <= limits.mem_bytes:
        return "a node has no more memory; lower workers, or use another strategy"
    return ""


def _resubmit(
    failure: FailureClass, last: PastAttempt, policy: Recovery, limits: ResourceLimits, *, number: int, bound: int
) -> Decision:
    same = Decision(
        action=RecoveryAction.RESUBMIT,
        failure=failure,
        number=number,
        bound=bound,
        time_limit_s=limits.time_limit_s,
        mem_bytes=limits.mem_bytes,
        excluded=limits.excluded,
    )
    if failure is FailureClass.TIMEOUT:
        before_s = limits.time_limit_s
        raised_s = min(int(before_s * policy.time_factor), limits.max_time_s or LONGEST_S)
        if raised_s > before_s:
            changes = f"a time limit of {format_time_limit(raised_s)} instead of {format_time_limit(before_s)}"
            return replace(same, action=RecoveryAction.RAISE_TIME, time_limit_s=raised_s, changes=changes)
    elif failure is FailureClass.HOST_MEMORY and (before := limits.mem_bytes) is not None:
        raised = min(int(before * policy.mem_factor), limits.max_mem_bytes or MOST_MEMORY_BYTES)
        if raised > before:
            changes = f"{format_memory(raised)} instead of {format_memory(before)}"
            return replace(same, action=RecoveryAction.RAISE_MEMORY, mem_bytes=raised, changes=changes)
    elif failure in {FailureClass.NODE_FAIL, FailureClass.WRONG_HARDWARE} and limits.has_nodes and last.node:
        excluded = tuple(dict.fromkeys([*limits.excluded, last.node]))
        changes = f"node {last.node} excluded"
        return replace(same, action=RecoveryAction.EXCLUDE_NODE, excluded=excluded, changes=changes)
    return same
