"""Every verb has help that ends with a runnable example, and errors of ours are messages, not tracebacks."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.cli import completion


def _commands() -> Iterator[tuple[str, Any]]:
    """Every verb and sub-verb with its command."""
    for verb in cli.list_verbs():
        command = cli.load_verb(verb)
        yield verb, command
        for name, sub in getattr(command, "commands", {}).items():
            yield f"{verb} {name}", sub


COMMANDS = dict(_commands())


def _options(command: Any) -> set[str]:
    return {parameter.name for parameter in command.params}


def _run(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *argv],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("verb", cli.list_verbs())
def test_the_listed_summary_is_the_first_line_of_the_help(verb: str) -> None:
    """``orchestrate --help`` reads it from the text of the file, without importing the verb."""
    assert COMMANDS[verb].help.splitlines()[0] == cli.list_verbs()[verb]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example_of_this_command(name: str) -> None:
    """The last line is ``Example: orchestrate NAME ...``, and its options exist."""
    command = COMMANDS[name]
    last = command.help.strip().splitlines()[-1]
    assert last.startswith(f"Example: orchestrate {name}"), last
    known = {option for parameter in command.params for option in parameter.opts}
    mentioned = [word for word in shlex.split(last) if re.fullmatch(r"--?[a-z][a-z-]*", word.partition("=")[0])]
    assert {word.partition("=")[0] for word in mentioned} <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_all_that_is_written(tmp_path: Path, name: str) -> None:
    """Each word of the verb's and its options' help, also in square brackets, in lines as long as a terminal allows."""
    done = _run(tmp_path, *name.split(), "--help", COLUMNS="80")
    assert done.returncode == 0
    assert f"Usage: orchestrate {name}" in done.stdout
    shown = " ".join(done.stdout.split())
    command = COMMANDS[name]
    below = [sub.help.partition("\n")[0] for sub in getattr(command, "commands", {}).values()]
    texts = [command.help, *below, *(getattr(p, "help", None) for p in command.params)]
    assert [t for t in texts for paragraph in (t or "").split("\n\n") if " ".join(paragraph.split()) not in shown] == []
    prose = re.split(r"\n(?:Arguments|Options|Commands):", done.stdout)[0]
    for paragraph in re.split(r"\n *\n", prose)[1:]:
        lines = paragraph.strip("\n").splitlines()
        ragged = [one for one, two in itertools.pairwise(lines) if len(f"{one} {two.split()[0]}") < 78]
        assert ragged == [], "these lines end early"


def test_the_list_of_verbs_cuts_no_summary(tmp_path: Path) -> None:
    shown = " ".join(_run(tmp_path, "--help", COLUMNS="80").stdout.split())
    assert [summary for summary in cli.list_verbs().values() if " ".join(summary.split()) not in shown] == []


def test_without_an_experiment_file_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    done = _run(tmp_path, "plan", "--local")
    assert done.returncode == 2
    assert "experiment.toml" in done.stderr
    assert "orchestrate init --study demo" in done.stderr
    assert "Traceback" not in done.stderr


def test_init_does_not_touch_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("mine")
    done = _run(tmp_path, "init", "--study", "demo")
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (tmp_path / "experiment.toml").read_text() == "mine"
    assert _run(tmp_path, "init", "--study", "demo", "--force").returncode == 0
    assert "[matrix]" in (tmp_path / "experiment.toml").read_text()


def test_init_names_the_plan_of_where_it_is_typed_as_the_next_step(tmp_path: Path) -> None:
    """On this machine ``plan --local``; beside a cluster file that would lead to training on a login node."""
    wrote = "wrote experiment.toml (study demo); next: orchestrate plan"
    assert _run(tmp_path, "init").stderr == f"{wrote} --local\n"
    assert _run(tmp_path, "init", "--force", ORCHESTRATE_CLUSTER="sol").stderr == f"{wrote}\n"
    (tmp_path / "cluster.toml").write_text("")
    assert _run(tmp_path, "init", "--force").stderr == f"{wrote}\n"


def test_init_names_the_file_that_plan_would_not_read_by_itself(tmp_path: Path) -> None:
    done = _run(tmp_path, "init", "-e", "my demo.toml")
    assert done.stderr == "wrote my demo.toml (study demo); next: orchestrate plan -e 'my demo.toml' --local\n"
    done = _run(tmp_path, "init", ORCHESTRATE_EXPERIMENT="demo.toml")
    assert done.stderr == "wrote demo.toml (study demo); next: orchestrate plan --local\n"


@pytest.mark.parametrize(
    "verb", [verb for verb, command in COMMANDS.items() if {"local", "cluster"} <= _options(command)]
)
@pytest.mark.parametrize("argv", ["--local --cluster sol", "-c sol --local"])
def test_local_and_a_cluster_contradict_each_other(tmp_path: Path, verb: str, argv: str) -> None:
    done = _run(tmp_path, verb, *argv.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"orchestrate {verb}: --local and --cluster cannot be combined\n"
        "  why: runs go to this machine or to a cluster\n"
        "  fix: remove one of them\n"
    )


def test_local_is_the_exception_to_a_cluster_that_the_environment_names(tmp_path: Path) -> None:
    _run(tmp_path, "init")
    assert _run(tmp_path, "plan", "--local", ORCHESTRATE_CLUSTER="sol").returncode == 0


def test_plan_says_why_it_has_no_scripts_to_print(tmp_path: Path) -> None:
    """Nothing on standard output, which may be a file of scripts; runs on this machine have none, or none is sent."""
    _run(tmp_path, "init")
    done = _run(tmp_path, "plan", "--local", "--scripts")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("no job scripts: runs on this machine have none; 8 cells for local: ")
    done = _run(tmp_path, "plan", "--cluster", "sol", "--set", "hardware=a100:64", "--scripts")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("no job scripts: nothing is to be submitted; ")


def test_an_unknown_study_gets_the_nearest_name(tmp_path: Path) -> None:
    done = _run(tmp_path, "init", "--study", "dmeo")
    assert done.returncode == 2
    assert "demo" in done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"), [("plam", "plan"), ("stat", "status"), ("data chek", "check"), ("db inof", "info")]
)
def test_an_unknown_verb_is_bad_input_and_gets_the_nearest_name(tmp_path: Path, typed: str, meant: str) -> None:
    done = _run(tmp_path, *typed.split())
    assert done.returncode == 2
    assert f"No such command '{typed.split()[-1]}'. Did you mean '{meant}'?" in done.stderr


def test_an_unknown_verb_that_is_near_to_none_is_bad_input(tmp_path: Path) -> None:
    done = _run(tmp_path, "xyzzy")
    assert done.returncode == 2 and "No such command 'xyzzy'.\n" in done.stderr


def test_the_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", _run(tmp_path, "--version").stdout)


def test_shell_completion_completes_verbs(tmp_path: Path) -> None:
    """The script that bash sources asks the program itself; ``orchestrate pl<TAB>`` gives ``plan``."""
    assert "plan" in _completed(tmp_path, "orchestrate pl")


def _completed(folder: Path, typed: str) -> list[str]:
    """What bash is offered for the last word, of which it has all up to a ``=`` as words of their own."""
    words = re.sub(r"=(?=\S)", "= ", typed.replace("=", " =")).split(" ")
    number = str(len(words) - 1)
    done = _run(folder, _ORCHESTRATE_COMPLETE="complete_bash", COMP_WORDS="\n".join(words), COMP_CWORD=number)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_shell_completion_completes_studies_and_profiles(tmp_path: Path) -> None:
    assert _completed(tmp_path, "orchestrate init --study de") == ["demo"]
    assert _completed(tmp_path, "orchestrate init --cluster --profile so") == ["sol"]


def test_shell_completion_says_nothing_of_options_that_contradict_each_other(tmp_path: Path) -> None:
    """It offers what may follow; the command will say it."""
    assert _completed(tmp_path, "orchestrate results --json --format csv --sel") == ["--select"]
    assert _completed(tmp_path, "orchestrate plan --local --cluster sol --exp") == ["--experiment"]


def test_shell_completion_completes_what_options_take(tmp_path: Path) -> None:
    """Keys and columns, also the last of several; clusters that are shipped, and files."""
    (tmp_path / "solar.toml").touch()
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "sol.toml").touch()
    assert _completed(tmp_path, "orchestrate plan --set batch") == ["batch_size=", "batch_norm="]
    assert _completed(tmp_path, "orchestrate plan --set batch_s") == ["batch_size=", "batch_size=128"]
    assert _completed(tmp_path, "orchestrate plan --set time") == ["time_limit="]
    assert _completed(tmp_path, "orchestrate plan --set mod")[:2] == ["model=char_transformer", "model=cnn"]
    assert _completed(tmp_path, "orchestrate plan --set model=res") == ["resnet18", "resnet50"]
    assert _completed(tmp_path, "orchestrate plan --set optimizer=") == ["sgd"]
    assert _completed(tmp_path, "orchestrate plan --set model=cnn --set seed") == ["seed=", "seed=0"]
    assert _completed(tmp_path, "orchestrate plan --set=model=cn") == ["cnn"]
    assert _completed(tmp_path, "orchestrate plan --cluster=solar") == ["solar.toml"]
    assert _completed(tmp_path, "orchestrate plan --cluster sol") == ["sol", "solar.toml"]
    assert _completed(tmp_path, "orchestrate plan --cluster sit") == ["sites/sol.toml"]
    assert _completed(tmp_path, "orchestrate plan --cluster sites/") == ["sites/sol.toml"]
    assert _completed(tmp_path, f"orchestrate plan --cluster {'a/' * 5000}") == []
    assert _completed(tmp_path, "orchestrate results --where test_acc") == ["test_accuracy"]
    assert _completed(tmp_path, "orchestrate results --select label,test_acc") == ["label,test_accuracy"]
    assert _completed(tmp_path, "orchestrate results --group-by mod") == ["model"]
    assert _completed(tmp_path, "orchestrate results --sort test_acc") == ["test_accuracy"]


@pytest.mark.parametrize(
    ("pieces", "words", "before"),
    [
        (["x", "logs", "cnn-s0-batch_size", "=", "8-lr", "=", "0."], ["x", "logs", "0."], "cnn-s0-batch_size=8-lr="),
        (["x", "plan", "--set", "lr", "=", "1", "--set", "se"], ["x", "plan", "--set", "lr=1", "--set", "se"], ""),
        (["x", "plan", "--set", "model", "="], ["x", "plan", "--set", ""], "model="),
        (["x", "plan", "--set", "=", "model", "=", "c"], ["x", "plan", "--set", "c"], "model="),
        (["x", "plan", "--set", "lr", "=", ""], ["x", "plan", "--set", ""], "lr="),
        (["x", "plan", "--set", "lr", "=", "1", ""], ["x", "plan", "--set", "lr=1", ""], ""),
    ],
)
def test_what_bash_took_apart_is_joined(pieces: list[str], words: list[str], before: str) -> None:
    environ = {"COMP_WORDS": "\n".join(pieces), "COMP_CWORD": str(len(pieces) - 1)}
    completion.join_words(environ)
    assert environ["COMP_WORDS"].split("\n") == words
    assert (environ["COMP_CWORD"], environ["_ORCHESTRATE_BEFORE"]) == (str(len(words) - 1), before)


@pytest.mark.parametrize("damaged", [False, True])
def test_shell_completion_of_runs_is_silent_where_there_are_none(tmp_path: Path, damaged: bool) -> None:
    """No database, or one that cannot be read: nothing is offered, nothing is printed, nothing is made."""
    if damaged:
        (tmp_path / "results.db").write_text("no database")
    before = sorted(tmp_path.iterdir())
    assert _completed(tmp_path, "orchestrate logs c") == []
    assert sorted(tmp_path.iterdir()) == before


def test_names_of_any_script_print_under_the_c_locale(tmp_path: Path) -> None:
    """An experiment named in two scripts, planned and printed where the locale knows ASCII only."""
    (tmp_path / "experiment.toml").write_text(
        'name = "résumé-实验 $HOME; it\'s"\n'
        '[matrix]\nmodel="cnn"\ndataset="digits"\nstrategy="eager"\nhardware="cpu:1"\n',
        encoding="utf-8",
    )
    done = _run(tmp_path, "plan", "--local", "--json", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert "résumé-实验 $HOME; it's" in done.stdout


def test_a_user_s_own_db_module_does_not_shadow_ours(tmp_path: Path) -> None:
    """The installed script puts no working directory on the path; jobs run with PYTHONSAFEPATH=1."""
    (tmp_path / "db.py").write_text("raise RuntimeError('the wrong db')")
    (tmp_path / "workloads.py").write_text("raise RuntimeError('the wrong workloads')")
    (tmp_path / "runs").mkdir()
    script = Path(sys.executable).parent / "orchestrate"
    for argv in (["init"], ["plan", "--local"], ["collect"], ["results"]):
        done = subprocess.run([script, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["--runs", "--db", "--data"])
@pytest.mark.parametrize(("given", "why"), [("~nosuchuser/x", "home"), ("loop/x", "loop")])
def test_a_place_that_cannot_be_found_is_bad_input(tmp_path: Path, option: str, given: str, why: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = _run(tmp_path, "plan", "--local", option, given)
    assert done.returncode == 2
    assert f"{given}: the " in done.stderr and "cannot be found by this name" in done.stderr
    assert why in done.stderr and "Traceback" not in done.stderr


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    code = "import os, sys; from orchestrator.cli import run; os.rmdir(os.getcwd()); sys.exit(run(['plan', '--local']))"
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "gone", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "the working directory is gone\n  fix: cd to a folder that exists\n",
    )


@pytest.mark.parametrize("argv", ["results --format csv", "results", "results --json", "plan --local", "init --help"])
def test_output_that_cannot_be_written_fails_with_a_message(tmp_path: Path, argv: str) -> None:
    """Also what would only be written as the interpreter ends, where Python ignores the error."""
    _run(tmp_path, "init")
    (tmp_path / "runs").mkdir()
    _run(tmp_path, "collect")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *argv.split()],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "No space left on device\n  fix: free some space and try again\n")


@pytest.mark.parametrize("argv", ["results", "results --json", "plan --local", "nosuch"])
def test_closed_standard_streams_change_nothing(tmp_path: Path, argv: str) -> None:
    """As under ``>&-``, or a cron that closes them: no traceback, and no file of ours becomes standard output."""
    _run(tmp_path, "init")
    (tmp_path / "runs").mkdir()
    _run(tmp_path, "collect")
    with open(tmp_path / "code", "w") as code:
        shell = f"{shlex.quote(sys.executable)} -m orchestrator {argv} <&- >&- 2>&-; echo $? >&9"
        subprocess.run(["bash", "-c", f"exec 9>&{code.fileno()}; {shell}"], cwd=tmp_path, pass_fds=[code.fileno()])
    assert (tmp_path / "code").read_text() == ("2\n" if argv == "nosuch" else "0\n")


def test_a_reader_that_left_early_is_no_error_of_ours(tmp_path: Path) -> None:
    """``orchestrate plan --scripts | head``: silence."""
    (tmp_path / "experiment.toml").write_text(
        f'[matrix]\nmodel="cnn"\ndataset="digits"\nstrategy="eager"\nhardware="cpu:1"\nseed={list(range(3000))}\n'
    )
    shell = f"{shlex.quote(sys.executable)} -m orchestrator plan --local --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


@pytest.mark.parametrize("argv", ["plan --local", "plan --local --json", "init --help", "--version"])
def test_a_reader_that_left_before_anything_was_written_is_no_error_of_ours(tmp_path: Path, argv: str) -> None:
    """What fits a buffer is written last, and again by Python as it ends: silence then too."""
    _run(tmp_path, "init")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "orchestrator", *argv.split()]
    done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_left_early_does_not_hide_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a verb that came to its end stands, whether somebody read the last of it or not."""

    def leaves() -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(cli, "_run_verb", lambda argv: 3)
    for name in ("_prepare_streams", "_discard_stdout"):
        monkeypatch.setattr(cli, name, lambda: None)
    monkeypatch.setattr(sys.stdout, "flush", leaves)
    assert cli.run(["status"]) == 3


