"""The live view: what is gathered, what is drawn, what keys do, and the same in a real terminal."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from db.connect import open_store
from db.submissions import StatusUpdate, record_intents, update_statuses
from orchestrator.cli import log_files, monitor, progress, screen_layout
from orchestrator.cli.monitor import Backlog, Monitor, follow
from orchestrator.cli.progress import Lines
from orchestrator.cli.screen_layout import Choice, Filter
from orchestrator.errors import CommandError, InputError
from orchestrator.submission.submitter import SubmitResult
from orchestrator.tracking.status_summary import StatusSummary
from orchestrator.tracking.tracker import Progress, RunStatus
from orchestrator.workspace import Workspace
from workloads.contract import ResourceShape, State
from workloads.files.json_file import write_json
from workloads.files.run_dir import RunDir


def run(label: str, state: State, message: str = "", *, attempt: int = 1, **progress: Any) -> RunStatus:
    return RunStatus(
        run_id=f"{abs(hash(label)):016x}"[:16],
        label=label,
        experiment="study",
        state=state,
        reason="",
        message=message,
        attempt=attempt,
        job_id="7_0",
        target="lab",
        progress=Progress(**progress),
    )


SEEN = StatusSummary(
    [
        run("done", State.SUCCEEDED),
        run("bad", State.OUT_OF_MEMORY, "the job's memory was full; raise mem, then orchestrate submit"),
        run("first in line", State.PENDING, "next in line, waits for free nodes of this kind (Resources)"),
        run("in the queue", State.PENDING, "others are ahead in the queue (Priority)"),
        run("also there", State.PENDING, "others are ahead in the queue (Priority)"),
        run("b", State.RUNNING, epoch=2, epochs=4, samples_per_s=1234.0, silent_s=3.0),
        run("a", State.RUNNING, attempt=2, epoch=0, epochs=4, samples_per_s=1000.0, silent_s=100.0),
    ],
    num_unsubmitted=3,
)


def test_an_overview_counts_groups_and_orders() -> None:
    """What goes on first, then what needs a person, then the rest; reasons by how many runs have them."""
    assert [one.label for one in SEEN.sorted_runs] == [
        "a",
        "b",
        "also there",
        "first in line",
        "in the queue",
        "bad",
        "done",
    ]
    assert SEEN.counts == {
        State.SUCCEEDED: 1,
        State.OUT_OF_MEMORY: 1,
        State.PENDING: 3,
        State.RUNNING: 2,
        State.PLANNED: 3,
    }
    assert (SEEN.total, SEEN.num_live, SEEN.num_ended, SEEN.is_finished) == (10, 5, 2, False)
    assert [(group.count, group.reason[-10:]) for group in SEEN.waiting_reasons] == [
        (2, "(Priority)"),
        (1, "Resources)"),
    ]
    assert [(group.count, group.label) for group in SEEN.failures] == [(1, "bad")]
    assert SEEN.samples_per_s == 2234.0
    assert (
        StatusSummary([run("done", State.SUCCEEDED)]).is_finished
        and not StatusSummary(num_unsubmitted=1).is_finished
        and StatusSummary().is_finished
    )


def test_keys_are_told_apart_however_a_terminal_sends_them() -> None:
    """Arrows in both modes, pages, several keys in one piece, and an escape that is nothing but that."""
    assert screen_layout.split_keys("\x1b[A\x1bOBjk\x1b[5~q") == ["up", "down", "down", "up", "page up", "q"]
    assert screen_layout.split_keys("\x1b") == ["escape"]
    assert screen_layout.split_keys("\x1b[31~x") == ["\x1b[31~", "x"]


def test_a_selected_run_stays_selected_when_it_moves() -> None:
    """It is a run that is selected, not a line: the list is sorted anew at every look."""
    choice = Choice().press("down", SEEN)
    assert choice.run(SEEN).label == "b"  # type: ignore[union-attr]
    ended = StatusSummary([run("b", State.FAILED, "it broke"), run("a", State.RUNNING), run("c", State.PENDING)])
    assert choice.run(ended).label == "b"  # type: ignore[union-attr]
    assert choice.press("down", ended).run(ended).label == "b", "the last one"  # type: ignore[union-attr]
    assert choice.press("home", ended).run(ended).label == "a"  # type: ignore[union-attr]
    assert choice.press("page down", SEEN).run(SEEN).label == "done"  # type: ignore[union-attr]
    assert Choice().press("down", StatusSummary()) == Choice(), "nothing to select"
    assert Choice().press("f", SEEN).filter is Filter.LIVE
    failed = Choice(filter=Filter.FAILED)
    assert [one.label for one in failed.runs(SEEN)] == ["bad"] and failed.press("f", SEEN).filter is Filter.ALL
    assert Choice().press("?", SEEN).press("escape", SEEN) == Choice()
    assert Choice().press("x", SEEN) == Choice()


def _drawn(
    seen: StatusSummary = SEEN,
    choice: Choice = Choice(),  # noqa: B008
    log: list[str] | None = None,
    **size: int,
) -> list[str]:
    width, height = size.get("width", 110), size.get("height", 30)
    lines = screen_layout.draw(seen, choice, log or [], (width, height)).split("\n", allow_blank=True)
    assert len(lines) == height and all(line.cell_len <= width for line in lines)
    return [line.plain for line in lines]


def test_a_screen_shows_what_there_is_to_know() -> None:
    text = "\n".join(_drawn())
    for words in (
        "2/10 ended",
        "3 not submitted yet   3 pending   2 running   1 succeeded   1 out_of_memory   2,234 samples/s in total",
        "waits      2 x others are ahead in the queue (Priority)",
        "ended      1 x out_of_memory: the job's memory was full; raise mem, then orchestrate submit   (bad)",
        "[######......] epoch 2/4, 1,234 samples/s",
        "#2  [............] epoch 0/4, 1,000 samples/s, silent for 100 s",
        "q leave   ? help   j k select",
    ):
        assert words in text, text
    assert "> running       a" in text
    assert "log of b, attempt 1" in "\n".join(_drawn(choice=Choice().press("down", SEEN).press("l", SEEN)))
    assert _drawn(choice=Choice(help=True))[1].startswith("  q ")
    assert "no runs yet; next: orchestrate submit" in "\n".join(_drawn(StatusSummary()))


def test_a_look_that_failed_is_told_beside_what_was_seen_before() -> None:
    text = "\n".join(
        _drawn(StatusSummary(SEEN.runs, problem="results.db: the database is locked", updated_at=time.time() - 70))
    )
    assert re.search(r"7\d s ago   update failed: results.db: the database is locked", text)
    assert "> running       a" in text


@pytest.mark.parametrize("size", [(200, 60), (80, 24), (40, 10), (20, 5), (9, 3), (1, 1)])
def test_any_size_is_filled_and_not_exceeded(size: tuple[int, int]) -> None:
    """Also with more runs than lines, wide characters, a log, and names that try to command the terminal."""
    hostile = "\x1b[2J\x1b]0;pwned\x07\nrm -rf 文字 [bold]résumé\r" * 3
    many = [run(f"{hostile}{number}", State.RUNNING, hostile, epoch=1, epochs=3) for number in range(100)]
    seen = StatusSummary([*many, *SEEN.runs], notes=[hostile], problem=hostile)
    for choice in (Choice(), Choice(log=True), Choice(help=True), Choice(selected=many[50].run_id, log=True)):
        lines = _drawn(seen, choice, [hostile] * 50, width=size[0], height=size[1])
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", "".join(lines)), "nothing that a terminal would obey"


def test_the_selected_run_is_on_the_screen_wherever_it_is() -> None:
    many = StatusSummary([run(f"run {number:03}", State.PENDING) for number in range(300)])
    for number in (0, 1, 150, 298, 299):
        choice = Choice(selected=many.sorted_runs[number].run_id, log=True)
        assert sum(line.startswith(f"> pending       run {number:03}") for line in _drawn(many, choice)) == 1


def _monitor(tmp_path: Path, **options: Any) -> Monitor:
    return Monitor(Workspace(tmp_path / "runs", str(tmp_path / "results.db"), None), **options)


def test_a_look_that_fails_changes_nothing_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen stays, the reason is told once it is there, and goes when a look succeeds again."""
    answers: list[Any] = [
        [run("a", State.RUNNING)],
        CommandError(("squeue",), 1, "", "cannot reach the controller"),
        OSError(5, "Input/output error"),
        [run("a", State.SUCCEEDED)],
    ]

    def refresh_runs(workspace: Workspace, say: Any, **_options: Any) -> list[RunStatus]:
        answer = answers.pop(0)
        logging.getLogger("orchestrator").warning("Slurm is slow")
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    monkeypatch.setattr(monitor, "refresh_runs", refresh_runs)
    monitor_ = _monitor(tmp_path)
    first, second, third, fourth = (monitor_.poll() for _ in range(4))
    assert first.notes == ("Slurm is slow",) and not first.problem
    assert second.runs == first.runs and "cannot reach the controller" in second.problem
    assert third.runs == first.runs and "Input/output error" in third.problem and third.updated_at == first.updated_at
    assert not fourth.problem and fourth.is_finished


