"""Resource shapes: the arithmetic of nodes, ranks, GPUs, cores, memory and queues, and why runs cannot run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from orchestrator.cluster import cluster_file, resources
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.cluster.value_types import WHOLE_NODE
from workloads import registry
from workloads.contract import Execution, Expectation, Hardware, ResourceShape, TrainConfig

GIB = 1024**3
SITE = """
[cluster.lab]
{top}
[cluster.lab.cpu]
cpus_per_rank = 2
mem_per_rank = "4G"
[cluster.lab.gpu.a30]
node_gpus = 3
node_cores = 48
node_mem = "512G"
cpus_per_gpu = 16
mem_per_gpu = "{mem}"
expect_name = "A30"
expect_mem_gb = 24
{gpu}
"""


def site(top: str = "", gpu: str = "", *, mem: str = "48G") -> ClusterProfile:
    return cluster_file.parse_file(SITE.format(top=top, gpu=gpu, mem=mem), "cluster.toml")["lab"]


@dataclass(frozen=True)
class Gpu:
    name: str


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...] = ()
    cores: tuple[int, ...] = (0, 1)


def shape(
    hardware: str,
    strategy: str = "ddp",
    *,
    on: ClusterProfile | Machine,
    cpus: int | None = None,
    execution: Execution | None = None,
) -> ResourceShape | str:
    profile = on if isinstance(on, ClusterProfile) else None
    machine = on if isinstance(on, Machine) else None
    asked = Hardware.parse(hardware)
    if cpus is None:
        cpus = resources.default_cpus(profile)(asked, asked.devices if strategy == "ddp" else 1)
    train = TrainConfig(model="cnn", dataset="digits", strategy=strategy, hardware=asked, cpus=cpus)
    return resources.place(train, execution or Execution(), registry.strategies()[strategy], profile, machine)


def placed(hardware: str, strategy: str = "ddp", **how: object) -> ResourceShape:
    got = shape(hardware, strategy, **how)  # type: ignore[arg-type]
    assert isinstance(got, ResourceShape), got
    return got


def test_two_devices_with_a_rank_each() -> None:
    """Every number of the shape follows from hardware, topology and profile."""
    got = placed("a30:2", on=site())
    assert got == ResourceShape(
        target="lab",
        gpu="a30",
        nodes=1,
        ranks_per_node=2,
        gpus_per_node=2,
        ask_gpus_per_node=2,
        cpus_per_rank=16,
        mem_bytes=96 * GIB,
        time_limit_s=3600,
        gpu_name="A30",
        gpu_memory_gb=24.0,
    )
    assert (got.ranks, got.gpus, got.cpus_per_node, got.name, got.gpu_hours_limit) == (2, 2, 32, "2xa30-2ranks", 2.0)
    assert got.expectation() == Expectation(
        ranks=2, nodes=1, gpus_per_node=2, cpus_per_rank=16, gpu_name="A30", gpu_memory_gb=24.0
    )


def test_one_process_has_the_cores_of_all_its_devices() -> None:
    """eager: one rank."""
    got = placed("a30:1", "eager", on=site())
    assert (got.ranks, got.cpus_per_rank, got.mem_bytes, got.name) == (1, 16, 48 * GIB, "1xa30-1rank")


def test_several_nodes() -> None:
    """Four ranks on two nodes: GPUs, cores and memory are per node, hours over all."""
    got = placed("a30:2x2", on=site())
    assert (got.nodes, got.ranks_per_node, got.ranks, got.cpus_per_rank) == (2, 2, 4, 16)
    assert (got.mem_bytes, got.gpu_hours_limit, got.name) == (96 * GIB, 4.0, "2nodes-2xa30-4ranks")


def test_cpu_ranks() -> None:
    """cpu:N is N ranks with the profile's cores and memory each, and no GPU hours."""
    got = placed("cpu:3", on=site())
    assert (got.gpu, got.ranks, got.cpus_per_rank, got.mem_bytes, got.gpu_hours_limit) == ("", 3, 2, 12 * GIB, 0.0)
    assert got.expectation().gpus_per_node == 0


def test_any_gpu_is_the_default_one() -> None:
    """gpu:1 takes the site's default type, and its expectation."""
    assert placed("gpu:1", "eager", on=site()).gpu == "a30"
    assert placed("gpu:1", "eager", on=site()).gpu_name == "A30"


