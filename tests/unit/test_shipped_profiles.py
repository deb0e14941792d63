"""Scripts of every shipped profile: Slurm and the site accept them; what cannot run has its reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cluster import cluster_file, job_script, sample_scripts, script_lint
from orchestrator.cluster.profile import ClusterProfile, GpuNodes
from orchestrator.cluster.sample_scripts import Sample

RUNS = Path("/scratch/me/study/runs")
PYTHON = "/scratch/me/env/bin/python"
SHIPPED = sorted(cluster_file.shipped())


def reason_against_two(name: str, kind: str, nodes: GpuNodes) -> str:
    """Beginning of the reason why a type cannot run on two GPUs; empty where it can."""
    if nodes.mig:
        return f"{kind} is a MIG slice"
    one = f"it needs 2 GPUs per node, and {kind} nodes of {name} have 1 GPU"
    return one if nodes.node_gpus == 1 else ""


def profile(name: str) -> ClusterProfile:
    """With an account where the site requires one."""
    loaded = cluster_file.load(name)
    return loaded.model_copy(update={"account": "abc123"}) if loaded.needs_account else loaded


def options(script: str) -> dict[str, str]:
    """``#SBATCH`` lines of a script, read independently of the lint."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    assert len(found) == script.count("#SBATCH") and len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize("name", SHIPPED)
def test_two_gpus_of_each_type(name: str) -> None:
    """For an hour and for each queue's limit: one option for GPUs, at most one for memory, nothing forbidden."""
    site = profile(name)
    assert not sample_scripts.profile_faults(site)
    by_kind: dict[str, list[Sample]] = {}
    for made in sample_scripts.samples(site, runs=RUNS):
        by_kind.setdefault(made.hardware, []).append(made)
    for kind, nodes in site.gpu.items():
        made = by_kind[f"{kind}:2"]
        if reason := reason_against_two(name, kind, nodes):
            assert all(m.reason.startswith(reason) for m in made)
            continue
        assert any(m.text for m in made), [m.reason for m in made]
        for pair in (m for m in made if m.text):
            assert pair.text.startswith("#!") and "\r" not in pair.text
            first_command = re.search(r"^[^#\s]", pair.text, re.MULTILINE)
            assert first_command and pair.text.rindex("#SBATCH") < first_command.start()
            said = options(pair.text)
            assert len(said.keys() & script_lint.GPU_DIRECTIVES) == (0 if nodes.request == "none" else 1)
            asks_memory = nodes.mem_style != "none" and nodes.mem_per_gpu_bytes is not None
            assert len(said.keys() & script_lint.MEMORY_DIRECTIVES) == asks_memory
            assert not said.keys() & set(site.forbid)
            assert said["nodes"] == "1" and ("account" in said) == bool(site.account)
            caps = {(q.partition, q.qos): q.max_time_s for q in nodes.queue} or {("", ""): 0}
            cap = caps[said.get("partition", ""), said.get("qos", "")]
            assert not cap or pair.time_limit_s <= cap
        longest = max(m.time_limit_s for m in made)
        if nodes.queue:
            assert f"no {kind} queue accepts a job of" in next(m.reason for m in made if m.time_limit_s == longest)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_profile_states_what_is_known_and_what_is_assumed(name: str) -> None:
    """In a comment at its top; it has one table, of its own name."""
    text = cluster_file.shipped()[name]
    top = text.split("\n[", 1)[0]
    assert "# Known" in top and "# Assumed: " in top and len(top) > 100
    assert list(tomllib.loads(text)["cluster"]) == [name]


def test_the_number_of_profiles_in_the_readme() -> None:
    """README.md has the right number."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"{len(SHIPPED)} cluster profiles are included" in readme


HOSTS = {
    "sol": "login01.sol.rc.asu.edu",
    "phoenix": "login01.phx.rc.asu.edu",
    "lonestar6": "login1.ls6.tacc.utexas.edu",
    "jean-zay": "jean-zay3",
    "sherlock": "sh03-ln06.stanford.edu",
    "delta": "dt-login02.delta.ncsa.illinois.edu",
    "cannon": "holylogin05.rc.fas.harvard.edu",
    "narval": "narval1.narval.calcul.quebec",
}


def test_a_host_belongs_to_one_profile_at_most(tmp_path: Path) -> None:
    """Patterns do not overlap, and a profile without one is never found by a host's name."""
    for name, host in {**HOSTS, "": "login.example.org"}.items():
        matching = [other for other in SHIPPED if cluster_file.load(other).matches(host)]
        assert matching == ([name] if name else [])
        if name:
            chosen = cluster_file.choose(
                local=False, named=None, cwd=tmp_path, hostname=host, which=lambda _: "/bin/sbatch"
            )
            assert chosen is not None and chosen.name == name


