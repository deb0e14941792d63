"""cluster.toml: all mistakes together with their places, expanded texts, and the target of an invocation."""

from __future__ import annotations

import getpass
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from orchestrator.cluster import cluster_file
from orchestrator.cluster.profile import ClusterProfile, ClusterQueue, GpuNodes, Recovery
from orchestrator.errors import ClusterError, InputError

ROOT = Path(__file__).parents[2]
SMALL = """
[cluster.lab]
{top}
[cluster.lab.gpu.a100]
node_gpus = 4
cpus_per_gpu = 12
{gpu}
"""


def profile(top: str = "", gpu: str = "") -> ClusterProfile:
    return cluster_file.parse_file(SMALL.format(top=top, gpu=gpu), "cluster.toml")["lab"]


def mistakes(text: str) -> dict[str, tuple[str, str]]:
    """Place below the cluster's table -> (what, hint)."""
    with pytest.raises(ClusterError) as caught:
        cluster_file.parse_file(text, "cluster.toml")
    return {
        m.where.removeprefix("cluster.toml: ").removeprefix("cluster.lab."): (m.what, m.hint)
        for m in caught.value.mistakes
    }


def mistake(top: str = "", gpu: str = "") -> tuple[str, str, str]:
    """The only mistake of a small file: (place, what, hint)."""
    found = mistakes(SMALL.format(top=top, gpu=gpu))
    assert len(found) == 1, found
    ((place, (what, hint)),) = found.items()
    return place, what, hint


def test_the_example_means_the_same_as_the_shipped_profile() -> None:
    """The commented example and the profile that works without a file cannot drift apart."""
    example = cluster_file.load(ROOT / "cluster.example.toml")
    assert example == cluster_file.load("sol")
    assert example.digest == cluster_file.load("sol").digest


def test_the_example_shows_every_key() -> None:
    """Users find only keys that the example explains."""
    from orchestrator.cluster.profile import ClusterQueue, CpuNodes, GpuNodes

    text = (ROOT / "cluster.example.toml").read_text(encoding="utf-8")
    for table in (ClusterProfile, GpuNodes, CpuNodes, ClusterQueue):
        for name, field in table.model_fields.items():
            assert (field.alias or name) in text, f"{table.__name__}.{name}"


