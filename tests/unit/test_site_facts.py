"""``init --cluster``: output of Slurm -> facts -> a valid cluster file, for sites of several kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cluster import cluster_file, cluster_file_writer, discovery, sample_scripts, site_facts
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.cluster.site_facts import SiteFacts
from orchestrator.errors import InputError, OperationError

HOSTS = ("login2", "login2.big.example.edu")

BIG = {
    "sinfo": """\
htc|up|4:00:00|40|48|515000|gpu:a100:4(S:0-3)|public,a100_80
htc|up|4:00:00|6|48|515000|gpu:a30:3(S:0,1)|public
general|up|30-00:00:00|40|48|515000|gpu:a100:4(S:0-3)|public,a100_80
general|up|30-00:00:00|2|64|1031000|gpu:a100:8(S:0-3)|private
public|up|7-00:00:00|40|48|515000|gpu:a100:4(S:0-3)|public,a100_80
public|up|7-00:00:00|6|48|515000|gpu:a30:3(S:0,1)|public
public|up|7-00:00:00|3|48|515000|gpu:a100.20gb:16(S:0-1)|public
public|up|7-00:00:00|100|128|515000|(null)|public
arm|up|7-00:00:00|4|72|573000|gpu:gh200:1|(null)
staff|up|infinite|10|48|515000|gpu:v100:4|(null)
old|down|infinite|10|48|515000|gpu:k80:4|(null)
""",
    "partitions": """\
PartitionName=htc AllowGroups=ALL AllowAccounts=ALL DenyQos=private AllowQos=ALL Default=NO QoS=N/A MaxNodes=UNLIMITED \
MaxTime=04:00:00 OverSubscribe=NO PriorityTier=1 PreemptMode=OFF State=UP
PartitionName=general AllowGroups=ALL AllowAccounts=ALL AllowQos=private,grp_lab Default=NO QoS=caps MaxNodes=4 \
MaxTime=30-00:00:00 OverSubscribe=NO PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=public AllowGroups=ALL AllowAccounts=ALL AllowQos=public,debug,class Default=YES QoS=N/A \
MaxNodes=UNLIMITED MaxTime=7-00:00:00 OverSubscribe=NO PriorityTier=1 PreemptMode=OFF State=UP
PartitionName=arm AllowAccounts=ALL AllowQos=ALL Default=NO MaxTime=7-00:00:00 State=UP RootOnly=NO
PartitionName=staff AllowAccounts=sysadmin AllowQos=ALL Default=NO MaxTime=UNLIMITED State=UP
""",
    "nodes": """\
NodeName=sg001 Arch=x86_64 CoresPerSocket=24 CPUTot=48 Gres=gpu:a100:4(S:0-3) Partitions=htc,general,public
NodeName=gh01 Arch=aarch64 CoresPerSocket=72 CPUTot=72 Gres=gpu:gh200:1 Partitions=arm
""",
    "config": """\
Configuration data as of 2026-11-28T02:48:23
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = Big
MaxArraySize            = 50001
PreemptMode             = CANCEL,GANG
PreemptType             = preempt/qos
SLURM_VERSION           = 24.11.5
""",
    "user": "grp_lab\n",
    "associations": """\
big|grp_lab||grp_lab,private,public|public|5000|
big|class_ml||class|class||
other|elsewhere||normal|normal||
""",
    "qos": """\
