"""Throw-away clusters for the tests that are marked ``slurm``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import releases
from tests.slurm.lab import Lab, missing, running

_UNREACHED: list[str] = []
"""Why the newer release was not tested."""


def booted(**options: Any) -> Iterator[Lab]:
    """A running cluster. Without Slurm the tests are skipped, but in continuous integration they fail."""
    lacking = missing(accounting=bool(options.get("accounting")))
    if lacking:
        packages = "slurmctld, slurmd, slurm-client, munge, slurmdbd, mariadb-server-core, mariadb-client-core"
        reason = f"no Slurm here: {', '.join(lacking)} missing (packages {packages})"
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(reason)
        pytest.skip(reason)
    # Not below pytest's folder: munge's socket must have a short path, and other users must reach it.
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    folder.chmod(0o755)
    try:
        with running(folder / "slurm", **options) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A cluster without accounting."""
    yield from booted()


@pytest.fixture(scope="session")
def accounting_lab() -> Iterator[Lab]:
    """A cluster with accounting, in which the user ``nobody`` has an account."""
    yield from booted(accounting=True, users=("nobody",))


@pytest.fixture(scope="session")
def newer_release() -> releases.Release | None:
    """Slurm 24.11 of Debian 13; None if its packages cannot be fetched, which the summary then reports."""
    try:
        return releases.newer_release()
    except releases.UnreachableError as error:
        _UNREACHED.append(str(error))
        return None


@pytest.fixture(scope="session")
def newer_lab(newer_release: releases.Release) -> Iterator[Lab]:
    """A cluster of the newer release, with accounting."""
    yield from booted(accounting=True, release=newer_release)


@pytest.fixture
def any_lab(request: pytest.FixtureRequest) -> Lab:
    """The cluster without accounting; for a test marked ``both``, afterwards the cluster of the newer release."""
    if getattr(request, "param", "installed") == "installed":
        return request.getfixturevalue("lab")  # type: ignore[no-any-return]
    if request.getfixturevalue("newer_release") is None:
        request.node.add_marker("optional")  # an archive may not answer
        pytest.skip(f"Slurm {releases.NEWER}: {_UNREACHED[-1]}")
    return request.getfixturevalue("newer_lab")  # type: ignore[no-any-return]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report what could not be tested apart from the skipped tests."""
    for why in _UNREACHED:
        terminalreporter.write_sep("!", f"Slurm {releases.NEWER} was NOT tested: {why}", red=True)
