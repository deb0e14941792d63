"""Options and fixtures of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

# Runs of the tests do not wait for cores that other runs on this machine hold.
os.environ["ORCHESTRATE_LEASES"] = f"tests-{os.getpid()}"

# What runs in the background of a script has SIGINT ignored and hands that on; commands under test shall hear Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="write tests/golden anew instead of comparing with it; read the difference before you commit",
    )


def _on_ci() -> bool:
    return os.environ.get("CI", "").lower() in {"1", "true"}


def _fail_for_skip(report: pytest.TestReport | pytest.CollectReport, what: str) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{what} was skipped, and CI promises to run it: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In continuous integration a skip is a failure, but for tests of what is not promised there."""
    report = yield
    excused = any(item.get_closest_marker(name) for name in ("gpu", "optional"))
    if report.skipped and not excused and _on_ci():
        _fail_for_skip(report, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole module that skips itself, as with ``importorskip``, has no tests that could be excused."""
    report = yield
    if report.skipped and _on_ci():
        _fail_for_skip(report, collector.nodeid)
    return report


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of ``tests/golden`` as a whole; a missing file is a failure."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--regenerate-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"there is no {path}; write it with --regenerate-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare
