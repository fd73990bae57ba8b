"""Configures and compiles what the check needs, and nothing else."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_check.machine import find_python_nccl, find_tool
from gpu_check.pack import cmake_options, installed_packages
from gpu_check.runner import run_logged, tail

_CONFIGURE_S = 60


class BuildError(Exception):
    """Nothing could be built."""


@dataclass(frozen=True)
class BuildResult:
    """Targets that were built, and how long it took."""

    seconds: float
    built: tuple[str, ...]
    failed: tuple[str, ...]
    source: str  # of the libraries: "packages" or "pack"


def configure(root: Path, build: Path, pack: Path, architecture: str) -> str:
    """Returns where libraries come from. Raises BuildError with what CMake said."""
    cmake = find_tool("cmake")
    if cmake is None:
        raise BuildError("cmake is neither on PATH nor beside python3")
    source, libraries = _libraries(pack)
    ninja = find_tool("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else ["-G", "Unix Makefiles"]
    build.mkdir(parents=True, exist_ok=True)
    command = [cmake, "-S", str(root), "-B", str(build), *generator, *libraries]
    command += ["-DCMAKE_BUILD_TYPE=Release", "-DHEAVYWATER_SERVERS=OFF", "-DHEAVYWATER_CUDA=ON"]
    command += ["-DHEAVYWATER_WERROR=OFF"]
    command += [f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"]
    nccl = find_python_nccl()
    command += [f"-DNCCL_ROOT={nccl}"] if nccl else []
    log = build / "configure.log"
    if run_logged(command, log, _CONFIGURE_S).code != 0:
        raise BuildError(f"{_configure_error(log)}:\n{tail(log)}")
    return source


def _configure_error(log: Path) -> str:
    """What a person can do about it comes first."""
    said = log.read_text(errors="replace")
    if "Could NOT find CUDAToolkit" in said or "toolkit found has no nvcc" in said:
        return "no CUDA toolkit was found (put nvcc on PATH or set CUDA_HOME); cmake could not configure"
    return "cmake could not configure"


def compile_targets(build: Path, targets: Sequence[str], source: str, timeout_s: float) -> BuildResult:
    """Builds what can be built: one target that fails does not keep the others from it."""
    cmake = find_tool("cmake")
    assert cmake is not None
    keep_going = ["--", "-k", "0"] if (build / "build.ninja").exists() else ["--", "-k"]
    known = _known_targets(cmake, build)
    possible = [target for target in targets if target in known]
    command = [cmake, "--build", str(build), "-j", str(os.cpu_count() or 1), "--target", *possible, *keep_going]
    ended = run_logged(command, build / "build.log", timeout_s)
    # A program of an earlier build may be there still: ask for each what has become of it.
    deadline_s = time.monotonic() + max(timeout_s - ended.seconds, 10.0)
    built = tuple(target for target in possible if ended.code == 0 or _is_current(cmake, build, target, deadline_s))
    seconds = ended.seconds
    failed = tuple(target for target in targets if target not in built)
    return BuildResult(seconds, built, failed, source)


def _known_targets(cmake: str, build: Path) -> set[str]:
    """Those that this machine's libraries allow. An unknown one would keep all others from being built."""
    log = build / "targets.log"
    run_logged([cmake, "--build", str(build), "--target", "help"], log, _CONFIGURE_S)
    return set(re.findall(r"^(?:\.\.\. )?([\w-]+)(?:: phony|$)", log.read_text(errors="replace"), re.MULTILINE))


def _is_current(cmake: str, build: Path, target: str, deadline_s: float) -> bool:
    log = build / f"build-{target}.log"
    return run_logged([cmake, "--build", str(build), "--target", target], log, deadline_s - time.monotonic()).code == 0


def find_program(build: Path, target: str) -> Path | None:
    """The executable of a target."""
    found = [file for file in build.rglob(target) if file.is_file() and os.access(file, os.X_OK)]
    return found[0] if found else None


def _libraries(pack: Path) -> tuple[str, list[str]]:
    if installed_packages():
        return "packages", []
    if (pack / "pack.json").exists():
        return "pack", cmake_options(pack)
    raise BuildError(f"the packages are not installed and {pack} does not exist: make it with --pack elsewhere")
