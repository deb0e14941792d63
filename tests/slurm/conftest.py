"""A throw-away Slurm for the tests that are marked ``slurm``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, missing, running


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A running cluster. Without Slurm the tests are skipped, but in continuous integration they fail."""
    lacking = missing()
    if lacking:
        reason = f"no Slurm here: {', '.join(lacking)} missing (packages slurmctld, slurmd, slurm-client, munge)"
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(reason)
        pytest.skip(reason)
    # Not below pytest's folder: munge's socket must have a short path.
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    try:
        with running(folder / "slurm") as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
