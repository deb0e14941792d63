"""Wheels are built from known sources only, once, beside the target and not in it, and a failure says what to do.

The package built here is a few lines of Python; Horovod itself is built where the strategies are tested.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import cli
from orchestrator.environment import horovod_recipe, wheel_build, wheel_cache
from orchestrator.environment.horovod_recipe import HOROVOD
from orchestrator.environment.wheels import BuildNeeds, Edit, Flavour, Recipe, TargetPython, WheelSpec
from orchestrator.errors import CommandError, InputError, OperationError

SETUP = """
import os, setuptools, sys, time
if "bdist_wheel" in sys.argv:
    with open(os.environ["BUILDS"], "a") as builds:
        builds.write("%d\\n" % os.getpid())
    print("[ 50%] compiling", flush=True)
    if os.environ.get("ACT") == "fail":
        print("knob.cc:7:1: error: this knob is broken")
        print("g++: fatal error: Killed signal terminated program cc1plus")
        print("\\n".join("note %d" % n for n in range(40)))
        sys.exit(3)
    if os.environ.get("ACT") == "hang":
        time.sleep(60)
local = os.environ.get("FAKEPKG_LOCAL")
setuptools.setup(name="fakepkg", version="1.0" + ("+" + local if local else ""), py_modules=["fakepkg"])
"""
EDIT = Edit("fakepkg.py", "KNOB = 14", "KNOB = 20", "the knob must be 20")
TRIAL = "import fakepkg, torch.version; assert fakepkg.KNOB == 20, fakepkg.KNOB"


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    path = tmp_path / "files" / "fakepkg-1.0.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"setup.py": SETUP, "fakepkg.py": "KNOB = 14\n"}.items():
            member = tarfile.TarInfo(f"fakepkg-1.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def recipe(sdist: Path) -> Recipe:
    return Recipe(
        name="fakepkg",
        version="1.0",
        sdist_sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        edits=(EDIT,),
        settings={Flavour.CPU: {"FAKEPKG_GPU": "0"}, Flavour.NCCL: {"FAKEPKG_GPU": "1"}},
        version_variable="FAKEPKG_LOCAL",
        prepare=lambda target, *_: BuildNeeds({}, [] if "setuptools" in target.packages else ["setuptools"]),
        smoke_test=lambda _: TRIAL,
    )


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TargetPython:
    """This interpreter, with a stand-in for torch; everything temporary below ``tmp_path / "scratch"``."""
    version = tmp_path / "site" / "torch" / "version.py"
    version.parent.mkdir(parents=True)
    (version.parent / "__init__.py").touch()
    version.write_text("__version__ = '9.1.0+cu130'\ncuda = '13.0'\n")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return TargetPython.query(Path(sys.executable))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def get_wheel(tmp_path: Path, said: list[str]) -> Callable[..., wheel_cache.Wheel]:
    def call(wheel_spec: WheelSpec, sdist: Path | None, wait_s: float = 60) -> wheel_cache.Wheel:
        return wheel_cache.get_wheel(wheel_spec, tmp_path / "cache", sdist=sdist, report=said.append, wait_s=wait_s)

    return call


def _builds(tmp_path: Path) -> list[int]:
    file = tmp_path / "builds"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def _leftovers(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "scratch").iterdir())


def test_two_calls_at_once_build_once_and_the_next_call_only_looks(
    tmp_path: Path, recipe: Recipe, sdist: Path, target: TargetPython, get_wheel: Callable[..., wheel_cache.Wheel]
) -> None:
    """The wheel is of the edited sources, is named after its torch, was not installed into the target, and is whole."""
    wheel_spec = WheelSpec.of(recipe, target, Flavour.CPU)
    with ThreadPoolExecutor() as pool:
        made = [call.result() for call in [pool.submit(get_wheel, wheel_spec, sdist) for _ in range(2)]]
    assert sorted(m.built for m in made) == [False, True]
    assert len(_builds(tmp_path)) == 1
    wheel = made[0].path
    assert made[1].path == wheel
    assert wheel.name.startswith(f"fakepkg-1.0+torch9.1.0.cu130.cpu.{recipe.digest(wheel_spec.settings)}-")
    assert "KNOB = 20" in zipfile.ZipFile(wheel).read("fakepkg.py").decode()
    assert "fakepkg" not in TargetPython.query(Path(sys.executable)).packages
    assert not _leftovers(tmp_path)
    assert get_wheel(wheel_spec, None) == wheel_cache.Wheel(wheel, built=False)
    assert len(_builds(tmp_path)) == 1


def test_sources_are_fetched_once_and_a_damaged_wheel_is_built_again(
    tmp_path: Path,
    recipe: Recipe,
    sdist: Path,
    target: TargetPython,
    get_wheel: Callable[..., wheel_cache.Wheel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pip fetches by name and digest; afterwards the sources serve without it."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(sdist.parent))
    wheel_spec = WheelSpec.of(recipe, target, None)
    assert wheel_spec.flavour is Flavour.NCCL, "this torch has CUDA"
    wheel = get_wheel(wheel_spec, None).path
    sdist.unlink()
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    again = get_wheel(wheel_spec, None)
    assert again.built
    assert zipfile.is_zipfile(again.path)


def test_a_failed_build_shows_the_first_error_and_keeps_its_log(
    tmp_path: Path,
    recipe: Recipe,
    sdist: Path,
    target: TargetPython,
    get_wheel: Callable[..., wheel_cache.Wheel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler's line is shown although forty others came after it; nothing is cached or left behind."""
    monkeypatch.setenv("ACT", "fail")
    wheel_spec = WheelSpec.of(recipe, target, Flavour.CPU)
    with pytest.raises(OperationError) as caught:
        get_wheel(wheel_spec, sdist)
    assert "building fakepkg 1.0 (cpu) for torch 9.1.0+cu130" in str(caught.value)
    assert "knob.cc:7:1: error: this knob is broken" in str(caught.value)
    assert "MAKEFLAGS=-j1" in caught.value.hint
    assert "note 17" in Path(caught.value.where).read_text()
    assert "note 17" not in str(caught.value)
    assert wheel_cache.cached(wheel_spec, tmp_path / "cache") is None
    assert not _leftovers(tmp_path)


