"""(how a run's attempts ended, what the site allows) -> what is done about it. Pure: reads nothing and sends nothing.

Each class of failure has an action, a bound and a counter of its own. Attempts count that were sent here, since people
last sent the run: ``submit`` and ``retry`` begin anew. What would change the science is never done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.cluster.profile import Recovery
from orchestrator.cluster.value_types import WHOLE_NODE
from orchestrator.units import LONGEST_S, MOST_MEMORY_BYTES, format_memory, format_time_limit
from workloads.contract import State

NEVER_SUBMITTED = frozenset({"refused", "no_script"})
"""Reasons of attempts that no queue has taken."""


class FailureClass(StrEnum):
    """What went wrong; the words are the keys of ``[cluster.NAME.recovery]`` where those have a bound."""

    TIMEOUT = "timeout"
    HOST_MEMORY = "host_memory"
    DEVICE_MEMORY = "device_memory"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    WRONG_HARDWARE = "wrong_hardware"
    LOST = "lost"
    PROGRAM_ERROR = "program_error"
    """The run's own, a hang too: the same would most likely happen again."""


class RecoveryAction(StrEnum):
    """What is done about a failure. Each new attempt goes on from the last checkpoint."""

    NONE = "none"
    """There is nothing to recover from."""
    RAISE_TIME = "raise_time"
    RAISE_MEMORY = "raise_memory"
    EXCLUDE_NODE = "exclude_node"
    RESUBMIT = "resubmit"
    """As it was."""
    STOP = "stop"
    """People must do something first."""

    @property
    def resubmits(self) -> bool:
        """Whether the run gets a new attempt."""
        return self not in {RecoveryAction.NONE, RecoveryAction.STOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """One attempt of a run, as far as it matters here."""

    state: State
    reason: str = ""
    resubmitted_for: FailureClass | None = None
    """The failure that it was sent here for; None where people sent it."""
    has_checkpoint: bool = False
    """Whether it wrote one, and so came further than the attempts before."""
    node: str = ""
    """The node at fault, or the only one it had; empty where nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the newest attempt had, and what its target would give."""

    time_limit_s: int
    max_time_s: int = 0
    """Of its partition and QOS; 0: no cap."""
    mem_bytes: int | None = None
    """Host memory a node; ``profile.WHOLE_NODE`` is all of it, None left it to the site."""
    max_mem_bytes: int = 0
    """What a node has; 0: not known."""
    takes_mem: bool = True
    """Whether memory can be asked for."""
    has_nodes: bool = True
    """Whether there are others to go to."""
    excluded: tuple[str, ...] = ()
    """Nodes that were excluded before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done about the end of a run's newest attempt."""

    action: RecoveryAction
    failure: FailureClass | None = None
    number: int = 0
    """Which time this is: 1 for the first."""
    bound: int = 0
    why: str = ""
    """For ``stop``: the cause and the remedy."""
    time_limit_s: int = 0
    mem_bytes: int | None = None
    excluded: tuple[str, ...] = ()
    changes: str = ""
    """What the new attempt has that the last one had not, in words."""

    @property
    def text(self) -> str:
        """One sentence for people; empty when there is nothing to say."""
        if self.action is RecoveryAction.NONE:
            return ""
        if self.action is RecoveryAction.STOP:
            return f"not sent again: {self.why}"
        changes = f" with {self.changes}" if self.changes else ""
        return f"to be sent again{changes} ({self.number} of {self.bound} for {self.failure})"


def failure_of(state: State, reason: str) -> FailureClass | None:
    """The class of an end; None for what is no failure, was ended on purpose, or never got into a queue."""
    if state is State.OUT_OF_MEMORY:
        return FailureClass.DEVICE_MEMORY if reason == "device_memory" else FailureClass.HOST_MEMORY
    if state is State.FAILED and reason not in NEVER_SUBMITTED:
        return FailureClass.PROGRAM_ERROR
    return {
        State.TIMEOUT: FailureClass.TIMEOUT,
        State.NODE_FAIL: FailureClass.NODE_FAIL,
        State.PREEMPTED: FailureClass.PREEMPTED,
        State.WRONG_HARDWARE: FailureClass.WRONG_HARDWARE,
        State.LOST: FailureClass.LOST,
    }.get(state)


def decide(history: Sequence[PastAttempt], policy: Recovery, limits: Limits, *, retries: int = 0) -> Decision:
    """What to do about the newest attempt.

    Args:
        history: all attempts of the run, oldest first; at least one.
        policy: the site's.
        limits: of the newest attempt, and of its target.
        retries: how often the run wants to be sent again when its program fails.
    """
    last = history[-1]
    failure = failure_of(last.state, last.reason)
    if failure is None:
        if last.resubmitted_for is not None and last.reason in NEVER_SUBMITTED:
            why = "what recovery asked for was refused; orchestrate submit sends the run as it is planned now"
            return Decision(action=RecoveryAction.STOP, why=why)
        return Decision(action=RecoveryAction.NONE)
    bound = _bound(failure, policy, retries)
    done = sum(past.resubmitted_for is failure for past in since_last_submit(history))
    if remedy := _remedy(failure, last, limits):
        return Decision(action=RecoveryAction.STOP, failure=failure, number=done, bound=bound, why=remedy)
    if done >= bound:
        way = _BY_REASON.get(last.reason) or _LAST_RESORT[failure]
        why = f"after {done} of {bound} for {failure}; {way}" if done else way
        return Decision(action=RecoveryAction.STOP, failure=failure, number=done, bound=bound, why=why)
    return _send_again(failure, last, policy, limits, number=done + 1, bound=bound)


def _bound(failure: FailureClass, policy: Recovery, retries: int) -> int:
    own = {FailureClass.PROGRAM_ERROR: retries, FailureClass.DEVICE_MEMORY: 0}
    return own[failure] if failure in own else int(getattr(policy, failure.value))


def since_last_submit(history: Sequence[PastAttempt]) -> Sequence[PastAttempt]:
    """The newest attempt that people sent, and those that were sent here after it."""
    firsts = [index for index, past in enumerate(history) if past.resubmitted_for is None]
    return history[firsts[-1] if firsts else 0 :]


_ANEW = "then orchestrate submit"
"""``retry`` sends what was sent, but for the program; what files say now is sent by ``submit``."""
_LAST_RESORT = {
    FailureClass.TIMEOUT: f"raise time_limit, {_ANEW}",
    FailureClass.HOST_MEMORY: f"raise mem, {_ANEW}",
    FailureClass.DEVICE_MEMORY: "",
    FailureClass.NODE_FAIL: "tell the site; orchestrate retry goes on",
    FailureClass.PREEMPTED: "orchestrate retry goes on from there, or use a queue that is not preempted",
    FailureClass.WRONG_HARDWARE: f"mend type, expect_name or expect_mem_gb in the cluster file, {_ANEW}",
    FailureClass.LOST: "see what became of it, then retry",
    FailureClass.PROGRAM_ERROR: "mend the program and retry; retries in experiment.toml sends it again by itself",
}
NOT_STARTED = {
    "prologue": f"mend prologue in the cluster file, {_ANEW}",
    "interpreter": f"mend python in the cluster file, {_ANEW}",
    "launcher": f"mend slurm_bin or launcher in the cluster file, {_ANEW}",
}
"""By reason: the job script did not come to the program, and what mends that."""
_BY_REASON = NOT_STARTED | {
    "input": f"mend what its message names in the experiment file, {_ANEW}",
    "dataset": "orchestrate data check and data prepare mend the data set; orchestrate retry then sends it again",
}


def no_node_left(failure: FailureClass, excluded: Sequence[str], refusal: str) -> str:
    """Why a run is not sent again whose last node would be excluded, with what to do instead.

    Args:
        failure: that of its newest attempt.
        excluded: all nodes that it would be sent without.
        refusal: what Slurm says of that.
    """
    return f"without {', '.join(excluded)} Slurm has no node for it ({refusal}); {_LAST_RESORT[failure]}"


def _remedy(failure: FailureClass, last: PastAttempt, limits: Limits) -> str:
    """Why sending it again is no use, with what to do instead; empty where it may help."""
    if failure is FailureClass.DEVICE_MEMORY:
        return (
            "the memory of a device was full, and what helps would change the experiment: a smaller batch_size, more "
            "chunks, another strategy (fsdp, gpipe, pipeline), or devices with more memory"
        )
    if failure is FailureClass.TIMEOUT and not last.has_checkpoint:
        limit = format_time_limit(limits.time_limit_s)
        return f"no checkpoint was written within {limit}; raise time_limit or lower checkpoint_every, {_ANEW}"
    if failure is FailureClass.HOST_MEMORY:
        return _memory_remedy(limits)
    if failure is FailureClass.WRONG_HARDWARE and not limits.has_nodes:
        return "this machine is not what was planned; plan anew"
    return ""


def _memory_remedy(limits: Limits) -> str:
    if not limits.has_nodes:
        return "this machine's memory was full; run less at once, or use a larger one"
    if not limits.takes_mem:
        return "this site takes no request for memory; ask for more cores or devices"
    if limits.mem_bytes is None:
        return f"the site decides on memory; set mem, {_ANEW}"
    if limits.mem_bytes == WHOLE_NODE or 0 < limits.max_mem_bytes <= limits.mem_bytes:
        return "a node has no more memory; lower workers, or use another strategy"
    return ""


def _send_again(
    failure: FailureClass, last: PastAttempt, policy: Recovery, limits: Limits, *, number: int, bound: int
) -> Decision:
    time_limit_s, mem_bytes, excluded = limits.time_limit_s, limits.mem_bytes, limits.excluded
    action, changes = RecoveryAction.RESUBMIT, ""
    if failure is FailureClass.TIMEOUT:
        wished_s = max(int(time_limit_s * policy.time_factor), time_limit_s)
        raised_s = max(min(wished_s, limits.max_time_s or LONGEST_S), time_limit_s)
        if raised_s > time_limit_s:
            action, time_limit_s = RecoveryAction.RAISE_TIME, raised_s
            changes = (
                f"a time limit of {format_time_limit(raised_s)} instead of {format_time_limit(limits.time_limit_s)}"
            )
    elif failure is FailureClass.HOST_MEMORY and mem_bytes is not None:
        wished = int(mem_bytes * policy.mem_factor)
        raised = min(wished, limits.max_mem_bytes or MOST_MEMORY_BYTES)
        if raised > mem_bytes:
            action, changes = (
                RecoveryAction.RAISE_MEMORY,
                f"{format_memory(raised)} instead of {format_memory(mem_bytes)}",
            )
            mem_bytes = raised
    elif failure in {FailureClass.NODE_FAIL, FailureClass.WRONG_HARDWARE} and limits.has_nodes and last.node:
        action, changes = RecoveryAction.EXCLUDE_NODE, f"node {last.node} excluded"
        excluded = tuple(dict.fromkeys([*excluded, last.node]))
    return Decision(
        action=action,
        failure=failure,
        number=number,
        bound=bound,
        time_limit_s=time_limit_s,
        mem_bytes=mem_bytes,
        excluded=excluded,
        changes=changes,
    )
