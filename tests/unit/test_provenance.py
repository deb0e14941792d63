"""Digests that decide whether a result is stale, and the age of a process."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import time
from pathlib import Path

import workloads
from workloads.provenance import job_facts, software

PRINT_DIGEST = "import workloads.provenance.software as p; print(p.code_digest())"


def _digest_of(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", PRINT_DIGEST], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_code_digest_covers_every_source_and_nothing_else(tmp_path: Path) -> None:
    """A copy elsewhere has the same digest; a changed line has another; caches and data do not count."""
    package = tmp_path / "workloads"
    shutil.copytree(Path(workloads.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = _digest_of(tmp_path)
    assert before == _digest_of(tmp_path)
    (package / "notes.txt").write_text("x")
    assert _digest_of(tmp_path) == before
    with open(package / "models" / "cnn.py", "a") as stream:
        stream.write("# changed\n")
    assert _digest_of(tmp_path) != before


def test_the_packages_digest_covers_measured_packages_only() -> None:
    versions = {"torch": "2.6.0", "rich": "13.7"}
    assert software.packages_digest(versions) == software.packages_digest(versions | {"rich": "14.0"})
    assert software.packages_digest(versions) != software.packages_digest(versions | {"torch": "2.6.1"})
    assert software.packages_digest(versions) != software.packages_digest(versions | {"timm": "1.0"})
    assert software.canonical_name("Scikit_Learn") == "scikit-learn"


def test_collected_facts() -> None:
    found = job_facts.collect("c0de")
    assert found["code_digest"] == "c0de"
    assert found["packages"]["submitit"] and found["python"] and found["cores"] >= 1
    assert found["git"] is None or len(found["git"]["commit"]) == 40


def test_process_age_counts_from_the_start_of_the_interpreter() -> None:
    """Time before the first line of Python counts too, and the clock runs."""
    code = "import time; time.sleep(0.5); from workloads.measurement.timing import process_age_s as a; print(a())"
    started = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert 0.5 <= age <= time.monotonic() - started + 0.02


def test_installed_packages_match_their_metadata() -> None:
    """Told from folder names alone, and equal to what reading every metadata file says; of several the first counts."""
    found = software.installed_packages()
    named: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if distribution.metadata["Name"]:
            named.setdefault(software.canonical_name(distribution.metadata["Name"]), distribution.version)
    assert named
    for name, version in named.items():
        assert found[name] == version