def test_a_wheel_that_does_not_work_is_not_kept(
    tmp_path: Path, recipe: Recipe, sdist: Path, target: TargetPython, get_wheel: Callable[..., wheel_cache.Wheel]
) -> None:
    wheel_spec = WheelSpec.of(replace(recipe, edits=()), target, Flavour.CPU)
    with pytest.raises(OperationError, match=r"testing the wheel.*(?s:.*)AssertionError: 14"):
        get_wheel(wheel_spec, sdist)
    assert wheel_cache.cached(wheel_spec, tmp_path / "cache") is None


def test_an_interrupted_build_ends_its_compiler(
    tmp_path: Path, recipe: Recipe, sdist: Path, target: TargetPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(text: str) -> None:
        if "%" in text:
            raise KeyboardInterrupt

    monkeypatch.setenv("ACT", "hang")
    monkeypatch.setattr(wheel_build, "_PROGRESS_EVERY_S", 0)
    with pytest.raises(KeyboardInterrupt):
        wheel_cache.get_wheel(
            WheelSpec.of(recipe, target, Flavour.CPU), tmp_path / "cache", sdist=sdist, report=interrupt, wait_s=1
        )
    (compiler,) = _builds(tmp_path)
    deadline = time.monotonic() + 10
    while _alive(compiler) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(compiler)
    assert not _leftovers(tmp_path)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("text", ["KNOB = 15\n", "KNOB = 14\nKNOB = 14\n", None], ids=["gone", "twice", "no file"])
def test_changed_sources_are_refused_and_left_alone(tmp_path: Path, text: str | None) -> None:
    """An edit applies where its place is there exactly once."""
    if text is not None:
        (tmp_path / "fakepkg.py").write_text(text)
    count = text.count("KNOB = 14") if text else 0
    with pytest.raises(OperationError, match=f"'KNOB = 14' is there {count} times, not once") as caught:
        wheel_build.apply_edits([EDIT], tmp_path)
    assert "fakepkg.py" in str(caught.value)
    assert "the knob must be 20" in str(caught.value)
    assert text is None or (tmp_path / "fakepkg.py").read_text() == text


def test_another_archive_is_refused_before_anything_is_done(
    tmp_path: Path, recipe: Recipe, sdist: Path, target: TargetPython, get_wheel: Callable[..., wheel_cache.Wheel]
) -> None:
    sdist.write_bytes(sdist.read_bytes() + b"x")
    with pytest.raises(InputError) as caught:
        get_wheel(WheelSpec.of(recipe, target, Flavour.CPU), sdist)
    assert recipe.sdist_sha256 in str(caught.value)
    assert hashlib.sha256(sdist.read_bytes()).hexdigest() in str(caught.value)
    assert "pip download --no-deps --no-binary :all: fakepkg==1.0" in str(caught.value)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(InputError, match="No such file"):
        get_wheel(WheelSpec.of(recipe, target, Flavour.CPU), tmp_path / "nothing.tar.gz")


def test_the_wait_for_another_build_is_bounded_and_names_it(
    tmp_path: Path,
    recipe: Recipe,
    sdist: Path,
    target: TargetPython,
    get_wheel: Callable[..., wheel_cache.Wheel],
    said: list[str],
) -> None:
    wheel_spec = WheelSpec.of(recipe, target, Flavour.CPU)
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / f"{wheel_spec.key}.lock").open("w") as lock:
        lock.write("process 77 on node1\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OperationError, match="process 77 on node1 has been building the same wheel"):
            get_wheel(wheel_spec, sdist, wait_s=0.3)
    assert said == ["waiting for process 77 on node1, which is building the same wheel"]
    assert not _builds(tmp_path)


def test_a_cache_that_cannot_be_written_is_a_message(recipe: Recipe, sdist: Path, target: TargetPython) -> None:
    with pytest.raises(OperationError, match="ORCHESTRATE_CACHE names another cache"):
        wheel_cache.get_wheel(WheelSpec.of(recipe, target, Flavour.CPU), sdist / "cache", sdist=sdist, report=print)


def test_the_key_holds_all_that_decides_what_a_wheel_is(recipe: Recipe, target: TargetPython) -> None:
    """Another torch, CUDA, Python, machine, flavour, edit, setting or source is another wheel; another place is not."""
    wheel_spec = WheelSpec.of(recipe, target, Flavour.NCCL)
    assert wheel_spec.key.startswith(f"fakepkg-1.0-torch9.1.0+cu130-nccl-cuda13.0-{target.tag}-{target.machine}-")
    assert WheelSpec.of(recipe, replace(target, python="/elsewhere", paths=()), Flavour.NCCL).key == wheel_spec.key
    changed = [
        WheelSpec.of(recipe, target, Flavour.CPU),
        *(
            WheelSpec.of(recipe, other, Flavour.NCCL)
            for other in (
                replace(target, torch="9.1.1"),
                replace(target, cuda="13.1"),
                replace(target, tag="cp399"),
                replace(target, machine="other"),
            )
        ),
        WheelSpec.of(replace(recipe, version="2"), target, Flavour.NCCL),
        WheelSpec.of(replace(recipe, sdist_sha256="0"), target, Flavour.NCCL),
        WheelSpec.of(replace(recipe, edits=(replace(EDIT, new="KNOB = 21"),)), target, Flavour.NCCL),
        WheelSpec.of(replace(recipe, settings={Flavour.NCCL: {}}), target, Flavour.NCCL),
    ]
    assert len({wheel_spec.key, *(o.key for o in changed)}) == len(changed) + 1


def test_the_flavour_is_what_torch_can_use(recipe: Recipe, target: TargetPython) -> None:
    assert WheelSpec.of(recipe, target, None).flavour is Flavour.NCCL
    assert WheelSpec.of(recipe, replace(target, cuda=""), None).flavour is Flavour.CPU
    with pytest.raises(InputError, match=r"torch 9.1.0\+cu130 .* was built without CUDA"):
        WheelSpec.of(recipe, replace(target, cuda=""), Flavour.NCCL)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert wheel_cache.cache_folder(None) == tmp_path / ".cache" / "orchestrate" / "wheels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/cache")
    assert wheel_cache.cache_folder(None) == Path("/big/cache/orchestrate/wheels")
    assert wheel_cache.cache_folder(Path("~/mine")) == tmp_path / "mine" / "wheels"