normal||||
public|||500|
private||||
grp_lab|14-00:00:00|||private
class|1-00:00:00|cpu=32,gres/gpu=4,mem=320G|10|
caps||node=2||
""",
}


def settings(**changes: str) -> dict[str, str]:
    return {name: text for name, text in {**BIG, **changes}.items() if text}


def made(site: SiteFacts, **place: str) -> tuple[str, ClusterProfile]:
    """The text of the file and its profile."""
    text = cluster_file_writer.text(
        site,
        cluster_file_writer.Login(**{"user": "me", "host": HOSTS[-1], "date": "2026-11-28", "scratch": ""} | place),
    )
    return text, cluster_file.parse_file(text, "cluster.toml")[cluster_file_writer.target(site)]


def test_a_large_site(tmp_path: Path) -> None:
    """Types with dots, slices, another processor, nodes that differ, pairs of partition and QOS with their limits,
    preemption; without partitions of others and those that are down. Its sample scripts pass the lint."""
    text, profile = made(site_facts.parse(BIG), scratch="/scratch/{user}")
    assert profile.name == "big" and profile.matches("login7.big.example.edu") and not profile.matches("big.org")
    assert profile.account == "grp_lab" and "# Your accounts: grp_lab, class_ml; Slurm's default is grp_lab." in text
    assert (profile.max_submit, profile.array_index_max, profile.accounting) == (500, 50000, "auto")
    assert profile.requeue == "cancel" and profile.data.endswith("/data")
    assert list(profile.gpu) == ["a100", "a30", "gh200", "a100.20gb"]
    a100 = profile.gpu["a100"]
    assert (a100.type, a100.node_gpus, a100.node_cores, a100.cpus_per_gpu) == ("a100", 8, 64, 8)
    assert a100.mem_per_gpu_bytes == 119 << 30 and "# The nodes differ" in text
    assert (profile.gpu["a30"].node_gpus, profile.gpu["a30"].cpus_per_gpu) == (3, 16)
    assert profile.gpu["a100.20gb"].mig and profile.gpu["gh200"].arch == "aarch64"
    day = 86400
    queues = [(q.partition, q.qos, q.max_time_s, q.max_nodes, q.preemptable) for q in a100.queue]
    assert queues == [
        ("public", "public", 7 * day, 0, False),
        ("htc", "public", 4 * 3600, 0, False),
        ("htc", "grp_lab", 4 * 3600, 0, False),
        ("general", "grp_lab", 14 * day, 2, False),
        ("general", "private", 30 * day, 2, True),
    ]
    assert profile.cpu is not None and [str(q) for q in profile.cpu.queue] == ["public/public"]
    assert profile.cpu.node_cores == 128
    assert not sample_scripts.profile_faults(profile, runs=tmp_path)


@pytest.mark.parametrize("missing", ["partitions", "nodes", "config", "user", "associations", "qos"])
def test_any_answer_but_the_first_may_be_missing(missing: str) -> None:
    """The file names the query without an answer and the reason, and is valid."""
    site = site_facts.parse(settings(**{missing: ""}), {missing: "Access denied"})
    text, profile = made(site)
    # Without its settings nobody knows whether a site has accounts, so nobody misses them.
    assert f"# No answer from Slurm: {missing} (Access denied)" in text
    assert "a100" in profile.gpu and not sample_scripts.profile_faults(profile)


def test_a_site_without_accounting() -> None:
    """No account, no QOS; states come from the controller."""
    config = "ClusterName = lab\nAccountingStorageType = accounting_storage/none\nMaxArraySize = 1001\n"
    site = site_facts.parse(settings(config=config, user="", associations="", qos=""), {"qos": "You are not running"})
    text, profile = made(site)
    assert "# This site has no accounts." in text and "No answer" not in text
    assert (profile.account, profile.accounting, profile.requeue) == ("", "squeue", "never")
    assert ("htc", "") in [(q.partition, q.qos) for q in profile.gpu["a100"].queue]


def test_features_distinguish_gpus_without_a_type() -> None:
    """As at sites that select the type by constraint; nodes without such a feature get their own table."""
    sinfo = """\
gpu|up|1-00:00:00|8|64|500000|gpu:8|a100,nvme
gpu|up|1-00:00:00|8|40|180000|gpu:4|v100-32g
gpu|up|1-00:00:00|2|40|180000|gpu:4|(null)
"""
    _, profile = made(site_facts.parse({"sinfo": sinfo, "config": BIG["config"]}))
    assert {kind: (nodes.type, nodes.constraint) for kind, nodes in profile.gpu.items()} == {
        "a100": ("", "a100"),
        "v100": ("", "v100-32g"),
        "any": ("", ""),
    }


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:a100:4(S:0-3)", [("a100", 4)]),
        ("gpu:a100:4(S:0,2),gpu:a100.20gb:8(S:1),nvme:1", [("a100", 4), ("a100.20gb", 8)]),
        ("gpu:nvidia_h100_80gb_hbm3_1g.10gb:28", [("nvidia_h100_80gb_hbm3_1g.10gb", 28)]),
        ("gpu:8", [("", 8)]),
        ("gpu", [("", 1)]),
        ("gpu:A30:2,shard:a30:8", [("A30", 2)]),
        ("(null)", []),
        ("craynetwork:4", []),
    ],
)
def test_gres_of_every_kind(gres: str, found: list[tuple[str, int]]) -> None:
    """The type is kept in the site's spelling."""
    assert list(site_facts.gpus(gres)) == found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4:00:00", 14400),
        ("7-00:00:00", 604800),
        ("1-12", 129600),
        ("30:00", 1800),
        ("90", 5400),
        ("infinite", 0),
        ("UNLIMITED", 0),
        ("", 0),
        ("soon", 0),
    ],
)
def test_times_as_slurm_prints_them(text: str, seconds: int) -> None:
    """Two fields are minutes and seconds; no limit is 0."""
    assert site_facts.seconds(text) == seconds


