"""The wheel works in an empty folder with the source away: no template, study or migration is missing from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_plans_and_collects_without_the_source(tmp_path: Path) -> None:
    """Built, installed without the source tree in reach, and used for init, plan on a cluster, collect and results."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    # Dependencies come from this environment, our packages from the wheel only: its folder is first on the path.
    site = tmp_path / "site"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

    def orchestrate(*argv: str) -> str:
        code = (
            "import sys, orchestrator, workloads, db, templates;"
            f"assert all(m.__path__[0].startswith({str(site)!r}) for m in (orchestrator, workloads, db, templates));"
            "from orchestrator.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], cwd=work, capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    orchestrate("init", "--study", "demo")
    assert "8 to submit" in orchestrate("plan", "--local")
    (work / "experiment.toml").write_text(
        '[matrix]\nmodel="resnet18"\ndataset="synthetic"\nstrategy="ddp"\nhardware="a100:2"\n'
    )
    assert orchestrate("plan", "--cluster", "sol", "--scripts").startswith("#!")
    (work / "runs").mkdir()
    orchestrate("collect")
    orchestrate("results")
