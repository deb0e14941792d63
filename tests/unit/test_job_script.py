"""The job script: its directives for each kind of site, how Slurm and the shell read it, golden scripts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cluster import cluster_file, job_script, resources
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.errors import ClusterError, InputError
from workloads import registry
from workloads.contract import Execution, Hardware, ResourceShape, TrainConfig

RUNS = Path("/scratch/me/study/runs")
PYTHON = "/scratch/me/env/bin/python"


def placed(profile: ClusterProfile, hardware: str, strategy: str = "ddp", hours: int = 1) -> ResourceShape:
    asked = Hardware.parse(hardware)
    cpus = resources.default_cpus(profile)(asked, asked.devices)
    train = TrainConfig(model="cnn", dataset="digits", strategy=strategy, hardware=asked, cpus=cpus)
    execution = Execution(time_limit_s=hours * 3600)
    shape = resources.place(train, execution, registry.strategies()[strategy], profile, None)
    assert isinstance(shape, ResourceShape), shape
    return shape


def text(profile: ClusterProfile, hardware: str, strategy: str = "ddp", runs: Path = RUNS) -> str:
    return job_script.render(placed(profile, hardware, strategy), profile, runs=runs, python=PYTHON)


@pytest.mark.parametrize(("hardware", "strategy"), [("a100:2", "ddp"), ("a30:2", "ddp"), ("a100:1", "eager")])
def test_golden_scripts_of_sol(hardware: str, strategy: str, golden: Callable[[str, str], None]) -> None:
    """The whole script, byte for byte, so that a review shows each change."""
    golden(f"sol-{hardware.replace(':', '-')}-{strategy}.sh", text(cluster_file.load("sol"), hardware, strategy))


COMMON = {"output", "open-mode", "signal"}
GPU_DIRECTIVES = {"gres", "gpus", "gpus-per-node", "gpus-per-task"}
MEMORY_DIRECTIVES = {"mem", "mem-per-gpu", "mem-per-cpu"}

SITES: dict[str, tuple[str, str, dict[str, str | bool]]] = {
    "perlmutter": (
        """
        account = "m1234"
        export = ""
        srun_args = ["--gpu-bind=none"]
        [cluster.x.gpu.a100]
        request = "gpus_per_task"
        constraint = "gpu&hbm80g"
        node_gpus = 4
        node_cores = 128
        cpus_per_gpu = 32
        mem_style = "none"
        queue = [{ qos = "shared", max_time = "48h", max_gpus = 2 }, { qos = "regular", max_time = "24h" }]
        """,
        "a100:2",
        {
            "account": "m1234",
            "constraint": "gpu&hbm80g",
            "qos": "shared",
            "gpus-per-task": "1",
            "cpus-per-task": "32",
            "ntasks-per-node": "2",
        },
    ),
    "lonestar6": (
        """
        account = "ABC123"
        export = ""
        forbid = ["gres", "gpus-per-task", "mem", "export", "nodelist"]
        [cluster.x.gpu.a100]
        request = "none"
        node_gpus = 3
        node_cores = 128
        cpus_per_gpu = 42
        cpus_by = "none"
        mem_style = "none"
        queue = [{ partition = "gpu-a100", max_time = "48h", max_nodes = 8 }]
        """,
        "a100:2",
        {"account": "ABC123", "partition": "gpu-a100", "ntasks-per-node": "2"},
    ),
    "jean-zay": (
        """
        account = "abc"
        export = ""
        extra = { hint = "nomultithread" }
        [cluster.x.gpu.a100]
        account_suffix = "@a100"
        request = "gres"
        constraint = "a100"
        node_gpus = 8
        cpus_per_gpu = 8
        mem_style = "none"
        queue = [{ qos = "qos_gpu_a100-dev", max_time = "2h" }, { qos = "qos_gpu_a100-t3", max_time = "20h" }]
        """,
        "a100:2",
        {
            "account": "abc@a100",
            "constraint": "a100",
            "qos": "qos_gpu_a100-dev",
            "gres": "gpu:2",
            "cpus-per-task": "8",
            "ntasks-per-node": "2",
            "hint": "nomultithread",
        },
    ),
    "narval": (
        """
        account = "def-pi"
        [cluster.x.gpu.a100]
        request = "gpus_per_node"
        type = "a100"
        node_gpus = 4
        cpus_per_gpu = 12
        mem_per_gpu = "63500M"
        """,
        "a100:2",
        {
            "account": "def-pi",
            "export": "NONE",
            "gpus-per-node": "a100:2",
            "cpus-per-task": "12",
            "ntasks-per-node": "2",
            "mem": "127000M",
        },
    ),
    "delta": (
        """
        account = "bxyz"
        account_suffix = "-delta-gpu"
        export = ""
        srun_args = ["--gpu-bind=closest"]
        [cluster.x.gpu.a100]
        request = "gpus_per_node"
        constraint = "scratch"
        node_gpus = 4
        node_cores = 64
        cpus_per_gpu = 16
        mem_per_gpu = "50G"
        queue = [{ partition = "gpuA100x4", max_time = "48h" }]
        """,
        "a100:2",
        {
            "account": "bxyz-delta-gpu",
            "constraint": "scratch",
            "partition": "gpuA100x4",
            "gpus-per-node": "2",
            "cpus-per-task": "16",
            "ntasks-per-node": "2",
            "mem": "100G",
        },
    ),
    "lumi": (
        """
        account = "project_465000000"
        export = ""
        [cluster.x.gpu.mi250x]
        request = "gpus_per_node"
        vendor = "amd"
        node_gpus = 8
        node_cores = 56
        cpus_per_gpu = 7
        mem_per_gpu = "60G"
        mem_style = "per_gpu"
        queue = [{ partition = "small-g", max_time = "3-00:00:00" }]
        """,
        "mi250x:2",
        {
            "account": "project_465000000",
            "partition": "small-g",
            "gpus-per-node": "2",
            "cpus-per-task": "7",
            "ntasks-per-node": "2",
            "mem-per-gpu": "60G",
        },
    ),
    "mila": (
        """
        export = ""
        requeue = "requeue"
        srun_args = ["--gres-flags=allow-task-sharing"]
        [cluster.x.gpu.l40s]
        request = "gpus_per_task"
        type = "l40s"
        node_gpus = 4
        cpus_per_gpu = 4
        mem_per_gpu = "16G"
        mem_style = "per_gpu"
        queue = [{ partition = "main", max_gpus = 2, max_cpus = 8, max_time = "5-00:00:00" }, { partition = "long" }]
        """,
        "l40s:2",
        {
            "partition": "main",
            "gpus-per-task": "l40s:1",
            "cpus-per-task": "4",
            "ntasks-per-node": "2",
            "mem-per-gpu": "16G",
            "requeue": True,
        },
    ),
    "sherlock": (
        """
        [cluster.x.gpu.a100]
        request = "gpus"
        constraint = "GPU_MEM:80GB"
        node_gpus = 8
        cpus_per_gpu = 16
        mem_per_gpu = "32G"
        mem_style = "per_cpu"
        queue = [{ partition = "gpu", max_time = "2-00:00:00" }]
        """,
        "a100:2",
        {
            "export": "NONE",
            "constraint": "GPU_MEM:80GB",
            "partition": "gpu",
            "gpus": "2",
            "cpus-per-task": "16",
            "ntasks-per-node": "2",
            "mem-per-cpu": "2G",
        },
    ),
    "gilbreth": (
        """
        account = "lab"
        [cluster.x.gpu.a30]
        request = "gres"
        node_gpus = 3
        cpus_per_gpu = 8
        cpus_by = "gpu"
        mem_per_gpu = "40G"
        queue = [{ partition = "a30", qos = "normal" }]
        """,
        "a30:2",
        {
            "account": "lab",
            "export": "NONE",
            "partition": "a30",
            "qos": "normal",
            "gres": "gpu:2",
            "cpus-per-gpu": "8",
            "ntasks-per-node": "2",
            "mem": "80G",
        },
    ),
    "whole nodes": (
        """
        [cluster.x.gpu.A30]
        request = "gres"
        type = "A30"
        node_gpus = 4
        ask_gpus = 4
        cpus_per_gpu = 8
        exclusive = true
        mem_per_gpu = "all"
        """,
        "A30:2",
        {
            "export": "NONE",
            "exclusive": True,
            "gres": "gpu:A30:4",
            "cpus-per-task": "8",
            "ntasks-per-node": "2",
            "mem": "0",
        },
    ),
}


def site(name: str) -> ClusterProfile:
    return cluster_file.parse_file(f"[cluster.x]\n{SITES[name][0]}", name)["x"]


@pytest.mark.parametrize("name", SITES)
def test_each_site_gets_its_own_set_of_directives(name: str) -> None:
    """Exactly this set for two GPUs: at most one option for GPUs and one for memory, nothing forbidden."""
    profile = site(name)
    _, hardware, expected = SITES[name]
    got = job_script.directives(placed(profile, hardware), profile, jobs="/runs/jobs")
    policy = {} if expected.get("requeue") else {"no-requeue": True}
    assert {k: v for k, v in got.items() if k not in COMMON} == {
        "nodes": "1",
        "time": "0-01:00:00",
        **policy,
        **expected,
    }
    assert len(GPU_DIRECTIVES & set(got)) == (0 if name == "lonestar6" else 1)
    assert len(MEMORY_DIRECTIVES & set(got)) <= 1
    assert not set(profile.forbid) & set(got)


@pytest.mark.parametrize("name", SITES)
def test_slurm_reads_every_directive(name: str) -> None:
    """The text begins with #!, directives are in column 0 before the first command, each as planned."""
    profile = site(name)
    hardware = SITES[name][1]
    lines = text(profile, hardware).split("\n")
    assert lines[0] == "#!/bin/bash"
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    written = [line for line in lines[:first_command] if line.startswith("#SBATCH ")]
    assert sum("#SBATCH" in line for line in lines) == len(written)
    options = dict(shlex.split(line)[1].removeprefix("--").partition("=")[::2] for line in written)
    wanted = job_script.directives(placed(profile, hardware), profile, jobs=f"{RUNS}/jobs")
    assert options == {k: "" if v is True else v for k, v in wanted.items()}