def test_all_mistakes_of_a_file_are_reported_together() -> None:
    """Eleven mistakes of eleven kinds in four tables, each with its place and a hint."""
    found = mistakes("""
[cluster.lab]
acount = "grp_lab"
account = 42
export = "NONE"
requeue = "no"
poll_seconds = 0
python = "env/bin/python"
prologue = ["module load a\\nmodule load b"]
env = { NCCL_DEBUG = 1 }
extra = { "job-name" = "x" }
[cluster.lab.gpu.a100]
mem = "96G"
cpus_per_gpu = 12
node_mem = 512
[[cluster.lab.gpu.a100.queue]]
max_time = 04:00:00
partion = "htc"
""")
    assert found == {
        "acount": ('unknown key "acount"', 'did you mean "account"?'),
        "account": ("42 is not a text", 'put the text in quotes: "42"'),
        "requeue": ('"no" is not one of never, requeue, cancel', ""),
        "poll_seconds": ("0 is out of range", "write a value of at least 1"),
        "python": (
            '"env/bin/python" is not an absolute path',
            "write the path from /: jobs run in other folders",
        ),
        "prologue[0]": (
            "'module load a\\nmodule load b' contains a line end or another control character",
            "write it on one line",
        ),
        "env.NCCL_DEBUG": ("1 is not a text", 'quote it: "1"'),
        "extra.job-name": ("--job-name is set for each run", "remove it"),
        "gpu.a100": ('"node_gpus" is missing', 'add "node_gpus"'),
        "gpu.a100.mem": ('unknown key "mem"', "the keys here are: node_mem, mem_style, mem_per_gpu, expect_mem_gb"),
        "gpu.a100.node_mem": ("512 has no unit", 'write "512G" or "512M"'),
        "gpu.a100.queue[0].max_time": ("this is a TOML time of day", 'quote it: "04:00:00"'),
        "gpu.a100.queue[0].partion": ('unknown key "partion"', 'did you mean "partition"?'),
    }


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('[cluster.lab]\naccount = "a', "end of file", "not TOML"),
        ("[cluster.lab]\ntime = 1-00:00:00", "line 2", "not TOML"),
        ("[clutser.lab]\n", "clutser", 'unknown key "clutser"'),
        ("", "cluster.toml", "no cluster in this file"),
        ("[cluster.lab]\npoll_seconds = 99999999999999999999999", "cluster.lab.poll_seconds", "more than 64 bits"),
        (f"[cluster.lab]\nenv = {'[' * 1500}{']' * 1500}", "cluster.toml: ", "nested too deeply"),
        (f"[cluster.lab]\nenv = {'{a=' * 500}1{'}' * 500}", "cluster.toml: ", "nested too deeply"),
        ("[cluster.local]\n", "cluster.local", '"local" cannot name a cluster'),
        ('[cluster."a b"]\n', "cluster.a b", '"a b" cannot name a cluster'),
        ("[cluster]\nsol = 3\n", "cluster.sol", "3 is not a table"),
        ("[cluster.lab]\n", "cluster.lab", "no nodes"),
        ('[cluster.lab]\nname = "x"\n[cluster.lab.cpu]\n', "cluster.lab.name", 'unknown key "name"'),
    ],
)
def test_files_that_are_not_cluster_files(text: str, where: str, what: str) -> None:
    """Invalid TOML, wrong tables and a reserved name are errors with their places."""
    with pytest.raises(ClusterError) as caught:
        cluster_file.parse_file(text, "cluster.toml")
    assert where in str(caught.value)
    assert what in str(caught.value)


@pytest.mark.parametrize("value", ["$SCRATCH/x", "${SCRATCH}/x", "/scratch/$SCRATCH/x"])
def test_an_unset_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A literal ``$SCRATCH`` in a path would make every job write to one wrong folder."""
    monkeypatch.delenv("SCRATCH", raising=False)
    place, what, _ = mistake(f'data = "{value}"')
    assert place == "data"
    assert "SCRATCH" in what and "not set here" in what


def test_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``~``, variables, ``{user}`` and ``{scratch}``."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("GROUP", "lab")
    got = profile('scratch = "/scratch/{user}"\ndata = "{scratch}/$GROUP/data"\npython = "~/env/bin/python"')
    assert got.data == f"/scratch/{getpass.getuser()}/lab/data"
    assert got.python == "/home/me/env/bin/python"


def test_an_unknown_place_is_an_error() -> None:
    """``{scratch}`` without a scratch folder must not stay in the path."""
    assert mistake('data = "{scratch}/data"')[1] == '"{scratch}/data": {scratch} is unknown'


@pytest.mark.parametrize("value", ["/s/{user", "/s/user}/x", "/s/{us-er}"])
@pytest.mark.parametrize("key", ["scratch", "data", "stage"])
def test_a_place_with_one_brace_is_an_error(key: str, value: str) -> None:
    assert mistake(f'{key} = "{value}"')[:2] == (key, f'"{value}": {value.split("/")[2]} names no place')


def test_an_account_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user may have no name; the key that needs one reports it."""

    def nameless() -> str:
        raise OSError("No username set in the environment")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert mistake('scratch = "/scratch/{user}"')[:2] == (
        "scratch",
        "{user} is unknown: this account has no user name on this machine",
    )


