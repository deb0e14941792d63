"""From witnesses to a state: the whole table, row by row, and what must hold in all of its combinations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from orchestrator.backends.base import Status
from orchestrator.backends.exit_status import Exit
from orchestrator.backends.local.observe import SILENCE_S, LocalObservation, Place, Supervisor, host_fate, verdict
from orchestrator.backends.processes import Host
from workloads.contract import State

NOTHING: dict[str, Any] = {
    "recorded": State.PENDING,
    "exit": None,
    "result": None,
    "place": Place.NOWHERE,
    "supervisor": Supervisor.NONE,
    "queue_alive": True,
    "submit_alive": False,
}
SUCCESS = Status(State.SUCCEEDED)
FAILURE = Status(State.FAILED, "program_error", "rank 0: boom")


@pytest.mark.parametrize(
    ("witnesses", "state", "reason", "message"),
    [
        ({"result": SUCCESS}, State.SUCCEEDED, "", ""),
        ({"result": SUCCESS, "exit": Exit(State.LOST)}, State.SUCCEEDED, "", ""),
        ({"result": SUCCESS, "supervisor": Supervisor.ALIVE}, State.SUCCEEDED, "", ""),
        ({"exit": Exit(State.TIMEOUT, "time_limit", "over")}, State.TIMEOUT, "time_limit", "over"),
        ({"exit": Exit(State.FAILED, "hang", "stuck"), "result": FAILURE}, State.FAILED, "hang", "stuck"),
        ({"supervisor": Supervisor.ALIVE}, State.RUNNING, "", ""),
        ({"supervisor": Supervisor.ALIVE, "result": FAILURE}, State.RUNNING, "", ""),
        ({"supervisor": Supervisor.ALIVE, "cancelling": True}, State.RUNNING, "cancelling", ""),
        ({"supervisor": Supervisor.ALIVE, "untold": True}, State.RUNNING, "disk_full", "it has ended, and the disk"),
        ({"supervisor": Supervisor.GONE, "result": FAILURE}, State.FAILED, "program_error", "rank 0: boom"),
        ({"supervisor": Supervisor.GONE}, State.LOST, "supervisor_lost", "its supervisor was killed"),
        (
            {"supervisor": Supervisor.GONE, "untold": True},
            State.LOST,
            "supervisor_lost",
            "it ended while the disk had no",
        ),
        ({"supervisor": Supervisor.GONE, "cancelling": True}, State.CANCELLED, "cancelled", "stopped by"),
        ({"supervisor": Supervisor.REBOOTED}, State.LOST, "supervisor_lost", "the machine was restarted"),
        ({"supervisor": Supervisor.REBOOTED, "result": FAILURE}, State.FAILED, "program_error", "rank 0: boom"),
        ({"supervisor": Supervisor.ELSEWHERE, "host": "n7", "silent_s": 3.0}, State.RUNNING, "", "on n7"),
        ({"supervisor": Supervisor.ELSEWHERE, "host": "n7"}, State.RUNNING, "", "on n7"),
        (
            {"supervisor": Supervisor.ELSEWHERE, "host": "n7", "silent_s": SILENCE_S + 1},
            State.LOST,
            "no_sign_of_life",
            "no sign of life from n7 for 901 s",
        ),
        ({"supervisor": Supervisor.ELSEWHERE, "result": FAILURE}, State.FAILED, "program_error", "rank 0: boom"),
        ({"place": Place.RUNNING}, State.PENDING, "starting", ""),
        ({"place": Place.PENDING, "waiting_reason": "waits for 2 GPUs"}, State.PENDING, "queued", "waits for 2 GPUs"),
        ({"place": Place.PENDING, "queue_alive": False}, State.PENDING, "no_queue", "the queue process is gone"),
        ({"place": Place.PENDING, "cancelling": True}, State.PENDING, "cancelling", ""),
        ({"place": Place.PENDING, "recorded": State.SUBMITTING}, State.PENDING, "queued", ""),
        ({"recorded": State.SUBMITTING, "submit_alive": True}, State.SUBMITTING, "sending", ""),
        ({"recorded": State.SUBMITTING}, State.SUBMITTING, "interrupted", "submit did not finish"),
        ({"recorded": State.PENDING}, State.LOST, "entry_lost", "its queue entry is gone"),
        ({"recorded": State.RUNNING}, State.LOST, "entry_lost", "its queue entry is gone"),
    ],
)
def test_the_table(witnesses: dict[str, Any], state: State, reason: str, message: str) -> None:
    found = verdict(LocalObservation(**{**NOTHING, **witnesses}))
    assert (found.state, found.reason) == (state, reason)
    assert found.message.startswith(message)
    assert bool(found.message) == bool(message)


def all_witnesses() -> list[LocalObservation]:
    """Every combination of what can be told apart."""
    choices = {
        "recorded": [State.SUBMITTING, State.PENDING, State.RUNNING],
        "exit": [None, Exit(State.CANCELLED, "cancelled"), Exit(State.FAILED, "hang")],
        "result": [None, SUCCESS, FAILURE],
        "place": list(Place),
        "supervisor": list(Supervisor),
        "queue_alive": [False, True],
        "submit_alive": [False, True],
        "cancelling": [False, True],
        "untold": [False, True],
        "silent_s": [None, 1.0, SILENCE_S + 1],
    }
    return [
        LocalObservation(**dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
    ]


def test_in_every_combination() -> None:
    """A success stands, a living supervisor is no dead run, what may still start is not lost, nothing is undecided."""
    combinations = all_witnesses()
    assert len(combinations) == 3 * 3 * 3 * 3 * 5 * 2 * 2 * 2 * 2 * 3
    for w in combinations:
        state = verdict(w).state
        if w.result is SUCCESS:
            assert state is State.SUCCEEDED, w
        elif w.exit is not None:
            assert state is w.exit.state, w
        elif w.supervisor is Supervisor.ALIVE:
            assert state is State.RUNNING, w
        elif w.supervisor is Supervisor.NONE and w.place is not Place.NOWHERE:
            assert state is State.PENDING, w
        elif w.supervisor is Supervisor.NONE and w.recorded is State.SUBMITTING:
            assert state is State.SUBMITTING, w
        else:
            assert state in {State.LOST, State.FAILED, State.CANCELLED} or (
                state is State.RUNNING and w.supervisor is Supervisor.ELSEWHERE
            ), w


def test_what_became_of_a_supervisor_that_does_not_answer() -> None:
    here = Host("box", "boot-2", "net-1")
    assert host_fate(Host("box", "boot-2", "net-1"), here) is Supervisor.GONE
    assert host_fate(Host("box", "boot-1", "net-9"), here) is Supervisor.REBOOTED
    assert host_fate(Host("other", "boot-2", "net-1"), here) is Supervisor.ELSEWHERE
    assert host_fate(Host("box", "boot-2", "net-9"), here) is Supervisor.ELSEWHERE
