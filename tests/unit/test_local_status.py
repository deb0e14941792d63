"""From an observation to a status: the whole table row by row, and what holds in all combinations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from orchestrator.backends.base import SILENCE_S, Status
from orchestrator.backends.local.observe import EntryState, LocalObservation, SupervisorState, dead_supervisor
from orchestrator.backends.local.status import status_of
from orchestrator.backends.processes import Host
from workloads.contract import State

NOTHING: dict[str, Any] = {
    "recorded": State.PENDING,
    "exit": None,
    "result": None,
    "entry": EntryState.MISSING,
    "supervisor": SupervisorState.NOT_STARTED,
    "queue_alive": True,
    "submit_host": None,
}
SUCCESS = Status(State.SUCCEEDED)
FAILURE = Status(State.FAILED, "program_error", "rank 0: boom")


@pytest.mark.parametrize(
    ("observed", "state", "reason", "message"),
    [
        ({"result": SUCCESS}, State.SUCCEEDED, "", ""),
        ({"result": SUCCESS, "exit": Status(State.LOST)}, State.SUCCEEDED, "", ""),
        ({"result": SUCCESS, "supervisor": SupervisorState.ALIVE}, State.SUCCEEDED, "", ""),
        ({"exit": Status(State.TIMEOUT, "time_limit", "over")}, State.TIMEOUT, "time_limit", "over"),
        ({"exit": Status(State.FAILED, "hang", "stuck"), "result": FAILURE}, State.FAILED, "hang", "stuck"),
        ({"supervisor": SupervisorState.ALIVE}, State.RUNNING, "", ""),
        ({"supervisor": SupervisorState.ALIVE, "result": FAILURE}, State.RUNNING, "", ""),
        ({"supervisor": SupervisorState.ALIVE, "cancelling": True}, State.RUNNING, "cancelling", ""),
        (
            {"supervisor": SupervisorState.ALIVE, "unreported": True},
            State.RUNNING,
            "disk_full",
            "run ended, but the disk is full",
        ),
        ({"supervisor": SupervisorState.KILLED, "result": FAILURE}, State.FAILED, "program_error", "rank 0: boom"),
        ({"supervisor": SupervisorState.KILLED}, State.LOST, "supervisor_lost", "its supervisor was killed"),
        (
            {"supervisor": SupervisorState.KILLED, "unreported": True},
            State.LOST,
            "supervisor_lost",
            "the run ended while the disk was full",
        ),
        ({"supervisor": SupervisorState.KILLED, "cancelling": True}, State.CANCELLED, "cancelled", "stopped by"),
        ({"supervisor": SupervisorState.REBOOTED}, State.LOST, "supervisor_lost", "the machine was restarted"),
        ({"supervisor": SupervisorState.REBOOTED, "result": FAILURE}, State.FAILED, "program_error", "rank 0: boom"),
        ({"supervisor": SupervisorState.ELSEWHERE, "host": "n7", "silent_s": 3.0}, State.RUNNING, "", "on n7"),
        ({"supervisor": SupervisorState.ELSEWHERE, "host": "n7"}, State.RUNNING, "", "on n7"),
        (
            {"supervisor": SupervisorState.ELSEWHERE, "host": "n7", "silent_s": SILENCE_S + 1},
            State.LOST,
            "no_sign_of_life",
            "no sign of life from n7 for 901 s",
        ),
        ({"supervisor": SupervisorState.ELSEWHERE, "result": FAILURE}, State.FAILED, "program_error", "rank 0: boom"),
        ({"entry": EntryState.RUNNING}, State.PENDING, "starting", ""),
        (
            {"entry": EntryState.PENDING, "waiting_reason": "waits for 2 GPUs"},
            State.PENDING,
            "queued",
            "waits for 2 GPUs",
        ),
        ({"entry": EntryState.PENDING, "queue_alive": False}, State.PENDING, "no_queue", "the queue process has ended"),
        ({"entry": EntryState.PENDING, "cancelling": True}, State.PENDING, "cancelling", ""),
        ({"entry": EntryState.PENDING, "recorded": State.SUBMITTING}, State.PENDING, "queued", ""),
        ({"recorded": State.SUBMITTING, "submit_host": ""}, State.SUBMITTING, "submitting", ""),
        ({"recorded": State.SUBMITTING}, State.SUBMITTING, "interrupted", "submit was interrupted"),
        ({"recorded": State.PENDING}, State.LOST, "entry_lost", "its queue entry disappeared"),
        ({"recorded": State.RUNNING}, State.LOST, "entry_lost", "its queue entry disappeared"),
    ],
)
def test_status_of(observed: dict[str, Any], state: State, reason: str, message: str) -> None:
    found = status_of(LocalObservation(**{**NOTHING, **observed}))
    assert (found.state, found.reason) == (state, reason)
    assert found.message.startswith(message)
    assert bool(found.message) == bool(message)


def all_observations() -> list[LocalObservation]:
    """Every combination of values that the status depends on."""
    choices = {
        "recorded": [State.SUBMITTING, State.PENDING, State.RUNNING],
        "exit": [None, Status(State.CANCELLED, "cancelled"), Status(State.FAILED, "hang")],
        "result": [None, SUCCESS, FAILURE],
        "entry": list(EntryState),
        "supervisor": list(SupervisorState),
        "queue_alive": [False, True],
        "submit_host": [None, "login2"],
        "cancelling": [False, True],
        "unreported": [False, True],
        "silent_s": [None, 1.0, SILENCE_S + 1],
    }
    return [
        LocalObservation(**dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
    ]


def test_rules_of_all_combinations() -> None:
    """A success stands, a run with a living supervisor runs, a run that may still start is not lost."""
    combinations = all_observations()
    assert len(combinations) == 3 * 3 * 3 * 3 * 5 * 2 * 2 * 2 * 2 * 3
    for o in combinations:
        state = status_of(o).state
        if o.result is SUCCESS:
            assert state is State.SUCCEEDED, o
        elif o.exit is not None:
            assert state is o.exit.state, o
        elif o.supervisor is SupervisorState.ALIVE:
            assert state is State.RUNNING, o
        elif o.supervisor is SupervisorState.NOT_STARTED and o.entry is not EntryState.MISSING:
            assert state is State.PENDING, o
        elif o.supervisor is SupervisorState.NOT_STARTED and o.recorded is State.SUBMITTING:
            assert state is State.SUBMITTING, o
        else:
            assert state in {State.LOST, State.FAILED, State.CANCELLED} or (
                state is State.RUNNING and o.supervisor is SupervisorState.ELSEWHERE
            ), o


def test_dead_supervisor() -> None:
    here = Host("box", "boot-2", "net-1")
    assert dead_supervisor(Host("box", "boot-2", "net-1"), here) is SupervisorState.KILLED
    assert dead_supervisor(Host("box", "boot-1", "net-9"), here) is SupervisorState.REBOOTED
    assert dead_supervisor(Host("other", "boot-2", "net-1"), here) is SupervisorState.ELSEWHERE
    assert dead_supervisor(Host("box", "boot-2", "net-9"), here) is SupervisorState.ELSEWHERE