def test_without_a_python_jobs_run_this_interpreter() -> None:
    """The usual case on a shared disk needs no key."""
    assert profile().python == sys.executable
    assert profile().interpreter("a100") == sys.executable
    assert profile(gpu='python = "/arm/bin/python"').interpreter("a100") == "/arm/bin/python"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("partition", "--partition is set for each run"),
        ("part", "--partition is set for each run"),
        ("mem-per-cpu", "--mem-per-cpu is set for each run"),
        ("--mail-type", "not the long name of an sbatch option"),
        ("A", "not the long name of an sbatch option"),
    ],
)
def test_extra_cannot_set_options_of_a_run(name: str, what: str) -> None:
    """Neither by name, nor by abbreviations that sbatch accepts, nor by short forms."""
    assert mistake(f'extra = {{ "{name}" = "x" }}')[:2] == (f"extra.{name}", what)


@pytest.mark.parametrize("value", ["false", '""', "0"])
def test_extra_has_no_empty_values(value: str) -> None:
    """They would be written as empty options."""
    assert "is not a value" in mistake(f'extra = {{ "mail-type" = {value} }}')[1]


@pytest.mark.parametrize(
    "kind",
    ["a100.20gb", "a100_1g.5gb", "A100-1g.5gb", "nvidia_h100_80gb_hbm3_1g.10gb", "1g.20gb", "v100-32", "RTX_6000"],
)
def test_types_of_gpu_pass_unchanged(kind: str) -> None:
    """Dots, dashes, case and leading digits of real sites are kept."""
    assert profile(gpu=f'type = "{kind}"').gpu["a100"].type == kind


@pytest.mark.parametrize("text", ["a$b", "a`b`", "a\\\\b", "a'b"])
def test_directives_contain_no_shell_characters(text: str) -> None:
    """Slurm would take them literally or drop them."""
    place, what, _ = mistake(gpu=f'constraint = "{text}"')
    assert place == "gpu.a100.constraint"
    assert "#SBATCH lines expand no variables" in what


@pytest.mark.parametrize(
    ("top", "gpu", "place", "what"),
    [
        ('account = "x; touch y"', "", "account", '"x; touch y" is not a name that Slurm accepts'),
        ('account = "x"\naccount_suffix = " y"', "", "account_suffix", '" y" is not a name that Slurm accepts'),
        ("", 'account_suffix = "&"', "gpu.a100.account_suffix", '"&" is not a name that Slurm accepts'),
        (
            "",
            'queue = [{ partition = "a b" }]',
            "gpu.a100.queue[0].partition",
            '"a b" is not a name that Slurm accepts',
        ),
        ("", 'queue = [{ qos = "a|b" }]', "gpu.a100.queue[0].qos", '"a|b" is not a name that Slurm accepts'),
        ("", 'visible_env = "x; touch y"', "gpu.a100.visible_env", '"x; touch y" is not the name of a variable'),
        ("", 'arch = "x; touch y"', "gpu.a100.arch", '"x; touch y" is not an architecture'),
        ("", 'arch = ""', "gpu.a100.arch", '"" is not an architecture'),
    ],
)
def test_invalid_names(top: str, gpu: str, place: str, what: str) -> None:
    """``visible_env`` is written into the script unquoted."""
    found, said, hint = mistake(top, gpu)
    assert (found, said) == (place, what) and hint


def test_names_of_sites_pass_unchanged() -> None:
    """Suffixes such as Jean Zay's, several partitions, and accounts of all sorts."""
    got = profile('account = "def-prof_1.x+y"\naccount_suffix = "@a100"', 'queue = [{ partition = "gpu,long-1" }]')
    assert got.account_for(got.gpu["a100"]) == "def-prof_1.x+y@a100"
    assert got.gpu["a100"].queue[0].partition == "gpu,long-1"