def test_nodes_that_slurm_allocates_whole() -> None:
    """OverSubscribe=EXCLUSIVE: the script requests it, and the cost is that of the node."""
    partitions = "PartitionName=gpu AllowQos=ALL OverSubscribe=EXCLUSIVE State=UP MaxTime=1-00:00:00 Default=YES"
    sinfo = "gpu|up|1-00:00:00|8|96|768000|gpu:h100:4|(null)\n"
    _, profile = made(site_facts.parse({"sinfo": sinfo, "partitions": partitions}))
    assert profile.gpu["h100"].asked_gpus(2) == 4 and profile.name == "cluster"


def test_preemption_by_priority_of_partitions() -> None:
    """Preemptable queues come last, and are not used unless the user allows it."""
    config = "ClusterName=x\nPreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nMaxArraySize=1001\n"
    partitions = """\
PartitionName=free Default=YES MaxTime=1-00:00:00 PriorityTier=1 State=UP
PartitionName=paid Default=NO MaxTime=2-00:00:00 PriorityTier=10 State=UP
"""
    sinfo = "free|up|1-00:00:00|8|32|256000|gpu:A30:4|(null)\npaid|up|2-00:00:00|8|32|256000|gpu:A30:4|(null)\n"
    _, profile = made(site_facts.parse({"sinfo": sinfo, "partitions": partitions, "config": config}))
    assert profile.requeue == "requeue" and profile.gpu["a30"].type == "A30"
    assert [(q.partition, q.preemptable) for q in profile.gpu["a30"].queue] == [("paid", False), ("free", True)]


# --- which file is written ---


class Slurm:
    """Client commands with the answers of a site."""

    def __init__(self, answers: dict[str, str], refuses: str = "Access denied") -> None:
        self.answers, self.refuses = answers, refuses
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *argv: str) -> tuple[bool, str]:
        self.asked.append(argv)
        question = next(q for q, a in site_facts.COMMANDS.items() if tuple(w.format(user="me") for w in a) == argv)
        return (True, self.answers[question]) if question in self.answers else (False, self.refuses)


@pytest.fixture(autouse=True)
def me(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "me")
    for name in ("SCRATCH", "SCRATCHDIR", "WORK"):
        monkeypatch.delenv(name, raising=False)


def test_a_site_without_a_profile() -> None:
    """The result names its source, and what the user still has to set."""
    found = discovery.compose(None, Slurm(BIG), hosts=HOSTS)
    assert (found.name, found.origin) == ("big", "what Slurm 24.11.5 reports")
    assert found.notes == ("scratch: no shared folder was found; set yours",)


def test_a_shipped_profile_is_used_where_its_hosts_match() -> None:
    """The text is that of the profile; with several accounts, the default one is set and a comment lists all."""
    hosts = ("sol-login01", "sol-login01.sol.rc.asu.edu")
    found = discovery.compose(None, Slurm({}), hosts=hosts)
    assert found.text == cluster_file.shipped()["sol"]
    several = discovery.compose(None, Slurm(BIG), hosts=hosts)
    said = '# Your accounts: grp_lab, class_ml.\naccount = "grp_lab"\n'
    assert several.text == found.text.replace("[cluster.sol]\n", f"[cluster.sol]\n{said}")
    assert found.origin == "the shipped profile sol, whose hosts match sol-login01.sol.rc.asu.edu"


@pytest.mark.parametrize(
    ("answers", "line", "notes"),
    [
        (
            {"config": "ClusterName=delta\nAccountingStorageType=accounting_storage/slurmdbd"}
            | {"associations": "delta|bxyz-delta-gpu||normal|normal||\ndelta|bxyz-delta-cpu||normal|normal||\n"}
            | {"user": "bxyz-delta-cpu\n"},
            '# Your accounts: bxyz, bxyz-delta-cpu.\naccount = "bxyz-delta-cpu"\n',
            (),
        ),
        (
            {},
            '# Required here; Slurm does not report yours.\naccount = ""\n',
            ("account: this site requires one; set yours",),
        ),
    ],
)
def test_a_shipped_profile_gets_the_users_account(answers: dict[str, str], line: str, notes: tuple[str, ...]) -> None:
    """Without the suffix that the profile adds."""
    found = discovery.compose("delta", Slurm(answers), hosts=HOSTS)
    assert f"[cluster.delta]\n{line}" in found.text and found.notes == notes
    assert cluster_file.parse_file(found.text, "cluster.toml")["delta"].gpu.keys() >= {"a100", "a40"}