def test_what_can_never_be_looked_at_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no database; one that becomes so later may be put right meanwhile."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "results.db").write_text("somebody's notes\n" * 500)
    with pytest.raises(InputError, match="not an SQLite database"):
        _monitor(tmp_path).poll()
    monitor_ = _monitor(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(monitor, "refresh_runs", lambda *_, **__: [run("a", State.RUNNING)])
        first = monitor_.poll()
    second = monitor_.poll()
    assert second.runs == first.runs and "not an SQLite database" in second.problem


def test_lines_tell_each_change_once() -> None:
    """From the first look on for what we sent ourselves; what had ended before somebody looks is not news."""
    first = StatusSummary(
        [run("a", State.RUNNING), run("b", State.PENDING), run("c", State.SUCCEEDED)], notes=["a note"]
    )
    second = StatusSummary(
        [run("a", State.FAILED, "it broke"), run("b", State.PENDING), run("c", State.SUCCEEDED)], notes=["a note"]
    )
    third = StatusSummary([run("a", State.RUNNING, attempt=2), *second.runs[1:]], problem="no answer")
    said: list[str] = []
    lines = Lines(said.append, from_start=False)
    for seen in (first, second, second, third, third):
        lines.show(seen)
    assert said == [
        "a note",
        "1/3 done, 1 running, 1 waiting: a starting",
        "a: failed: it broke",
        "states are as last seen: no answer",
        "a: running",
    ]
    said.clear()
    Lines(said.append).show(first)
    assert said[1:3] == ["a: running", "c: succeeded"]


def test_lines_say_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same line not again and again."""
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    said: list[str] = []
    lines = Lines(said.append)
    queued = [run("a", State.PENDING, "waits for 1 core (0 of 2 free)"), run("b", State.PENDING, "waits for 1 core")]
    for second in range(0, 660, 20):
        now_s[0] = float(second)
        lines.show(StatusSummary(queued[:1] if second < 620 else queued))
    line = "0/1 done, 0 running, 1 waiting (waits for 1 core (0 of 2 free))"
    assert said == [line, line, "0/2 done, 0 running, 2 waiting (1 of them: waits for 1 core (0 of 2 free))"]


@dataclass
class _Site:
    name: str = "lab"
    max_submit: int = 8
    poll_seconds: float = 0.0


@dataclass
class _Plan:
    cluster: Any


def test_the_backlog_is_submitted_when_a_quarter_is_free_or_nothing_waits() -> None:
    """Few large arrays instead of many small ones, and never more often than the site's poll interval."""
    calls: list[int] = []

    def submit(*_arguments: Any, **_options: Any) -> SubmitResult:
        calls.append(1)
        return SubmitResult(backlog=["x"])

    site = _Site()
    backlog = Backlog(_Plan(site), SubmitResult(backlog=["x", "y"]), submit)  # type: ignore[arg-type]
    waits = [run(f"w{number}", State.PENDING) for number in range(4)]
    runs = [run(f"r{number}", State.RUNNING) for number in range(3)]
    assert backlog.submit_more([*waits, *runs]) == [] and not calls, "7 of 8"
    backlog.submit_more([*waits[:3], *runs])
    assert len(calls) == 1, "6 of 8"
    backlog.submit_more([*runs, *runs, run("r4", State.RUNNING)])
    assert len(calls) == 2, "7 of 8, and all of them run"
    site.poll_seconds = 60.0
    backlog.submit_more([])
    assert len(calls) == 2, "submitted a moment ago"
    assert backlog.result.backlog == ["x"]


def test_looking_takes_a_fifth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of runs on a slow disk do not keep a login node busy."""
    pauses: list[float] = []

    class View:
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...
        def show(self, seen: StatusSummary) -> None: ...
        def pause(self, seconds: float) -> bool:
            pauses.append(seconds)
            return len(pauses) < 2

    def look() -> StatusSummary:
        time.sleep(0.3 if len(pauses) else 0.0)
        return SEEN

    assert follow(look, View()) == (SEEN, True)
    assert pauses[0] == monitor.POLL_S and 1.5 <= pauses[1] < 5


# --- in a real terminal ---


@dataclass
class Terminal:
    """``orchestrate ARGUMENTS`` in a terminal of its own."""

    process: subprocess.Popen[bytes]
    main: int
    side: int
    screen: str = ""

    @classmethod
    def start(cls, folder: Path, *arguments: str, patch: str = "") -> Terminal:
        main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-c", f"{patch}\nfrom orchestrator.cli import main\nmain()", *arguments],
            cwd=folder,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}} | {"TERM": "xterm"},
        )
        return cls(process, main, side)

    def until(self, words: str, within_s: float = 30.0) -> str:
        """Read until these words come; all up to them since those of the last time."""
        deadline = time.monotonic() + within_s
        while words not in self.screen:
            assert time.monotonic() < deadline, f"no {words!r} in {self.screen[-2000:]!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.screen += re.sub(r"\x1b\[[0-9;]*m", "", os.read(self.main, 65536).decode(errors="replace"))
        found, _, self.screen = self.screen.partition(words)
        return found + words

    def type(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def resize(self, height: int, width: int) -> None:
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def modes(self) -> list[Any]:
        return list(termios.tcgetattr(self.side))


LEFT = "\x1b[?1049l"
"""What switches a terminal back from its second screen."""


@pytest.fixture
def workspace(campaign: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder with three runs: one that runs elsewhere and has printed something, one done, one that failed."""
    database = str(tmp_path / "results.db")
    specs = [campaign.spec(label=label, seed=seed) for seed, label in enumerate(["goes on", "good", "bad"])]
    with open_store(database) as store:
        intents = record_intents(store, campaign.runs, [(spec, ResourceShape()) for spec in specs], "elsewhere")
        for spec, state in zip(specs, (State.RUNNING, State.SUCCEEDED, State.FAILED), strict=True):
            RunDir.of(campaign.runs, spec.run_id).write_spec(spec)
            update_statuses(
                store, [StatusUpdate(spec.run_id, 1, state, message="it broke" if state is State.FAILED else "")]
            )
        assert len(intents) == 3
    attempt = RunDir.of(campaign.runs, specs[0].run_id).attempt(1).create()
    progress = {"rank": 0, "time": time.time(), "epoch": 1, "epochs": 4, "samples_per_s": 50.0}
    write_json(attempt.progress(0), progress)
    (attempt.job_folder / "1_0_log.out").write_text("first line\nlast \x1b[2Jline of its log\n")
    yield tmp_path


def test_the_last_lines_of_a_log(workspace: Path) -> None:
    (log,) = workspace.glob("runs/*/*/attempts/1/job/*.out")
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert log_files.last_lines(_attempt(log), None, 3) == ["line 99997", "line 99998", "line 99999"]


def _attempt(log: Path) -> Any:
    return RunDir(log.parents[3]).attempt(1)


def test_watch_in_a_terminal(workspace: Path) -> None:
    """Draws, follows keys and the size of the window, is left with q, and leaves the terminal as it was."""
    terminal = Terminal.start(workspace, "watch", "--runs", "runs", "--db", "results.db")
    before = terminal.modes()
    text = terminal.until("epoch 1/4, 50 samples/s") + terminal.until("list: all")
    assert "\x1b[?1049h" in text, "the second screen, so that nothing is lost of what was there before"
    for words in ("2/3 ended", "1 running   1 succeeded   1 failed", "epoch 1/4, 50 samples/s", "failed: it broke"):
        assert words in text
    assert terminal.modes() != before, "keys come without Enter"
    terminal.type("l")
    assert r"last \x1b[2Jline of its log" in terminal.until("of its log")
    terminal.type("j")
    terminal.until("> failed")
    terminal.resize(12, 30)
    assert "> failed        bad         i…" in terminal.until("j k select…")
    terminal.type("xq")
    terminal.until("nothing was stopped; orchestrate watch shows this again")
    assert terminal.process.wait(10) == 0
    assert terminal.modes() == before
    again = Terminal.start(workspace, "watch", "--runs", "runs", "--db", "results.db")
    again.until("epoch 1/4, 50 samples/s")
    os.killpg(again.process.pid, signal.SIGINT)
    again.until(LEFT)
    again.until("nothing was stopped")
    assert again.process.wait(10) == 130


SLOW = """
import time
from orchestrator.tracking import tracker
tracker.refresh = lambda *a, **k: time.sleep(120)
"""


DEAF = """
import time
from orchestrator.tracking import tracker
def refresh(*a, **k):
    try:
        time.sleep(120)
    except BaseException:
        time.sleep(120)
tracker.refresh = refresh
"""
"""As in the callbacks of an import, where Python prints an exception and goes on."""


@pytest.mark.parametrize("patch", [SLOW, DEAF], ids=["slow", "deaf"])
def test_leaving_does_not_wait_for_a_slow_answer(workspace: Path, patch: str) -> None:
    """Slurm may take a minute to answer; q takes seconds at most, SIGTERM leaves the terminal in order too."""
    for key, code in (("q", 0), ("", 128 + signal.SIGTERM)):
        terminal = Terminal.start(workspace, "watch", patch=patch)
        before = terminal.modes()
        terminal.until("updating ...")
        started = time.monotonic()
        if key:
            terminal.type(key)
        else:
            terminal.process.terminate()
        terminal.until(LEFT)
        assert terminal.process.wait(10) in {code, 130} and time.monotonic() - started < 8
        assert terminal.modes() == before


EARLY = """
import os, signal
def then_ended(before):
    def function(*arguments):
        answer = before(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return answer
    return function
"""
MOMENTS = {
    "the keys are read": "import tty\ntty.setcbreak = then_ended(tty.setcbreak)",
    "the screen is entered": "from rich.console import Console as C\nC.set_alt_screen = then_ended(C.set_alt_screen)",
    "the screen is up": "from rich.live import Live\nLive.start = then_ended(Live.start)",
    "it leaves": "import threading\nthreading.Thread.join = then_ended(threading.Thread.join)",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_leaves_the_terminal_in_order(workspace: Path, moment: str) -> None:
    """While it is set up, or put away for an earlier signal."""
    terminal = Terminal.start(workspace, "watch", patch=EARLY + MOMENTS[moment])
    before = terminal.modes()
    if moment == "it leaves":
        terminal.until("epoch 1/4, 50 samples/s")
        terminal.process.terminate()
    terminal.until(LEFT)
    assert terminal.process.wait(10) == 128 + signal.SIGTERM
    assert terminal.modes() == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT], ids=str)