def test_a_forbidden_option_that_a_job_can_do_without_is_left_out() -> None:
    """We add open-mode and signal, not the profile."""
    profile = cluster_file.parse_file(
        '[cluster.x]\nforbid = ["open-mode", "signal", "no-requeue"]\n[cluster.x.cpu]\n', "cluster.toml"
    )["x"]
    got = job_script.directives(placed(profile, "cpu:2"), profile, jobs="/runs/jobs")
    assert not set(profile.forbid) & set(got)
    assert "output" in got


@pytest.mark.parametrize(("minutes", "lead"), [(1, 6), (10, 60), (15, 90), (600, 90)])
def test_the_time_limit_is_announced_within_the_job(minutes: int, lead: int) -> None:
    """A lead of 90 s would end a job of one minute at its start."""
    profile = cluster_file.load("sol")
    shape = placed(profile, "a100:1", "eager")
    train = Execution(time_limit_s=minutes * 60)
    short = resources.place(
        TrainConfig(model="cnn", dataset="digits", strategy="eager", hardware=Hardware("a100", 1), cpus=12),
        train,
        registry.strategies()["eager"],
        profile,
        None,
    )
    assert isinstance(short, ResourceShape) and short.gpu == shape.gpu
    assert job_script.directives(short, profile, jobs="/j")["signal"] == f"USR2@{lead}"