@pytest.mark.parametrize(
    ("hardware", "strategy", "cpus", "execution", "why"),
    [
        ("a30:4", "ddp", None, {}, "it needs 4 GPUs per node, and a30 nodes of lab have 3 GPUs"),
        ("a100:2", "ddp", None, {}, "cluster lab has no a100; it has: a30, cpu"),
        ("a30:1x2", "eager", None, {}, "eager is one process, which cannot use the devices of 2 nodes"),
        ("a30:2", "ddp", 25, {}, "25 cores cannot be shared evenly by 2 ranks; set cpus to a multiple of 2"),
        ("a30:2", "ddp", 1, {}, "1 cores cannot be shared evenly by 2 ranks; set cpus to a multiple of 2"),
        ("a30:2", "ddp", 50, {}, "it needs 50 cores per node, and a30 nodes have 48"),
        ("a30:2", "ddp", None, {"mem_bytes": 600 * GIB}, "it needs 600G of memory per node, and nodes have 512G"),
    ],
)
def test_runs_that_fit_no_node(
    hardware: str, strategy: str, cpus: int | None, execution: dict[str, int], why: str
) -> None:
    """Each reason names what the run needs and what there is."""
    assert shape(hardware, strategy, on=site(), cpus=cpus, execution=Execution(**execution)) == why


QUEUES = """
[[cluster.lab.gpu.a30.queue]]
partition = "owners"
preemptable = true
[[cluster.lab.gpu.a30.queue]]
partition = "htc"
qos = "public"
max_time = "0-04:00:00"
[[cluster.lab.gpu.a30.queue]]
partition = "public"
max_time = "7-00:00:00"
max_nodes = 2
max_gpus = 3
max_cpus = 60
"""


@pytest.mark.parametrize(
    ("hours", "hardware", "partition"),
    [(4, "a30:2", "htc"), (5, "a30:2", "public"), (5, "a30:1x2", "public"), (4, "a30:2x3", "htc")],
)
def test_the_first_queue_that_fits(hours: int, hardware: str, partition: str) -> None:
    """In the order of the file, by every cap."""
    got = placed(hardware, on=site(gpu=QUEUES), execution=Execution(time_limit_s=hours * 3600))
    assert got.partition == partition


def test_a_preemptable_queue_needs_permission() -> None:
    """Jobs that Slurm may preempt are opt-in."""
    assert placed("a30:1", on=site(gpu=QUEUES)).partition == "htc"
    assert placed("a30:1", on=site("allow_preemptable = true", QUEUES)).partition == "owners"


@pytest.mark.parametrize(
    ("hardware", "days", "caps"),
    [
        ("a30:1", 8, "public ends jobs after 7-00:00:00"),
        ("a30:1x3", 1, "public allows at most 2 nodes"),
        ("a30:2x2", 1, "public allows at most 3 GPUs"),
        ("a30:2x2", 8, "public ends jobs after 7-00:00:00"),
    ],
)
def test_no_queue_fits(hardware: str, days: int, caps: str) -> None:
    """The caps of every queue are in the message."""
    why = shape(hardware, on=site(gpu=QUEUES), execution=Execution(time_limit_s=days * 86400))
    assert why == (
        f"no a30 queue accepts a job of {days}-00:00:00: owners is preemptable (allow_preemptable = false); "
        f"htc/public ends jobs after 0-04:00:00; {caps}"
    )


def test_a_cap_on_cores() -> None:
    """Cores over all nodes count."""
    limits = Execution(time_limit_s=5 * 3600)
    assert placed("a30:1x2", on=site(gpu=QUEUES), cpus=60, execution=limits).partition == "public"
    why = shape("a30:1x2", on=site(gpu=QUEUES), cpus=62, execution=limits)
    assert isinstance(why, str) and why.endswith("public allows at most 60 cores")


def test_whole_nodes_are_held_and_part_of_them_used() -> None:
    """Where the partition is the request, the run uses two of three GPUs and is charged for three."""
    got = placed("a30:2", on=site(gpu='request = "none"'))
    assert (got.gpus_per_node, got.ask_gpus_per_node, got.gpu_hours_limit) == (2, 3, 3.0)
    assert placed("a30:2", on=site(gpu="ask_gpus = 3")).ask_gpus_per_node == 3
    assert placed("a30:2", on=site(gpu="exclusive = true")).ask_gpus_per_node == 3
    assert got.expectation().gpus_per_node == 2


def test_memory_follows_the_gpus_that_are_held() -> None:
    """The share of all held GPUs, the whole node, what the run sets, or the site's default."""
    gib = Execution(mem_bytes=10 * GIB)
    assert placed("a30:1", on=site(gpu="ask_gpus = 3")).mem_bytes == 144 * GIB
    assert placed("a30:1", on=site(), execution=gib).mem_bytes == 10 * GIB
    assert placed("a30:1", on=site(mem="all")).mem_bytes == WHOLE_NODE
    without = site(gpu='mem_style = "none"')
    assert placed("a30:1", on=without).mem_bytes is None
    assert shape("a30:1", on=without, execution=gib) == "cluster lab does not allow memory requests; remove mem"


