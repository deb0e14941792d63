"""Rendered scripts on a real Slurm, submitted with plain ``sbatch``: what every rank gets, and how jobs end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cluster import cluster_file, job_script, resources
from orchestrator.cluster.profile import ClusterProfile
from tests.slurm.lab import NODES, Lab, processors
from tests.slurm.releases import both
from workloads import registry
from workloads.contract import Execution, Hardware, ResourceShape, TrainConfig

pytestmark = pytest.mark.slurm

PROFILE = """
[cluster.lab]
{top}
[cluster.lab.gpu.a100]
type = "a100"
node_gpus = 2
cpus_per_gpu = 1
mem_per_gpu = "1500M"
queue = [{{ partition = "htc", max_time = "4h" }}]
{gpu}
[cluster.lab.gpu.a30]
type = "a30"
node_gpus = 2
cpus_per_gpu = 1
mem_per_gpu = "1500M"
"""

RECORDER = """#!{python} -I
import json, os, sys, time
if "torch.distributed.run" in sys.argv:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
record = {{
    "interpreter": sys.argv[0],
    "arguments": sys.argv[1:],
    "cores": sorted(os.sched_getaffinity(0)),
    "env": dict(os.environ),
}}
name = "-".join(os.environ.get("SLURM_" + k, "none") for k in ("ARRAY_TASK_ID", "PROCID"))
with open({folder!r} + "/" + name + ".json", "w") as file:
    json.dump(record, file)
{then}
"""


class Site:
    """A profile whose interpreter records its arguments and environment, and the folder of a study."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        # Quotes and spaces in every path: the script must not depend on luck.
        self.folder = folder / "it's a study"
        self.records = folder / "records"
        self.runs = self.folder / "runs"
        # The name itself has no space: Slurm's proctrack/linuxproc cannot signal a process whose name has one.
        self.python = self.folder / "python3"
        self.records.mkdir()
        (self.runs / "jobs").mkdir(parents=True)

    def script(
        self, hardware: str, strategy: str = "ddp", *, top: str = "", gpu: str = "", then: str = "", seconds: int = 600
    ) -> Path:
        """Write the script of a run whose ranks record their environment and then run ``then``."""
        self.python.write_text(RECORDER.format(python=sys.executable, folder=str(self.records), then=then))
        self.python.chmod(0o755)
        if "python =" not in top:
            top = f"python = {json.dumps(str(self.python))}\n{top}"
        top = self.lab.slurm_bin + top
        profile = cluster_file.parse_file(PROFILE.format(top=top, gpu=gpu), "cluster.toml")["lab"]
        script = self.folder / "job.sh"
        shape = _shape(profile, hardware, strategy, seconds)
        script.write_text(job_script.render(shape, profile, runs=self.runs, python=profile.python))
        return script

    def recorded(self) -> dict[str, Any]:
        """Return array index and rank -> what that rank recorded."""
        return {file.stem: json.loads(file.read_text()) for file in sorted(self.records.iterdir())}

    def log(self, job: dict[str, str]) -> str:
        """Return the log of the script itself."""
        return "".join(p.read_text() for p in (self.runs / "jobs").glob(f"slurm-{job['JobId']}_*.out"))


def _shape(profile: ClusterProfile, hardware: str, strategy: str, seconds: int) -> ResourceShape:
    asked = Hardware.parse(hardware)
    train = TrainConfig(
        model="cnn",
        dataset="digits",
        strategy=strategy,
        hardware=asked,
        cpus=resources.default_cpus(profile)(asked, 1),
    )
    execution = Execution(time_limit_s=seconds)
    shape = resources.place(train, execution, registry.strategies()[strategy], profile, None)
    assert isinstance(shape, ResourceShape), shape
    return shape


@pytest.fixture
def site(any_lab: Lab, tmp_path: Path) -> Site:
    return Site(any_lab, tmp_path)