LAB = """
[cluster.lab]
{top}
[cluster.lab.gpu.a100]
type = "a100"
node_gpus = 4
cpus_per_gpu = 1
{gpu}
"""


def lab(top: str = "", gpu: str = "") -> ClusterProfile:
    return cluster_file.parse_file(LAB.format(top=top, gpu=gpu), "cluster.toml")["lab"]


def test_launchers_start_one_process_for_each_rank() -> None:
    """srun starts the ranks, or one launcher that does; without srun there is one process."""
    by_srun, by_torchrun = text(lab(), "a100:2"), text(lab('launcher = "torchrun"'), "a100:2")
    alone = text(lab('launcher = "none"'), "a100:1", "eager")
    assert "--ntasks=2 --ntasks-per-node=2" in by_srun and "torch.distributed.run" not in by_srun
    assert "--ntasks=1 --ntasks-per-node=1" in by_torchrun and "--nproc-per-node=2" in by_torchrun
    assert "#SBATCH --cpus-per-task=2\n" in by_torchrun and "--cpus-per-task=2 " in by_torchrun
    assert "\nsrun " not in alone and "command -v srun" not in alone
    assert "#SBATCH --signal=B:USR2@90" in alone


def test_a_whole_node_shows_only_the_devices_in_use() -> None:
    """Two of four, in the variable of the GPUs' vendor; no variable where all are used."""
    script = text(lab(gpu="ask_gpus = 4"), "a100:2")
    assert "#SBATCH --gres=gpu:a100:4" in script
    assert 'CUDA_VISIBLE_DEVICES="$(cut -d, -f1-2 <<<"${CUDA_VISIBLE_DEVICES:-0,1,2,3}")"' in script
    amd = text(lab(gpu='request = "none"\nvendor = "amd"'), "a100:2")
    assert "export ROCR_VISIBLE_DEVICES" in amd and "CUDA" not in amd and "gres" not in amd
    assert "VISIBLE_DEVICES" not in text(lab(), "a100:2")


