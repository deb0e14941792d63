"""The throw-away cluster itself, started as in docs/slurm.md: nothing of it outlives its process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.lab import DAEMONS
from tests.slurm.study import ROOT

pytestmark = pytest.mark.slurm


def _processes(folder: Path) -> list[str]:
    """Return the daemons whose arguments name a cluster's folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            argv = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if Path(argv[0]).name in DAEMONS and any(str(folder) in word for word in argv[1:]):
            found.append(Path(argv[0]).name)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_cluster_of_the_recipe(
    number: signal.Signals, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """When the process is killed or its terminal closed, every daemon ends with it."""
    recipe = re.search(r"bin/python -c '\n(.*?)'\n```", (ROOT / "docs" / "slurm.md").read_text(), re.DOTALL)
    assert recipe
    home = tmp_path_factory.mktemp("h")
    process = subprocess.Popen(
        [sys.executable, "-c", recipe[1]],
        cwd=ROOT,
        env={**os.environ, "HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Tests that nohup started would pass on that it is ignored.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    with process:
        assert process.stdout
        assert process.stdout.readline() == f"export SLURM_CONF={home}/lab/slurm.conf    # Enter ends the cluster\n"
        assert set(_processes(home)) == set(DAEMONS)
        # A signal that comes between the prompt and the read of it is not seen before the read has ended.
        state = Path("/proc", str(process.pid), "stat")
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert _processes(home) == []