def test_errors_where_slurm_reports_nothing() -> None:
    """No Slurm, a Slurm that does not answer, a cluster without nodes for this user, a profile that does not exist."""
    with pytest.raises(InputError, match="there is no Slurm on this machine") as caught:
        discovery.compose(None, Slurm({}, "there is no sinfo on PATH"), hosts=HOSTS)
    assert "--profile: a30-canada" in caught.value.hint
    for said, why in (("exit code 1: Unable to contact slurm controller",) * 2, ("", "it prints nothing")):
        with pytest.raises(OperationError, match="Slurm does not report the cluster's nodes") as failed:
            discovery.compose(None, Slurm({}, said), hosts=HOSTS)
        assert failed.value.where.startswith(f"{HOSTS[-1]}: sinfo --noheader") and failed.value.why == why
        assert "try again" in failed.value.hint and "--profile" in failed.value.hint
    with pytest.raises(OperationError, match="Slurm reports no nodes that this user may use"):
        discovery.compose(None, Slurm({"sinfo": "old|down|infinite|1|8|9000|gpu:k80:4|(null)\n"}), hosts=HOSTS)
    with pytest.raises(InputError, match='there is no shipped profile "delt"') as caught:
        discovery.compose("delt", Slurm({}), hosts=HOSTS)
    assert caught.value.hint == 'did you mean "delta"?'


def test_slurm_commands_in_an_unusual_folder() -> None:
    """A job with --export=NONE finds srun in the usual folders only."""
    assert discovery.slurm_bin("/opt/slurm/bin/srun") == "/opt/slurm/bin"
    assert discovery.slurm_bin("/usr/bin/srun") == discovery.slurm_bin(None) == ""
    text, profile = made(site_facts.parse(BIG), slurm_bin="/opt/slurm/bin")
    assert profile.slurm_bin == "/opt/slurm/bin" and "not in the usual folders" in text


def test_scratch_is_an_existing_folder(tmp_path: Path) -> None:
    """With {user} in place of the name, so that a group can share the file."""
    (tmp_path / "me" / "x").mkdir(parents=True)
    assert discovery.scratch("me", {"SCRATCH": f"{tmp_path}/me/x/"}) == f"{tmp_path}/{{user}}/x"
    assert discovery.scratch("me", {"SCRATCH": f"{tmp_path}/gone"}) == ""


def orchestrate(folder: Path, *argv: str, path: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": path}
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *argv], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def test_a_failing_slurm_command_is_reported_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "sinfo").chmod(0o755)
    done = orchestrate(tmp_path, "init", "--cluster", path=str(tmp_path))
    assert done.returncode == 1 and "  why: exit code 3: no output\n  fix: try again" in done.stderr
    assert not (tmp_path / "cluster.toml").exists()


def test_the_verb_overwrites_only_with_force(tmp_path: Path) -> None:
    """A shipped profile by name; again only with --force; the list; an option without its companion."""
    done = orchestrate(tmp_path, "init", "--cluster", "--profile", "leonardo")
    assert done.returncode == 0 and "to do in cluster.toml: account" in done.stderr
    assert (
        "wrote cluster.toml (cluster leonardo, from the shipped profile leonardo); next: orchestrate doctor"
        in done.stderr
    )
    written = (tmp_path / "cluster.toml").read_text()
    (tmp_path / "cluster.toml").write_text(f"{written}# mine\n")
    again = orchestrate(tmp_path, "init", "--cluster", "--profile", "sol")
    assert again.returncode == 2 and "there already is a cluster file; it is unchanged" in again.stderr
    assert (tmp_path / "cluster.toml").read_text() == f"{written}# mine\n"
    assert orchestrate(tmp_path, "init", "--cluster", "--profile", "sol", "--force").returncode == 0
    assert (tmp_path / "cluster.toml").read_text() == cluster_file.shipped()["sol"]
    listed = orchestrate(tmp_path, "init", "--cluster", "--list")
    assert [line.partition(":")[0] for line in listed.stdout.splitlines()] == list(cluster_file.shipped())
    alone = orchestrate(tmp_path, "init", "--profile", "sol")
    assert alone.returncode == 2 and "add --cluster" in alone.stderr