def test_other_signals_leave_the_terminal_in_order(workspace: Path, number: signal.Signals) -> None:
    """Unless they are ignored, as in what a shell without job control starts in the background: not so here."""
    heeded = f"import signal\nsignal.signal({int(number)}, signal.SIG_DFL)"
    terminal = Terminal.start(workspace, "watch", patch=heeded)
    before = terminal.modes()
    terminal.until("epoch 1/4, 50 samples/s")
    terminal.process.send_signal(number)
    terminal.until(LEFT)
    assert terminal.process.wait(10) == 128 + number
    assert terminal.modes() == before


def test_keys_typed_before_the_screen_is_up_count(workspace: Path) -> None:
    terminal = Terminal.start(workspace, "watch", patch="import time\ntime.sleep(0.5)")
    terminal.type("q")
    terminal.until("nothing was stopped")
    assert terminal.process.wait(10) == 0


def test_watch_without_a_terminal_prints_lines_until_all_is_over(workspace: Path) -> None:
    """For a log file: the whole once, then each change, then the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "watch"], cwd=workspace, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "2/3 done, 1 running, 0 waiting: goes on epoch 1/4, 50 samples/s\n"
    with open_store(str(workspace / "results.db")) as store:
        (row,) = workspace.glob("runs/*/*/attempts/1/progress.0.json")
        update_statuses(store, [StatusUpdate(row.parents[2].name, 1, State.LOST, message="no sign of life")])
    rest, _ = process.communicate(timeout=20)
    assert rest == "goes on: lost: no sign of life\n3/3 done, 0 running, 0 waiting\n"
    assert process.returncode == 0
    empty = workspace / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "watch"], cwd=empty, capture_output=True, text=True, check=True
    )
    assert done.stdout == "no runs yet; next: orchestrate submit\n"