@pytest.mark.parametrize(
    ("top", "place", "hint"),
    [
        ("poll_seconds = 4294967296", "poll_seconds", "write a value of at most 4294967295"),
        ("max_submit = 9223372036854775807", "max_submit", "write a value of at most 4294967295"),
        ("recovery = { timeout = 4294967296 }", "recovery.timeout", "write a value of at most 4294967295"),
        ("recovery = { time_factor = 1e300 }", "recovery.time_factor", "write a value of at most 100"),
        ("recovery = { mem_factor = inf }", "recovery.mem_factor", "write a value of at most 100"),
    ],
)
def test_numbers_have_limits(top: str, place: str, hint: str) -> None:
    found, _, said = mistake(top)
    assert (found, said) == (place, hint)


@pytest.mark.parametrize(
    ("variable", "what"),
    [
        ("CUDA_VISIBLE_DEVICES", "this variable is set for each run"),
        ("PYTHONSAFEPATH", "this variable is set for each run"),
        ("SLURM_JOB_ID", "this variable is set for each run"),
        ("A-B", "not the name of a variable"),
    ],
)
def test_variables_that_env_cannot_set(variable: str, what: str) -> None:
    """Devices, Slurm's own variables and the safe path are set for each run."""
    assert mistake(f'env = {{ {variable} = "1" }}')[:2] == (f"env.{variable}", what)


def test_an_env_value_with_a_variable_belongs_into_the_prologue() -> None:
    """It would be exported literally."""
    assert mistake('env = { A = "$B/x" }') == (
        "env.A",
        "variables are not expanded here",
        'write in prologue: "export A=..."',
    )


def test_keys_that_write_forbidden_options_are_errors() -> None:
    """Each such key is named, also where its default writes the option."""
    found = mistakes(SMALL.format(top='forbid = ["gres", "mem", "export", "nodelist", "time"]', gpu=""))
    assert found == {
        "export": ("this key writes --export, which forbid lists", 'write export = ""'),
        "gpu.a100.request": ("this key writes --gres, which forbid lists", 'write request = "none"'),
        "gpu.a100.mem_style": ("this key writes --mem, which forbid lists", 'write mem_style = "none"'),
        "forbid[4]": ("jobs need --time", "remove it"),
    }


@pytest.mark.parametrize(
    ("top", "gpu", "place", "what"),
    [
        ('default_gpu = "a10"', "", "default_gpu", 'there is no gpu table "a10"'),
        ("", "ask_gpus = 5", "gpu.a100.ask_gpus", "5 is more than node_gpus = 4"),
        (
            "",
            'ask_gpus = 4\nrequest = "gpus_per_task"',
            "gpu.a100.ask_gpus",
            "a whole node cannot be requested per task",
        ),
        ("", 'mem_per_gpu = "all"\nmem_style = "per_gpu"', "gpu.a100.mem_per_gpu", '"all" is the memory of a node'),
        ("", 'type = "gpu:a100"', "gpu.a100.type", '"gpu:a100" is not a type of GPU'),
        ('hostname_pattern = "("', "", "hostname_pattern", '"(" is not a regular expression'),
        ('template = "/no/such/file"', "", "template", "file /no/such/file does not exist"),
        ('launcher = "srum"', "", "launcher", '"srum" is not one of srun, torchrun, none'),
        ("[cluster.lab.cpu]\ncpus_by='gpu'", "", "cpu.cpus_by", '"gpu" has no meaning on nodes without GPUs'),
        (
            "[cluster.lab.cpu]\nmem_style='per_gpu'",
            "",
            "cpu.mem_style",
            '"per_gpu" has no meaning on nodes without GPUs',
        ),
        ('env = "A=1"', "", "env", '"A=1" is not a table'),
        ("extra = 3", "", "extra", "3 is not a table"),
        ('env = { A = "a\\u0007" }', "", "env.A", "control character"),
        ("[cluster.lab.gpu.cpu]\nnode_gpus=1\ncpus_per_gpu=1", "", "gpu.cpu", '"cpu" is not a kind of hardware'),
        ("[cluster.lab.gpu.CPU]\nnode_gpus=1\ncpus_per_gpu=1", "", "gpu.CPU", '"CPU" is not a kind of hardware'),
    ],
)
def test_keys_that_contradict_each_other(top: str, gpu: str, place: str, what: str) -> None:
    """Each is named at the key to change."""
    found = mistake(top, gpu)
    assert found[0] == place
    assert what in found[1]