def test_a_disk_that_may_not_be_written_gets_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(argv: list[str]) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/ro/runs")

    monkeypatch.setattr(cli, "_run_verb", refuses)
    assert cli.run(["submit"]) == 1
    assert capsys.readouterr().err.startswith("/ro/runs: Read-only file system\n  fix: work on a writable disk")


def test_the_run_that_the_help_of_logs_names_is_one_of_the_demo_study(tmp_path: Path) -> None:
    """Who follows the README and then types the example sees a log."""
    _run(tmp_path, "init")
    labels = [run["label"] for run in json.loads(_run(tmp_path, "plan", "--local", "--json").stdout)["runs"]]
    assert labels.count(shlex.split(COMMANDS["logs"].help.splitlines()[-1])[3]) == 1


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ("init --cluster --study demo", "--cluster and --study"),
        ("init --cluster -e x.toml", "--cluster and --experiment"),
        ("init --list -s demo", "--list and --study"),
        ("logs x --all --rank 0", "--all and --rank"),
        ("logs x --stdout --stderr", "--stdout and --stderr"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(tmp_path: Path, argv: str, options: str) -> None:
    done = _run(tmp_path, *argv.split())
    assert done.returncode == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith(f"orchestrate {argv.split()[0]}: {options} cannot be combined\n  why: ")
    assert done.stderr.endswith("  fix: remove one of them\n")


def test_json_is_said_to_be_a_format_where_there_are_formats() -> None:
    for name, command in COMMANDS.items():
        help_of = {parameter.name: getattr(parameter, "help", "") for parameter in command.params}
        if "json" in help_of:
            assert help_of["json"] == ("Same as --format json." if "format" in help_of else "Print JSON."), name