@pytest.mark.parametrize(
    ("name", "hardware"), [("lonestar6", "a100:2"), ("perlmutter", "a100:2"), ("lumi-g", "mi250x:2")]
)
def test_golden_scripts(name: str, hardware: str, golden: Callable[[str, str], None]) -> None:
    """The scripts of the sites that differ most from Sol, whose own are in test_job_script: no request for GPUs and a
    whole node; a constraint without a partition; another vendor."""
    site = profile(name).model_copy(update={"python": PYTHON})
    made = sample_scripts.sample(site, hardware, 3600, runs=RUNS)
    golden(f"{name}-{hardware.replace(':', '-')}-probe.sh", made.text)


BROKEN = {
    "": "the script does not start with #!",
    "\n#!/bin/bash\n{d}": "the script does not start with #!",
    "#!/bin/bash\n{d}#SBATCH --mem-per-gpu=1G\n": "memory is requested in 2 ways: --mem and --mem-per-gpu",
    "#!/bin/bash\n{d}#SBATCH --gpus=2\n": "GPUs are requested in 2 ways: --gpus and --gres",
    "#!/bin/bash\n{d}#SBATCH -t 90\n": "--time is given 2 times, and Slurm uses the last",
    "#!/bin/bash\n{d}#SBATCH --reservation=x\n": "--reservation is forbidden at this site",
    "#!/bin/bash\nset -e\n{d}": "Slurm would ignore line 3 of the script: #SBATCH --nodes=1",
    "#!/bin/bash\n #SBATCH --nice\n{d}": "Slurm would ignore line 2 of the script: #SBATCH --nice",
    "#!/bin/bash\n": "--nodes is missing",
}


@pytest.mark.parametrize("script", BROKEN)
def test_the_lint_finds_each_kind_of_fault(script: str) -> None:
    """One script for each, with no other fault."""
    site = profile("sol")
    made = sample_scripts.sample(site, "a100:2", 3600)
    assert made.shape is not None
    wanted = job_script.directives(made.shape, site, jobs="/runs/jobs")
    lines = "".join(f"{line}\n" for line in made.text.split("\n") if line.startswith("#SBATCH"))
    assert not list(script_lint.script_faults(f"#!/bin/bash\n{lines}", wanted, ["reservation"]))
    found = [fault.what for fault in script_lint.script_faults(script.replace("{d}", lines), wanted, ["reservation"])]
    assert found[0] == BROKEN[script]


ALL_BUT = '{%% for option in directives if not option.startswith("%s") %%}\n#SBATCH {{ option }}\n{%% endfor %%}\n'


@pytest.mark.parametrize(
    ("block", "what"),
    [("", "--nodes is missing"), *((ALL_BUT % name, f"{name} is missing") for name in ("--partition", "--qos"))],
)
def test_a_template_must_keep_the_options_of_the_plan(tmp_path: Path, block: str, what: str) -> None:
    """Limits, and the queue whose limits the plan kept."""
    template = tmp_path / "mine.sh.j2"
    template.write_text(f'{{% extends "slurm.sh.j2" %}}\n{{% block directives %}}\n{block}{{% endblock %}}\n')
    site = profile("sol").model_copy(update={"template": str(template)})
    (fault, *_) = sample_scripts.profile_faults(site)
    assert (fault.what, fault.hint) == (f"a100:2: {what}", "write {{ super() }} in the block directives")


def test_a_profile_that_can_run_nothing() -> None:
    """One sentence with the reasons."""
    text = '[cluster.x]\nlauncher = "none"\n[cluster.x.gpu.a30]\nnode_gpus = 2\ncpus_per_gpu = 1\n'
    (fault,) = sample_scripts.profile_faults(cluster_file.parse_file(text, "cluster.toml")["x"])
    assert (
        fault.what
        == "no run is possible here: launcher none starts one process; several ranks need launcher srun or torchrun"
    )