def test_a_python_without_torch_or_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch is bad input; no pip (as uv makes environments) means ours serves, and installs there."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    python = tmp_path / "v" / "bin" / "python"
    with pytest.raises(InputError, match="has no torch") as caught:
        TargetPython.query(python)
    assert caught.value.where == str(python)
    with pytest.raises(InputError, match="no such program"):
        TargetPython.query(tmp_path / "nothing")
    with pytest.raises(InputError, match="could not be queried"):
        TargetPython.query(Path("/bin/false"))
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "version.py").write_text("__version__ = '9.1.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    bare = TargetPython.query(python)
    assert bare.cuda == ""
    assert wheel_build.pip(str(python), bare) == [sys.executable, "-m", "pip", "--python", str(python)]
    wheel = tmp_path / "fakepkg-1.0+x-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("fakepkg.py", "")
        content.writestr("fakepkg-1.0+x.dist-info/METADATA", "Metadata-Version: 2.1\nName: fakepkg\nVersion: 1.0+x\n")
        content.writestr("fakepkg-1.0+x.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        content.writestr("fakepkg-1.0+x.dist-info/RECORD", "")
    wheel_cache.install(wheel, bare)
    assert TargetPython.query(python).packages["fakepkg"] == "1.0+x"
    wheel.write_bytes(b"")
    with pytest.raises(CommandError, match="the wheel is kept"):
        wheel_cache.install(wheel, bare)


def test_the_verb_prints_the_wheel_and_nothing_else(
    tmp_path: Path, target: TargetPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Horovod's own recipe and a wheel in the cache: standard output is its path alone, ready for ``$(...)``."""
    monkeypatch.setenv("ORCHESTRATE_CACHE", str(tmp_path))
    for option, flavour in (("--cpu", Flavour.CPU), ("--nccl", Flavour.NCCL)):
        wheel = tmp_path / "wheels" / WheelSpec.of(HOROVOD, target, flavour).key / "horovod.whl"
        wheel.parent.mkdir(parents=True)
        zipfile.ZipFile(wheel, "w").close()
        done = CliRunner().invoke(cli.app, ["wheel", "horovod", option])
        assert done.stdout == f"{wheel}\n"
    assert CliRunner().invoke(cli.app, ["wheel", "horovod"]).stdout == f"{wheel}\n"
    told = CliRunner().invoke(cli.app, ["wheel", "horovod", "--json"]).stdout
    assert '"built": false' in told
    assert '"torch": "9.1.0+cu130"' in told


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """An environment whose PATH has these programs, each a shell script, and nothing else."""

    def make(**programs: str) -> dict[str, str]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name, script in programs.items():
            program = tmp_path / "bin" / name
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        return {"PATH": str(tmp_path / "bin")}

    return make


@pytest.fixture
def ready(tmp_path: Path, target: TargetPython) -> TargetPython:
    """A target that lacks nothing for a build."""
    (tmp_path / "Python.h").touch()
    names = ("setuptools", "cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "pip")
    return replace(target, include=str(tmp_path), packages=dict.fromkeys(names, "80"))


def test_horovod_names_what_is_missing(
    tmp_path: Path, ready: TargetPython, tools: Callable[..., dict[str, str]]
) -> None:
    """Each tool that a build needs is looked for before anything is fetched, and its absence says what to do."""
    with pytest.raises(OperationError, match=r"compiler .* and make are needed"):
        HOROVOD.prepare(ready, tools(), Flavour.CPU, tmp_path)
    with pytest.raises(OperationError, match=r"does not support C\+\+20(?s:.*)unrecognized(?s:.*)module load gcc"):
        HOROVOD.prepare(ready, tools(make="", **{"c++": "echo unrecognized option >&2; exit 1"}), Flavour.CPU, tmp_path)
    environment = tools(**{"c++": ""})
    with pytest.raises(OperationError, match=r"Python.h"):
        HOROVOD.prepare(replace(ready, include="/nowhere"), environment, Flavour.CPU, tmp_path)
    assert HOROVOD.prepare(ready, environment, Flavour.CPU, tmp_path).packages == ["cmake"]
    tools(cmake="echo cmake version 3.10.2")
    assert HOROVOD.prepare(ready, environment, Flavour.CPU, tmp_path).packages == ["cmake"]
    tools(cmake="echo cmake version 3.25.1")
    assert HOROVOD.prepare(ready, environment, Flavour.CPU, tmp_path).packages == []
    old = replace(ready, packages={**ready.packages, "setuptools": "65.5.0"})
    assert HOROVOD.prepare(old, environment, Flavour.CPU, tmp_path).packages == ["wheel"]
    none = replace(ready, packages={})
    assert "cffi" in HOROVOD.prepare(none, environment, Flavour.CPU, tmp_path).packages


def test_horovod_with_nccl_uses_the_cuda_and_nccl_of_torch(
    tmp_path: Path, ready: TargetPython, tools: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc of another major release is refused; torch's own NCCL gets the plain name that the linker wants, outside
    the target."""
    environment = tools(make="", cmake="echo cmake version 4.1", **{"c++": ""})
    monkeypatch.setattr(horovod_recipe, "_USUAL_CUDA", "/nowhere")
    with pytest.raises(OperationError, match=r"nvcc is needed to build for CUDA 13.0(?s:.*)--cpu"):
        HOROVOD.prepare(ready, environment, Flavour.NCCL, tmp_path)
    cuda = tmp_path / "cuda"
    (cuda / "bin").mkdir(parents=True)
    nvcc = cuda / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.4, V12.4.1\n")
    nvcc.chmod(0o755)
    environment["CUDA_HOME"] = str(cuda)
    with pytest.raises(OperationError, match=r"not of CUDA 13.0(?s:.*)release 12(?s:.*)module load cuda/13.0"):
        HOROVOD.prepare(ready, environment, Flavour.NCCL, tmp_path)
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.1, V13.1.2\n")
    library = tmp_path / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    (library.parents[1] / "include").mkdir()
    (library.parents[1] / "include" / "nccl.h").touch()
    needs = HOROVOD.prepare(ready, environment, Flavour.NCCL, tmp_path)
    assert needs.environment["PATH"].split(os.pathsep)[0] == str(cuda / "bin")
    assert needs.environment["CUDA_HOME"] == str(cuda)
    assert needs.environment["HOROVOD_NCCL_INCLUDE"] == str(library.parents[1] / "include")
    assert (Path(needs.environment["HOROVOD_NCCL_LIB"]) / "libnccl.so").resolve() == library
    assert [p.name for p in library.parent.iterdir()] == ["libnccl.so.2"]
    assert "PATH" not in HOROVOD.prepare(ready, environment, Flavour.CPU, tmp_path).environment
    # A site's wrapper lies apart from the toolkit; it is asked where that is.
    real = tmp_path / "real"
    (real / "bin").mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho release 13.1\necho '#$ TOP={real}/bin/..' >&2\n")
    (tmp_path / "other").mkdir()
    needs = HOROVOD.prepare(ready, environment, Flavour.NCCL, tmp_path / "other")
    assert needs.environment["PATH"].split(os.pathsep)[0] == str(real / "bin")
    assert needs.environment["CUDA_HOME"] == str(real)
