"""Checks of what is installed: Python packages, binaries, a model."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from heavywater.doctor.finding import Finding, fail, ok, warn
from heavywater.local import find_model
from heavywater.server_process import ServerError
from heavywater.version import __version__

BINARIES = ("heavywater-cache", "heavywater-worker")
# Of extras: what is missing without them.
EXTRAS = {"uvicorn": "heavywater http", "starlette": "heavywater http"}
_REQUIREMENT = re.compile(r"^([\w.-]+)\s*([^;]*)(;.*)?$")
_GGUF_MAGIC = b"GGUF"


def check_python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return ok("python", f"{found}, heavywater {__version__}")


def check_packages(requirements: Iterable[str] | None = None) -> Finding:
    """Those that the package heavywater asks for, by their versions."""
    what = "packages"
    if requirements is None:
        try:
            requirements = importlib.metadata.requires("heavywater") or ()
        except importlib.metadata.PackageNotFoundError:
            return warn(what, "heavywater is not installed, it runs from a folder", "pip install ./client/python")
    problems, good = [], 0
    for requirement in requirements:
        found = _REQUIREMENT.match(requirement)
        if found is None or found[3]:  # of an extra
            continue
        problem = _problem(found[1], found[2])
        problems += [problem] if problem else []
        good += not problem
    if problems:
        return fail(what, "; ".join(problems), "pip install --upgrade ./client/python")
    return ok(what, f"{good} as they should be")


def check_extras() -> Finding:
    missing = {need for package, need in EXTRAS.items() if _version(package) is None}
    if missing:
        return warn("extras", f"no {', '.join(sorted(missing))}", "pip install './client/python[http]'")
    return ok("extras", "http")


def check_binary(name: str) -> Finding:
    """On PATH, able to start, of this version."""
    path = shutil.which(name)
    if path is None:
        return fail(name, "not on PATH", "deploy/local/run CMD... builds it and sets PATH; clients need none")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return fail(name, f"{path} cannot be run: {error}", "build it for this machine: deploy/local/setup")
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"ended with {done.returncode}"]
        return fail(name, f"{path}: {words[-1]}", f"missing libraries? ldd {path}")
    version = done.stdout.strip().rpartition(" ")[2]
    if version != __version__:
        return warn(name, f"{path} is {version}, this client {__version__}", "build both from the same sources")
    return ok(name, f"{version}, {path}")


def check_model(path: Path | None) -> Finding:
    """The model that servers would be started with."""
    what = "model"
    try:
        model = path or find_model()
    except (ServerError, StopIteration) as error:
        return warn(what, str(error) or "none", "only who starts workers needs one; docs/your-model.md")
    try:
        if model.is_dir():
            missing = [name for name in ("config.json", "tokenizer.json") if not (model / name).exists()]
            missing += [] if any(model.glob("*.safetensors")) else ["*.safetensors"]
            if missing:
                return fail(what, f"{model} has no {', '.join(missing)}", "a whole checkpoint: docs/your-model.md")
            return ok(what, f"{model}, safetensors")
        with model.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
        size = model.stat().st_size
    except OSError as error:
        return fail(what, f"{model}: {error.strerror}", "set HEAVYWATER_MODEL, or --model, to a file that is there")
    if magic != _GGUF_MAGIC:
        return fail(what, f"{model} is no GGUF file: it begins with {magic!r}", "is its download whole?")
    return ok(what, f"{model}, {size / 2**20:.0f} MiB")


def _problem(package: str, wanted: str) -> str:
    """What is wrong with a package; empty when nothing is."""
    version = _version(package)
    if version is None:
        return f"{package} is missing"
    for bound in (bound.strip() for bound in wanted.split(",") if bound.strip()):
        if bound.startswith(">=") and _numbers(version) < _numbers(bound[2:]):
            return f"{package} is {version}, want {bound}"
        if bound.startswith("<") and not bound.startswith("<=") and _numbers(version) >= _numbers(bound[1:]):
            return f"{package} is {version}, want {bound}"
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Of a release, as far as they are numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