# What the shell makes of it: scripts are run with a fake srun and a recorder in place of Python.

RECORDER = """#!{python} -I
import json, os, sys
record = {{"argv": sys.argv, "env": dict(os.environ)}}
json.dump(record, open({record!r}, "w"))
"""
FAKE_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a profile's script for one GPU in an empty environment; the record is ``record.json``."""
    tools = tmp_path / "it's; *"
    tools.mkdir()
    python = tools / "python 3"
    python.write_text(RECORDER.format(python=sys.executable, record=str(tmp_path / "record.json")))
    (tools / "srun").write_text(FAKE_SRUN)
    for tool in tools.iterdir():
        tool.chmod(0o755)

    def execute(top: str = "", *, runs: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        profile = lab(f"slurm_bin = {json.dumps(str(tools))}\n{top}" if "slurm_bin" not in top else top)
        shape = placed(profile, "a100:1", "eager")
        script = tmp_path / "script.sh"
        script.write_text(job_script.render(shape, profile, runs=runs or tmp_path / "runs", python=str(python)))
        return subprocess.run(
            ["/bin/bash", "--noprofile", "--norc", str(script)],
            env={"SLURM_JOB_ID": "7", "HOSTNAME": "n1", **env},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    return execute


@pytest.fixture
def record(tmp_path: Path) -> Callable[[], dict[str, object]]:
    def read() -> dict[str, object]:
        got: dict[str, object] = json.loads((tmp_path / "record.json").read_text())
        return got

    return read


@pytest.mark.parametrize("name", ["a b", "it's", "$HOME", "*", ";touch pwn", "`id`", "a=b,c", "#x", "é实验", 'say "x"'])
def test_a_folder_with_shell_characters_is_passed_unchanged(
    name: str,
    tmp_path: Path,
    run: Callable[..., subprocess.CompletedProcess[str]],
    record: Callable[[], dict[str, object]],
) -> None:
    """The shell interprets no character on the way to the interpreter's arguments, also with LC_ALL=C."""
    done = run(runs=tmp_path / name, LC_ALL="C")
    assert done.returncode == 0, done.stderr
    argv = record()["argv"]
    assert isinstance(argv, list)
    assert argv[1:] == ["-u", "-m", "submitit.core._submit", f"{tmp_path}/{name}/jobs/7"]
    assert (tmp_path / name / "jobs" / "7").is_dir()
    assert not (tmp_path / "pwn").exists()


def test_the_environment_of_a_rank(
    run: Callable[..., subprocess.CompletedProcess[str]], record: Callable[[], dict[str, object]]
) -> None:
    """The variables that ranks need, and those of the site with any characters."""
    assert run("env = { A = \"it's; `id` *\", B = '', OMP_NUM_THREADS = '3' }").returncode == 0
    env = record()["env"]
    assert isinstance(env, dict)
    expected = {
        "A": "it's; `id` *",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "3",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "SLURM_EXPORT_ENV": "ALL",
        "SRUN_CPUS_PER_TASK": "1",
        "SUBMITIT_EXECUTOR": "slurm",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert "B" not in env
    assert "/usr/bin" in env["PATH"].split(":")


def test_a_task_of_an_array_has_the_folder_of_the_array(
    tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]], record: Callable[[], dict[str, object]]
) -> None:
    """submitit looks for the pickles of all tasks below the array's own id."""
    assert run(SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="1").returncode == 0
    argv = record()["argv"]
    assert isinstance(argv, list) and argv[-1] == f"{tmp_path}/runs/jobs/6"


def test_the_prologue_runs_first_and_may_use_unset_variables(
    run: Callable[..., subprocess.CompletedProcess[str]], record: Callable[[], dict[str, object]]
) -> None:
    """Activate scripts read unset variables; ranks get the variables that they export."""
    done = run('prologue = [": $NO_SUCH_VARIABLE # why", "export FROM_PROLOGUE=yes; true"]')
    assert done.returncode == 0, done.stderr
    env = record()["env"]
    assert isinstance(env, dict) and env["FROM_PROLOGUE"] == "yes"


@pytest.mark.parametrize("line", ["no-such-command it's", "false # comment", "true && false"])
def test_a_prologue_that_fails_ends_the_job(
    line: str, tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """With its own exit code and the line, before any rank starts."""
    line = line.replace("it's", "it\\\\'s")
    done = run(f'prologue = ["true", "{line}", "export LATER=1"]')
    assert done.returncode == job_script.ScriptExit.PROLOGUE
    assert f"orchestrate: prologue failed: {line.replace(chr(92) * 2, chr(92))} (on n1)" in done.stderr
    assert not (tmp_path / "record.json").exists()


def test_a_missing_interpreter(tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The node names the file."""
    (tmp_path / "it's; *" / "python 3").unlink()
    done = run()
    assert done.returncode == job_script.ScriptExit.INTERPRETER
    assert f"no interpreter {tmp_path}/it's; */python 3 here" in done.stderr


def test_a_missing_srun(monkeypatch: pytest.MonkeyPatch, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The message names the key of the cluster file that sets its folder."""
    monkeypatch.setattr(job_script, "DEFAULT_PATH", "/nowhere")
    done = run('slurm_bin = "/nowhere"', PATH="/nowhere")
    assert done.returncode == job_script.ScriptExit.LAUNCHER
    assert "no srun on PATH: set slurm_bin in the cluster file" in done.stderr


def test_a_runs_folder_that_the_node_cannot_write(
    tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A file is in place of the folder."""
    (tmp_path / "runs").write_text("")
    done = run()
    assert done.returncode == job_script.ScriptExit.FOLDER
    assert f"cannot make {tmp_path}/runs/jobs/7" in done.stderr


def test_the_exit_code_of_the_ranks_is_the_jobs(
    tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """No command after srun replaces it."""
    (tmp_path / "it's; *" / "python 3").write_text("#!/bin/bash\nexit 71\n")
    assert run().returncode == 71


@pytest.mark.parametrize(
    ("launch", "code"),
    [('"${rank[@]}" || (exit 7)', 0), (': "${rank[@]}"; (exit 7)', 7), (': "${rank[@]}"\nstatus=3', 3)],
)
def test_the_exit_code_of_a_users_launch_block_is_the_jobs(
    tmp_path: Path, launch: str, code: int, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """That of its last command unless it sets status; the teardown does not change it."""
    template = tmp_path / "mine.sh.j2"
    lines = ['{% extends "slurm.sh.j2" %}', "{% block launch %}", launch, "{% endblock %}"]
    lines += ["{% block teardown %}", "echo ended $status", "false", "{% endblock %}", ""]
    template.write_text("\n".join(lines))
    done = run(f'template = "{template}"')
    assert done.returncode == code, done.stderr
    assert done.stdout == f"ended {code}\n"


@pytest.mark.parametrize("name", ["new\nline", "100%", "back\\slash", "tab\t"])
def test_a_runs_folder_that_slurm_cannot_take(name: str) -> None:
    """An error that names the character, before anything is written."""
    with pytest.raises(InputError) as caught:
        text(cluster_file.load("sol"), "a100:1", "eager", runs=Path("/x") / name)
    assert "the path of the runs folder contains" in str(caught.value)
    with pytest.raises(InputError, match="not absolute"):
        text(cluster_file.load("sol"), "a100:1", "eager", runs=Path("runs"))


def with_template(folder: Path, content: str, newline: str = "\n") -> str:
    template = folder / "mine.sh.j2"
    template.write_bytes(content.replace("\n", newline).encode())
    return text(lab(f'template = "{template}"'), "a100:1", "eager")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_user_replaces_blocks(tmp_path: Path, newline: str) -> None:
    """With the original block available, and no carriage return in the script."""
    script = with_template(
        tmp_path,
        '{% extends "slurm.sh.j2" %}\n{% block setup %}\n{{ super() }}\nulimit -n 4096\n{% endblock %}\n'
        "{% block teardown %}\nrm -rf /tmp/mine\n{% endblock %}\n",
        newline,
    )
    assert "\r" not in script
    setup, launch, teardown = (script.index(s) for s in ("ulimit -n 4096\n", "\nsrun ", "rm -rf /tmp/mine\n"))
    assert script.index("export SLURM_EXPORT_ENV=ALL") < setup < launch < teardown


NO_RANK = "the script starts no rank: nothing runs the command in the array rank"


@pytest.mark.parametrize(
    ("block", "code", "fault"),
    [
        ("launch", "", NO_RANK),
        ("launch", '# srun "${rank[@]}"', NO_RANK),
        ("launch", 'rank=(nice "${rank[@]}")\necho done', NO_RANK),
        ("launch", 'srun \\\n  "${rank[@]}"', ""),
        ("launch", '"$python" -u -m submitit.core._submit "$folder"', ""),
        ("setup", "exit 0", "line {} of the script ends it before any rank is started: exit 0"),
        ("setup", "true; exit", "line {} of the script ends it before any rank is started: true; exit"),
        ("setup", "{ date; exit 0; }", "line {} of the script ends it before any rank is started: { date; exit 0; }"),
        ("setup", "[ -d /x ] || exit 0", ""),
        ("setup", "[ -d /x ] || {\n echo no\n exit 0\n}", ""),
        ("setup", "if [ ! -d /x ]; then\n exit 0\nfi", ""),
        ("setup", "leave() {\n exit 0\n}\nfunction go {\n exit\n}", ""),
        ("setup", "(cd /x; exit 0)\ncase $x in\n a) exit;;\nesac", ""),
        ("setup", "python3 -c '\nimport os\nexit (0)\n'\necho it\\'s  # it's\necho $((1<<2)) $#", ""),
        ("setup", "cat >/tmp/x <<-'END'\n\texit 0\n\tEND\ngrep -q x <<<y", ""),
    ],
)
def test_scripts_that_start_no_rank_are_errors(tmp_path: Path, block: str, code: str, fault: str) -> None:
    """Slurm would report success for a script that ends before its ranks start, or starts none."""
    content = '{%% extends "slurm.sh.j2" %%}\n{%% block %s %%}\n%s\n{%% endblock %%}\n' % (block, code)  # noqa: UP031
    if not fault:
        assert code in with_template(tmp_path, content)
        return
    with pytest.raises(InputError) as caught:
        with_template(tmp_path, content)
    assert re.sub(r"line \d+", "line {}", caught.value.what) == fault
    assert caught.value.where == str(tmp_path / "mine.sh.j2") and caught.value.hint


def test_a_prologue_that_ends_the_script_is_an_error() -> None:
    with pytest.raises(InputError, match="ends it before any rank is started: exit 0"):
        text(lab('prologue = ["exit 0"]'), "a100:1", "eager")
    assert "\nmodule load x || exit 3\n" in text(lab('prologue = ["module load x || exit 3"]'), "a100:1", "eager")


OWN_DIRECTIVES = '{% extends "slurm.sh.j2" %}\n{% block directives %}\n{{ super() }}\n'


def test_a_template_may_add_other_directives(tmp_path: Path) -> None:
    """Options that are not set for each run, in any of Slurm's forms."""
    script = with_template(
        tmp_path,
        OWN_DIRECTIVES + '#SBATCH --mail-type=END --comment "a b"  # mine\n#SBATCH -w lab[1-2]\n{% endblock %}\n',
    )
    assert '\n#SBATCH --mail-type=END --comment "a b"  # mine\n#SBATCH -w lab[1-2]\n' in script


def test_the_prologue_of_nodes_runs_before_that_of_the_cluster(tmp_path: Path) -> None:
    """At some sites, some nodes need one module before the others."""
    profile = lab('prologue = ["module load python"]', 'prologue = ["module load arch/a100"]')
    script = text(profile, "a100:1", "eager")
    assert script.index("\nmodule load arch/a100\n") < script.index("\nmodule load python\n")


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        (
            '{% extends "slurm.sh.j2" %}\n{% block setup %}\n\n{{ acount }}{% endblock %}',
            "line 4",
            "'acount' is undefined",
        ),
        (
            '{% extends "slurm.sh.j2" %}\n{% block setup %}{{ shape.gpuz }}{% endblock %}',
            "line 2",
            "cannot render the template: shape has no 'gpuz'",
        ),
        ("#!/bin/bash\n{% if %}\n", "line 2", "Expected an expression"),
        ("#!/bin/bash\n{{ 1/0 }}\n", "line 2", "cannot render the template: ZeroDivisionError: division by zero"),
        ("#!/bin/bash\n{{ shape.nodes + 'a' }}\n", "line 2", "cannot render the template: TypeError: "),
        ('{% extends "mine.sh.j2" %}\n', "", "it extends or includes itself, or is nested too deeply"),
        ('#!/bin/bash\n{% include "latin.j2" %}\n', "line 2", "a file that it extends or includes is not UTF-8"),
        ('{% extends "other.j2" %}\n', "line 1", "other.j2"),
        ("\n#!/bin/bash\n", "", "does not start with #!"),
        ("#!/bin/bash\n  #SBATCH --mem=1G\n", "", "Slurm would ignore line 2 of the script"),
        ("#!/bin/bash\ncd /\n#SBATCH --mem=1G\n", "", "Slurm would ignore line 3 of the script"),
        (OWN_DIRECTIVES + "#SBATCH -G 4\n{% endblock %}", "", "GPUs are requested in 2 ways: --gpus and --gres"),
        (OWN_DIRECTIVES + "#SBATCH --time=2-0\n{% endblock %}", "", "--time is given 2 times, and Slurm uses the last"),
        (OWN_DIRECTIVES + "#SBATCH -p gpu\n{% endblock %}", "", "--partition=gpu differs from the plan"),
        (OWN_DIRECTIVES + "#SBATCH --comment=it's\n{% endblock %}", "", "cannot be read (No closing quotation)"),
        (OWN_DIRECTIVES + "#SBATCH -Z\n{% endblock %}", "", "-Z is not an option of sbatch"),
        ('{% extends "slurm.sh.j2" %}\n{% block directives %}{% endblock %}', "", "--nodes is missing"),
    ],
)
def test_a_template_with_a_mistake(tmp_path: Path, content: str, where: str, what: str) -> None:
    """An error with file and line; no undefined name becomes empty text, no directive is lost."""
    (tmp_path / "latin.j2").write_bytes(b"# \xe9\n")
    with pytest.raises(InputError) as caught:
        with_template(tmp_path, content)
    assert str(tmp_path / "mine.sh.j2") in caught.value.where
    assert where in caught.value.where
    assert what in str(caught.value)


def test_a_template_that_is_not_utf8_is_a_mistake_of_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "mine.sh.j2").write_bytes(b"#!/bin/bash\n# \xe9\n")
    with pytest.raises(ClusterError, match=r"template: \S+mine\.sh\.j2: line 2: byte 0xe9 is not UTF-8"):
        lab(f'template = "{tmp_path / "mine.sh.j2"}"')


@pytest.mark.parametrize(
    ("written", "what", "hint"),
    [
        ("shape.nodess", "shape has no 'nodess'", 'did you mean "nodes"?'),
        ("profile.acount", "profile has no 'acount'", 'did you mean "account"?'),
        ("shpe.nodes", "'shpe' is undefined", 'did you mean "shape"?'),
        ("shape.zzz", "shape has no 'zzz'", ""),
    ],
)
def test_a_misspelt_name_in_a_template(tmp_path: Path, written: str, what: str, hint: str) -> None:
    """The message uses the names of the template, not those of our classes."""
    with pytest.raises(InputError) as caught:
        with_template(
            tmp_path, f'{{% extends "slurm.sh.j2" %}}\n{{% block setup %}}{{{{ {written} }}}}{{% endblock %}}'
        )
    assert (caught.value.what, caught.value.hint) == (f"cannot render the template: {what}", hint)


def test_rendering_needs_no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without srun is the same as on the login node."""
    with_slurm = text(cluster_file.load("sol"), "a30:2")
    monkeypatch.setenv("PATH", "/nowhere")
    assert os.environ["PATH"] == "/nowhere"
    assert text(cluster_file.load("sol"), "a30:2") == with_slurm