def test_cores_per_gpu() -> None:
    """They must divide evenly among the held GPUs."""
    by_gpu = site(gpu='cpus_by = "gpu"')
    assert placed("a30:2", on=by_gpu, cpus=8).cpus_per_rank == 4
    assert shape("a30:2", "eager", on=by_gpu, cpus=9) == (
        "9 cores cannot be shared evenly by 2 GPUs; set cpus to a multiple of 2"
    )


def test_slices_and_other_processors() -> None:
    """MIG slices cannot pair; nodes of another architecture need their own interpreter."""
    sliced = site(gpu="mig = true")
    assert placed("a30:1", on=sliced).allow_mig
    assert shape("a30:2", on=sliced) == (
        "a30 is a MIG slice: a process sees one slice, so slices cannot train together"
    )
    arm = '[cluster.lab.gpu.gh200]\nnode_gpus = 1\ncpus_per_gpu = 72\narch = "aarch64"\n'
    assert shape("gh200:1", on=site(gpu=arm)) == (
        "gh200 nodes are aarch64: they need an interpreter of their own (python in [cluster.lab.gpu.gh200])"
    )
    assert placed("gh200:1", on=site(gpu=arm + 'python = "/arm/bin/python"')).gpu == "gh200"
    assert shape("gh200:2", on=site(gpu=arm)) == ("it needs 2 GPUs per node, and gh200 nodes of lab have 1 GPU")


def test_launchers_that_cannot_start_the_ranks() -> None:
    """torchrun starts one node's ranks, none a single process."""
    assert shape("a30:2x2", on=site('launcher = "torchrun"')) == (
        "launcher torchrun starts the ranks of one node; several nodes need launcher srun"
    )
    assert placed("a30:2", on=site('launcher = "torchrun"')).ranks == 2
    assert shape("a30:2", on=site('launcher = "none"')) == (
        "launcher none starts one process; several ranks need launcher srun or torchrun"
    )


A_PAIR = Machine(gpus=(Gpu("NVIDIA H100 80GB HBM3"), Gpu("NVIDIA H100 80GB HBM3")), cores=tuple(range(16)))


@pytest.mark.parametrize("hardware", ["gpu:2", "h100:2", "H100:2"])
def test_gpus_of_this_machine(hardware: str) -> None:
    """Any GPU, or a type that the GPU's name holds in any case."""
    got = placed(hardware, on=A_PAIR)
    assert (got.target, got.ranks, got.gpus_per_node, got.cpus_per_rank) == ("local", 2, 2, 1)
    assert got.expectation().gpu_name == ""


@pytest.mark.parametrize(
    ("hardware", "machine", "why"),
    [
        ("gpu:3", A_PAIR, "gpu:3 needs 3 such GPUs, and this machine has 2 (NVIDIA H100 80GB HBM3)"),
        ("a100:1", A_PAIR, "a100:1 needs 1 such GPUs, and this machine has 2 (NVIDIA H100 80GB HBM3)"),
        ("gpu:1", Machine(), "gpu:1 needs 1 such GPUs, and this machine has none"),
        ("cpu:4", Machine(), "it needs 4 cores, and this machine has 2"),
        ("cpu:1x2", Machine(), "cpu:1x2 needs 2 nodes, and this is one machine"),
    ],
)
def test_runs_that_do_not_fit_this_machine(hardware: str, machine: Machine, why: str) -> None:
    """The reason names what there is."""
    assert shape(hardware, on=machine) == why


def test_cpu_ranks_of_this_machine() -> None:
    """One core each by default."""
    got = placed("cpu:2", on=Machine())
    assert (got.gpu, got.ranks, got.cpus_per_rank, got.gpus_per_node) == ("", 2, 1, 0)


def test_default_cpus() -> None:
    """By GPU on a cluster, by rank on CPU and on this machine."""
    on_site = resources.default_cpus(site())
    assert on_site(Hardware.parse("a30:2"), 1) == 32
    assert on_site(Hardware.parse("gpu:1"), 1) == 16
    assert on_site(Hardware.parse("cpu:3"), 3) == 6
    assert on_site(Hardware.parse("a100:2"), 2) == 2
    assert resources.default_cpus(None)(Hardware.parse("gpu:2"), 2) == 2


def test_shapes_can_be_keys_and_rows() -> None:
    """Runs are grouped by shape, and the plan file holds shapes as rows."""
    from dataclasses import asdict

    one, other = placed("a30:2", on=site()), placed("a30:2", on=site())
    assert {one: 1}[other] == 1
    assert ResourceShape(**asdict(one)) == one