@both
def test_every_rank_of_a_pair_starts_as_planned(site: Site) -> None:
    """Plain sbatch under --export=NONE: interpreter, arguments, cores, devices and variables of both ranks."""
    script = site.script("a100:2")
    assert "#SBATCH --export=NONE" in script.read_text()
    site.lab.environment["LEAKED"] = "from the submitting shell"
    job_id = site.lab.submit(script)
    job = site.lab.wait(job_id)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), site.log(job)
    assert NODES[job["NodeList"]] == "a100"

    ranks = site.recorded()
    assert sorted(ranks) == ["none-0", "none-1"]
    folder = f"{site.runs}/jobs/{job_id}"
    for rank, record in enumerate(ranks.values()):
        assert record["interpreter"] == str(site.python)
        assert record["arguments"] == ["-u", "-m", "submitit.core._submit", folder]
        expected = {
            "CUDA_VISIBLE_DEVICES": "0,1",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_CPUS_ON_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
            "SUBMITIT_EXECUTOR": "slurm",
        }
        assert {name: record["env"].get(name) for name in expected} == expected
        assert "LEAKED" not in record["env"]
        assert "/usr/bin" in record["env"]["PATH"].split(":")
        assert (Path(folder) / f"{job_id}_{rank}_log.out").is_file()
    if "ThreadsPerCore=1" in processors():
        assert [len(record["cores"]) for record in ranks.values()] == [1, 1]
        assert ranks["none-0"]["cores"] != ranks["none-1"]["cores"]


def test_a_plain_srun_finds_nothing_under_export_none(site: Site) -> None:
    """Why the script sets PATH and exports it: without that, srun's tasks have no PATH."""
    script = site.folder / "plain.sh"
    output = site.folder / "plain.out"
    script.write_text("#!/bin/bash\n#SBATCH --export=NONE\nsrun python3 -c 'print(1)'\n")
    job = site.lab.wait(site.lab.submit(script, f"--output={output}"))
    assert job["JobState"] == "FAILED"
    assert "execve(): python3: No such file or directory" in output.read_text()


@both
def test_tasks_of_an_array_share_a_folder(site: Site) -> None:
    """The same script serves an array: one folder by the array's id, logs and records by task."""
    script = site.script("a30:1", "eager")
    job_id = site.lab.submit(script, "--array=0-1", "--job-name=orc-token")
    for task in (0, 1):
        assert site.lab.wait(f"{job_id}_{task}")["JobState"] == "COMPLETED"
    assert {r["arguments"][-1] for r in site.recorded().values()} == {f"{site.runs}/jobs/{job_id}"}
    assert sorted(site.recorded()) == ["0-0", "1-0"]
    for task in (0, 1):
        assert (site.runs / "jobs" / job_id / f"{job_id}_{task}_0_log.err").is_file()
        assert (site.runs / "jobs" / f"slurm-{job_id}_{task}.out").is_file()


@pytest.mark.parametrize("array", [True, False])
def test_submitit_finds_its_pickles(site: Site, array: bool) -> None:
    """The real interpreter and submitit: each task loads its pickled call and writes the result."""
    from cloudpickle import load
    from submitit.core.utils import DelayedSubmission, JobPaths

    script = site.script("a30:2", top=f"python = {json.dumps(sys.executable)}")
    job_id = site.lab.submit(script, *(["--array=0-1"] if array else []))
    tasks = [f"{job_id}_0", f"{job_id}_1"] if array else [job_id]
    paths = [JobPaths(site.runs / "jobs" / "%A", job_id=task) for task in tasks]
    for path, task in zip(paths, tasks, strict=True):
        path.folder.mkdir(parents=True, exist_ok=True)
        DelayedSubmission(len, task).dump(path.folder / "new.pkl")
        path.move_temporary_file(path.folder / "new.pkl", "submitted_pickle")
    for path, task in zip(paths, tasks, strict=True):
        job = site.lab.wait(task)
        assert job["JobState"] == "COMPLETED", path.stderr.read_text()
        with path.result_pickle.open("rb") as file:
            assert load(file) == ("success", len(task))
        assert "Job completed successfully" in path.stdout.read_text() + path.stderr.read_text()


@both
def test_two_nodes(site: Site) -> None:
    """One rank and one device on each of two nodes."""
    job = site.lab.wait(site.lab.submit(site.script("a100:1x2")))
    assert job["JobState"] == "COMPLETED", site.log(job)
    env = [r["env"] for r in site.recorded().values()]
    assert [e["SLURMD_NODENAME"] for e in env] == ["lab001", "lab002"]
    assert [e["SLURM_LOCALID"] for e in env] == ["0", "0"]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in env] == ["0", "0"]