VALUES = ('"text"', "3", "1.5", "true", "nan", "1979-05-27", "[1]", "[[1]]", "[]", "{}", "{ a = 1 }", "[{ a = 1 }]")
TABLES = {
    ClusterProfile: "[cluster.lab]",
    GpuNodes: "[cluster.lab.gpu.a100]",
    ClusterQueue: "[cluster.lab.cpu]\n[[cluster.lab.cpu.queue]]",
    Recovery: "[cluster.lab.recovery]",
}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_no_invalid_value_gets_a_message_of_pydantic(table: type[BaseModel]) -> None:
    """Each key of each table with a value of each type is accepted, or an error in our words; where a list or a table
    is expected, with what to write."""
    found = []
    for (name, field), value in itertools.product(table.model_fields.items(), VALUES):
        line = f"{field.alias or name} = {value}"
        try:
            cluster_file.parse_file(f"{TABLES[table]}\n{line}\n", "cluster.toml")
        except ClusterError as error:
            found += [(line, m.what, m.hint) for m in error.mistakes]
    assert len(found) > len(table.model_fields)
    assert [m for m in found if re.search(r"_type|\w type\)|pydantic|instance of|Input should", m[1])] == []
    assert [m for m in found if m[1].endswith((" a list", " a table")) and not m[2]] == []


@pytest.mark.parametrize(
    ("top", "gpu", "place", "what", "hint"),
    [
        ('prologue = "module load cuda"', "", "prologue", '"module load cuda" is not a list', '= ["module load cuda"]'),
        ("", "prologue = 3", "gpu.a100.prologue", "3 is not a list", "write prologue = [3]"),
        ("", 'queue = "htc"', "gpu.a100.queue", '"htc" is not a list', "two brackets on each side, such as [[queue]]"),
        ("recovery = 3", "", "recovery", "3 is not a table", "write { key = value }"),
    ],
)
def test_one_value_in_place_of_a_list_or_a_table(top: str, gpu: str, place: str, what: str, hint: str) -> None:
    found = mistake(top, gpu)
    assert found[:2] == (place, what)
    assert hint in found[2]


def test_the_digest_depends_on_values_only(tmp_path: Path) -> None:
    """Not on comments, spelling of amounts or order of keys; a changed template changes it."""
    one = profile(gpu='mem_per_gpu = "48G"\ntype = "a100"')
    assert one.digest == profile(gpu='# why\ntype = "a100"\nmem_per_gpu = "49152M"').digest
    assert one.digest != profile(gpu='mem_per_gpu = "47G"\ntype = "a100"').digest
    template = tmp_path / "mine.sh.j2"
    template.write_text("one")
    before = profile(f'template = "{template}"').digest
    template.write_text("two")
    assert profile(f'template = "{template}"').digest != before


def test_account_and_suffix() -> None:
    """The suffix belongs to the accelerator; without an account there is no line."""
    got = profile('account = "abc"\naccount_suffix = "@v100"', 'account_suffix = "@a100"')
    assert got.account_for(got.gpu["a100"]) == "abc@a100"
    assert profile('account_suffix = "@v100"').account_for(profile().gpu["a100"]) == ""


TWO = """
[cluster.sol]
hostname_pattern = '^sol-'
[cluster.sol.cpu]
[cluster.phoenix]
hostname_pattern = '^phx-'
[cluster.phoenix.cpu]
"""


