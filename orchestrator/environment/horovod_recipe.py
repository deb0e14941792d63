"""How to build Horovod's last release (0.28.1, of 2023) against current torch; see docs/horovod.md.

Its own sources do not compile with torch 2.1 and newer, whose headers need C++17, and C++20 in current releases.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from orchestrator.environment.wheels import BuildNeeds, Edit, Flavour, Recipe, TargetPython
from orchestrator.errors import OperationError

_RUNTIME = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml")
_DRY_RUN = ("--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)
_USUAL_CUDA = "/usr/local/cuda"
_OLDEST_CMAKE = (3, 17)
_MOST_JOBS = 8
"""A compiler needs about 1.5 GB for torch's headers, and login nodes are shared."""

_EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../torch/lib;$ORIGIN/../../nvidia/nccl/lib")',
        "torch's headers are C++20; and the library must find torch where it is installed, not where it was built",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch's headers are C++20",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "\nif (Pytorch_CUDA OR Pytorch_ROCM)",
        '\nif("$ENV{HOROVOD_WITHOUT_CUDA}" STREQUAL "1")\n    set(Pytorch_CUDA FALSE)\nendif()\n'
        "if (Pytorch_CUDA OR Pytorch_ROCM)",
        "a wheel for the CPU must not need CUDA even if this torch and this machine have it",
    ),
)

_COMMON = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
    # gloo requires a policy version that CMake 4.0 removed (its release notes: compatibility with CMake < 3.5).
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    # Standard headers of GCC 13 no longer include these (its porting guide). The user's own flags are not passed on:
    # they would change the wheel, but not its name in the cache.
    "CXXFLAGS": "-include string -include cstdint -include memory -include functional",
}

_SMOKE_TEST = """
import horovod.torch as hvd
assert hvd.gloo_built(), "built without gloo"
assert bool(hvd.nccl_built()) is {nccl}, "NCCL: %s" % hvd.nccl_built()
"""


def _prepare(target: TargetPython, environment: Mapping[str, str], flavour: Flavour, scratch: Path) -> BuildNeeds:
    _check_compiler(environment)
    if not (Path(target.include) / "Python.h").exists():
        raise OperationError(
            "Python's C headers are missing",
            where=str(Path(target.include) / "Python.h"),
            hint="install python3-dev (Debian) or python3-devel (Red Hat), or use an environment made by conda or uv",
        )
    added = {"MAKEFLAGS": environment.get("MAKEFLAGS") or f"-j{min(len(os.sched_getaffinity(0)), _MOST_JOBS)}"}
    if flavour is Flavour.NCCL:
        added |= _cuda(target, environment) | _nccl(target, scratch)
    wanted = ["setuptools", *_RUNTIME]
    # setuptools builds wheels without the package wheel since 70.1 (its changelog).
    if "setuptools" in target.packages and _numbers(target.packages["setuptools"]) < (70, 1):
        wanted.append("wheel")
    missing = [name for name in wanted if name not in target.packages]
    cmake = shutil.which("cmake", path=environment["PATH"])
    if cmake is None or _numbers(_output([cmake, "--version"], environment)) < _OLDEST_CMAKE:
        missing.append("cmake")
    return BuildNeeds(added, missing)


def _check_compiler(environment: Mapping[str, str]) -> None:
    named = shlex.split(environment.get("CXX", ""))
    names = [named[0]] if named else ["c++", "g++", "clang++"]
    compiler = next((found for n in names if (found := shutil.which(n, path=environment["PATH"]))), None)
    if compiler is None or shutil.which("make", path=environment["PATH"]) is None:
        what = f"a C++ compiler ({' or '.join(names)}) and make are needed"
        raise OperationError(what, where="PATH", hint="apt-get install g++ make, or module load gcc")
    probe = [compiler, *named[1:], "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(
        probe, input="#include <concepts>\n", capture_output=True, text=True, env=dict(environment), check=False
    )
    if done.returncode != 0:
        raise OperationError(
            "this compiler does not support C++20, which torch's headers need",
            where=compiler,
            why=done.stderr.strip(),
            hint="GCC 10 or newer is needed: module load gcc, or name one in CXX",
        )


def _cuda(target: TargetPython, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which CMake (PATH) and torch (CUDA_HOME) find nvcc."""
    named = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := environment.get(name))]
    path = os.pathsep.join([*(f"{home}/bin" for home in named), environment["PATH"], f"{_USUAL_CUDA}/bin"])
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        hint = f"module load cuda/{target.cuda}, or --cpu for a wheel without GPUs"
        raise OperationError(f"nvcc is needed to build for CUDA {target.cuda}", where="PATH, CUDA_HOME", hint=hint)
    found = re.search(r"release (\d+)", _output([nvcc, "--version"], environment))
    if not found or found[1] != target.cuda.partition(".")[0]:
        raise OperationError(
            f"this nvcc is not of CUDA {target.cuda}, which torch {target.torch} was built with",
            where=nvcc,
            why=f"it says {found[0] if found else 'no release'}",
            hint=f"module load cuda/{target.cuda}, or name its folder in CUDA_HOME",
        )
    # The nvcc on PATH may be a wrapper script outside the toolkit, and CMake looks for headers beside it.
    top = re.search(r"^#\$ TOP=(.+)$", _output([nvcc, *_DRY_RUN], environment), re.MULTILINE)
    toolkit = Path(top[1] if top else nvcc + "/../..").resolve()
    return {"PATH": f"{toolkit / 'bin'}{os.pathsep}{path}", "CUDA_HOME": str(toolkit)}


def _nccl(target: TargetPython, scratch: Path) -> dict[str, str]:
    """Return variables for the NCCL of torch's own wheels; elsewhere CMake searches, or HOROVOD_NCCL_HOME names it."""
    if named := {k: v for k, v in os.environ.items() if k.startswith("HOROVOD_NCCL_")}:
        return named
    for path in target.paths:
        folder = Path(path) / "nvidia" / "nccl"
        library = folder / "lib" / "libnccl.so.2"
        if library.exists() and (folder / "include" / "nccl.h").exists():
            # The linker looks for libnccl.so, which NVIDIA's wheel does not have.
            links = scratch / "nccl"
            links.mkdir()
            (links / "libnccl.so").symlink_to(library)
            return {"HOROVOD_NCCL_INCLUDE": str(folder / "include"), "HOROVOD_NCCL_LIB": str(links)}
    return {}


def _output(argv: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, env=dict(environment), check=False)
    return done.stdout + done.stderr


def _numbers(text: str) -> tuple[int, ...]:
    """Return the first version number in a text."""
    found = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


HOROVOD = Recipe(
    name="horovod",
    version="0.28.1",
    sdist_sha256="92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0",
    edits=_EDITS,
    settings={
        Flavour.CPU: {**_COMMON, "HOROVOD_WITHOUT_CUDA": "1"},
        Flavour.NCCL: {**_COMMON, "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"},
    },
    version_variable="HOROVOD_LOCAL_VERSION",
    prepare=_prepare,
    smoke_test=lambda flavour: _SMOKE_TEST.format(nccl=flavour is Flavour.NCCL),
)