@both
@pytest.mark.parametrize("gpu", ["ask_gpus = 2", 'request = "none"'])
def test_a_run_uses_its_own_part_of_a_whole_node(site: Site, gpu: str) -> None:
    """The job has two GPUs (or names none), the run uses one: the rank sees one."""
    job = site.lab.wait(site.lab.submit(site.script("a100:1", "eager", gpu=gpu)))
    assert job["JobState"] == "COMPLETED", site.log(job)
    (record,) = site.recorded().values()
    assert record["env"]["CUDA_VISIBLE_DEVICES"] == "0"


@both
@pytest.mark.parametrize("request_", ["gres", "gpus", "gpus_per_node", "gpus_per_task"])
@pytest.mark.parametrize("mem_style", ["node", "per_gpu", "per_cpu"])
@pytest.mark.parametrize("cpus_by", ["task", "gpu"])
def test_slurm_takes_every_form_of_request(site: Site, request_: str, mem_style: str, cpus_by: str) -> None:
    """No directives exclude each other, whichever form of request a site requires."""
    gpu = f'request = "{request_}"\nmem_style = "{mem_style}"\ncpus_by = "{cpus_by}"\nconstraint = "a100&lab"'
    site.lab.command("sbatch", "--test-only", site.script("a100:2", gpu=gpu))


@both
def test_a_prologue_that_fails_is_told_from_a_run_that_fails(site: Site) -> None:
    """Its exit code is the job's, its line is in the log, and no rank starts."""
    job = site.lab.wait(site.lab.submit(site.script("a100:1", "eager", top='prologue = ["module load nothing"]')))
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", f"{job_script.ScriptExit.PROLOGUE}:0")
    assert "orchestrate: prologue failed: module load nothing (on lab00" in site.log(job)
    assert not site.recorded()


@both
def test_a_dead_rank_ends_the_job(site: Site) -> None:
    """Rank 1 exits with 71 while rank 0 would wait for minutes: the job fails within seconds and names the rank."""
    then = 'time.sleep(0 if os.environ["SLURM_PROCID"] == "1" else 300); sys.exit(71)'
    job = site.lab.wait(site.lab.submit(site.script("a100:2", then=then)), timeout_s=30)
    assert job["JobState"] == "FAILED"
    assert "task 1: Exited with exit code 71" in site.log(job)


SIGNALLED = """
import signal
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(300)
"""


@both
@pytest.mark.parametrize("launcher", ["srun", "none"])
def test_the_announcement_of_the_limit_reaches_the_rank(site: Site, launcher: str) -> None:
    """The signal of --signal reaches Python, with a job step and without one."""
    script = site.script("a100:1", "eager", top=f'launcher = "{launcher}"', then=SIGNALLED)
    job_id = site.lab.submit(script)
    site.lab.until_text(site.runs / "jobs" / job_id / f"{job_id}_0_log.out", "ready")
    # As slurmctld does it: to the steps, or with B: to the batch shell.
    to_batch = ["--batch"] if "--signal=B:USR2" in script.read_text() else []
    site.lab.command("scancel", "--signal=USR2", *to_batch, job_id)
    job = site.lab.wait(job_id, timeout_s=30)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "75:0")


@pytest.mark.torch
def test_one_torchrun_starts_both_ranks(site: Site) -> None:
    """One launcher on the node; torchrun's and Slurm's variables both number its two workers."""
    job = site.lab.wait(site.lab.submit(site.script("a100:2", top='launcher = "torchrun"')), timeout_s=120)
    assert job["JobState"] == "COMPLETED", site.log(job)
    ranks = site.recorded()
    assert sorted(ranks) == ["none-0", "none-1"]
    for rank, record in enumerate(ranks.values()):
        env = record["env"]
        assert (env["RANK"], env["SLURM_PROCID"], env["SLURM_LOCALID"]) == (str(rank),) * 3
        assert (env["WORLD_SIZE"], env["SLURM_NTASKS"]) == ("2", "2")
        assert record["interpreter"] == str(site.python)
