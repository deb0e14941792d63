"""The second release of Slurm runs what it names, and tests report if it is not available."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.slurm import releases
from tests.slurm.lab import Lab

pytestmark = pytest.mark.slurm


@releases.newer
def test_login_node_controller_and_jobs_are_of_the_newer_release(any_lab: Lab, tmp_path: Path) -> None:
    """The clients, the controller and the srun in a job; none of them is the machine's own Slurm."""
    version = f"slurm-wlm {releases.NEWER}."
    assert any_lab.command("sinfo", "--version").startswith(version)
    assert f"SLURM_VERSION           = {releases.NEWER}." in any_lab.command("scontrol", "show", "config")
    script = tmp_path / "job.sh"
    programs = any_lab.release.programs
    script.write_text(f"#!/bin/bash\n#SBATCH --export=NONE\nPATH={programs}:$PATH\nsrun --version\n")
    job = any_lab.wait(any_lab.submit(script, f"--output={tmp_path / 'out'}", "--partition=htc"))
    assert (tmp_path / "out").read_text().startswith(version), job


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="asks apt")
@pytest.mark.optional
def test_unreachable_or_broken_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused connections skip the tests of the release; nothing incomplete stays in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(releases, "_archive", lambda: "http://127.0.0.1:9/debian")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(releases.UnreachableError, match=r"127\.0\.0\.1"):
        releases.newer_release()
    assert [path.name for path in (tmp_path / "orchestrate" / "slurm").iterdir()] == ["lock"]


def test_without_an_archive_of_debian_apt_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake apt knows none; nothing incomplete stays in the cache."""
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(releases, "KEYRING", tmp_path / "apt-get")
    with pytest.raises(releases.UnreachableError, match="apt knows no archive of Debian here: name one"):
        releases.newer_release()
    assert [path.name for path in (tmp_path / "orchestrate" / "slurm").iterdir()] == ["lock"]