def test_a_file_of_several_clusters(tmp_path: Path) -> None:
    """The host chooses, or the name after a colon; otherwise the error names both."""
    file = tmp_path / "cluster.toml"
    file.write_text(TWO)
    assert cluster_file.load(file, hostname="phx-login1").name == "phoenix"
    assert cluster_file.load(f"{file}:sol", hostname="phx-login1").name == "sol"
    with pytest.raises(InputError) as caught:
        cluster_file.load(file, hostname="laptop")
    assert "several clusters (sol, phoenix)" in str(caught.value)
    assert f"--cluster {file}:sol" in caught.value.hint
    with pytest.raises(InputError, match='there is no cluster "fenix"'):
        cluster_file.load(f"{file}:fenix")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, not UTF-8 and invalid files are errors with their path, never a traceback."""
    with pytest.raises(InputError) as caught:
        cluster_file.load(tmp_path / "no.toml")
    assert "no such cluster file and no such shipped profile" in str(caught.value)
    assert "shipped profiles: " in caught.value.hint and " sol," in caught.value.hint
    with pytest.raises(InputError) as caught:
        cluster_file.load("sool")
    assert caught.value.hint == 'did you mean "sol"?'
    (tmp_path / "latin.toml").write_bytes(b'[cluster.lab]\naccount = "\xe9"\n')
    with pytest.raises(ClusterError, match=r"latin\.toml: line 2: byte 0xe9 is not UTF-8"):
        cluster_file.load(tmp_path / "latin.toml")


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    """Files saved on Windows mean the same."""
    file = tmp_path / "cluster.toml"
    file.write_bytes(
        b"\xef\xbb\xbf" + SMALL.format(top='prologue = ["module load a"]', gpu="").replace("\n", "\r\n").encode()
    )
    assert cluster_file.load(file).prologue == ("module load a",)


def on_path(*commands: str) -> Callable[[str], str | None]:
    return lambda command: f"/usr/bin/{command}" if command in commands else None


def no_look_up(hostname: str) -> str:
    raise AssertionError("the full name was looked up where it cannot matter")


def test_choose_takes_local_mode_where_there_is_no_slurm(tmp_path: Path) -> None:
    """And queries no name server."""
    assert (
        cluster_file.choose(local=False, named=None, cwd=tmp_path, hostname="laptop", which=on_path(), fqdn=no_look_up)
        is None
    )


def test_choose_follows_its_order(tmp_path: Path) -> None:
    """--local before --cluster before cluster.toml before a shipped profile."""
    sol = "login01.sol.rc.asu.edu"
    (tmp_path / "other.toml").write_text(SMALL.format(top="", gpu="").replace("lab", "other"))

    def choice(*, local: bool = False, named: Path | None = None) -> str | None:
        chosen = cluster_file.choose(local=local, named=named, cwd=tmp_path, hostname=sol, which=on_path("sbatch"))
        return chosen.name if chosen else None

    assert choice() == "sol"
    (tmp_path / "cluster.toml").write_text(SMALL.format(top="", gpu=""))
    assert choice() == "lab"
    assert choice(named=tmp_path / "other.toml") == "other"
    assert choice(named=Path("sol")) == "sol"
    assert choice(local=True, named=Path("sol")) is None


def test_choose_recognises_a_login_node_by_its_full_name(tmp_path: Path) -> None:
    """At many sites the host name is the short name only."""
    chosen = cluster_file.choose(
        local=False,
        named=None,
        cwd=tmp_path,
        hostname="login01",
        which=on_path("sbatch"),
        fqdn=lambda name: f"{name}.sol.rc.asu.edu",
    )
    assert chosen is not None and chosen.name == "sol"


def test_choose_never_trains_on_a_login_node_by_accident(tmp_path: Path) -> None:
    """With sbatch and no profile, the error names the alternatives."""
    with pytest.raises(InputError) as caught:
        cluster_file.choose(
            local=False, named=None, cwd=tmp_path, hostname="login01", which=on_path("sbatch"), fqdn=str
        )
    assert "--cluster" in caught.value.hint and "--local" in caught.value.hint
    assert caught.value.exit_code == 2
