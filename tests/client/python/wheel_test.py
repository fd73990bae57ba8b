"""The wheel that carries the compiled module, in a fresh virtual environment."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from heavywater.local import LocalServers

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build/release"
# What these tests run from must not count as installed where they install.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
README = (ROOT / "README.md").read_text(encoding="utf-8")

ENGINE = """
import numpy as np
from heavywater.engine import AttentionEngine, AttentionShape, EngineItem, LocalDevice, Phase, preset

shape = AttentionShape(2, 4, 2, 16, dtype="fp32")
engine = AttentionEngine(LocalDevice(), shape)
engine.open(1, preset("h2o"), prompt_tokens=20, max_tokens=30)
engine.begin([EngineItem(1, Phase.PROMPT_LAST, 0, 20)])
for layer in range(2):
    q = np.ones((20, 4, 16), np.float32)
    kv = np.ones((20, 2, 16), np.float32)
    out = np.zeros_like(q)
    engine.attend(layer, q, kv, kv, out)
engine.end()
assert np.allclose(out, 1)
print("attended with", __import__("heavywater._engine")._engine.__file__)
"""


def steps_to_build() -> int:
    """What is not built yet, of all targets."""
    ninja = subprocess.run(["ninja", "-C", str(BUILD), "-n"], capture_output=True, text=True, timeout=60, check=True)
    return len(re.findall(r"^\[\d+/\d+\]", ninja.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def steps_before() -> int:
    if not (BUILD / "build.ninja").exists():
        pytest.skip(f"{BUILD} is not there: run deploy/local/setup")
    return steps_to_build()


@pytest.fixture(scope="module")
def wheel(steps_before: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("heavywater._engine") is None:
        pytest.skip("heavywater._engine is not built: run deploy/local/setup")
    pytest.importorskip("auditwheel", reason="auditwheel is missing: deploy/local/setup installs it")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / "deploy/local/pack_wheel.py"), str(BUILD), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    # The versions that all other tests run with.
    pins = ROOT / "deploy/local/requirements.txt"
    install = [str(folder / "bin/pip"), "install", "--disable-pip-version-check", "-q", "-c", str(pins), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False, env=CLEAN)
    assert done.returncode == 0, done.stderr
    return folder / "bin/python"


def run(python: Path, code: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(python), "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_of_one_python_and_has_its_libraries_with_it(wheel: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.search(rf"-{tag}-{tag}-manylinux_\d+_\d+_\w+\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"heavywater/py.typed", "heavywater/_engine.pyi", "heavywater/v1/generation_pb2.py"} <= set(names)
    assert sum(name.startswith("heavywater/_engine.") and name.endswith(".so") for name in names) == 1
    assert any(name.startswith("heavywater.libs/") for name in names)


def test_it_describes_itself_and_names_what_can_be_added(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(metadata).decode()
    assert {"hf", "http", "fast"} <= set(re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE))
    assert "Description-Content-Type: text/markdown" in text
    assert "# heavywater (Python)" in text


def test_readmes_ten_lines_run_in_a_fresh_environment(
    python: Path, local_servers: LocalServers, tmp_path: Path
) -> None:
    code = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[0]
    out = run(
        python,
        code,
        tmp_path,
        HEAVYWATER_ADDRESS=local_servers.worker_address,
        HEAVYWATER_CACHE=local_servers.cache_address,
    )
    assert "bytes of KV on the device" in out
    assert "heavy in layer 0" in out


def test_the_engine_runs_there_from_the_wheel(python: Path, tmp_path: Path) -> None:
    out = run(python, ENGINE, tmp_path)
    assert str(python.parents[1]) in out


def test_the_command_runs_there(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python.parent / "heavywater"), "--help"], capture_output=True, text=True, cwd=tmp_path, env={}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_where_there_are_no_servers_the_command_says_how_to_get_them(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python.parent / "heavywater"), "generate", "hi"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HEAVYWATER_MODEL": str(python)},  # any file: it is not read
        check=False,
    )
    assert done.returncode == 1
    assert "heavywater-cache is not on PATH" in done.stderr
    assert "HEAVYWATER_ADDRESS" in done.stderr


def test_making_it_leaves_the_build_folder_as_it_was(wheel: Path, steps_before: int) -> None:
    assert steps_to_build() <= steps_before


def pip_wheel(source: Path, folder: Path) -> Path:
    """By pip alone, where there is nothing on PATH: no compiler, no CMake."""
    options = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    subprocess.run(command, check=True, timeout=300, env={"PATH": str(folder)})
    (wheel,) = folder.glob("*.whl")
    return wheel


def build(hook: str, sources: Path, folder: Path) -> Path:
    """What a hook of the package's build backend makes."""
    code = f"import sys, build_backend; print(build_backend.{hook}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=sources, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_pip_alone_makes_a_wheel_without_compiled_code(tmp_path: Path) -> None:
    wheel = pip_wheel(ROOT / "client/python", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"heavywater/client.py", "heavywater/py.typed", "heavywater/v1/generation_pb2_grpc.py"} <= set(names)
    assert not any(name.endswith(".so") for name in names)


def test_a_source_distribution_has_the_protos_compiled(tmp_path: Path) -> None:
    names = zipfile.ZipFile(pip_wheel(build("build_sdist", ROOT / "client/python", tmp_path), tmp_path)).namelist()
    assert {"heavywater/client.py", "heavywater/py.typed", "heavywater/v1/generation_pb2_grpc.py"} <= set(names)


def test_an_editable_install_is_the_sources_as_they_become_and_pythonpath_goes_before(tmp_path: Path) -> None:
    sources, other, environment = tmp_path / "client/python", tmp_path / "other", tmp_path / "environment"
    ignored = shutil.ignore_patterns("_engine*.so", "v1", "__pycache__")
    shutil.copytree(ROOT / "client/python", sources, ignore=ignored)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    python = environment / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
    wheel = build("build_editable", sources, tmp_path)
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, timeout=120, env=CLEAN)
    assert (sources / "heavywater/v1/generation_pb2_grpc.py").exists()

    # Nothing that the package imports is there: it has to be an empty one.
    for folder in (sources, other):
        (folder / "heavywater").mkdir(parents=True, exist_ok=True)
        (folder / "heavywater/__init__.py").write_text("")
    (sources / "heavywater/_engine.so").touch()
    (sources / "heavywater/new").mkdir()
    (sources / "heavywater/new/file.py").write_text("print(__file__)")
    assert str(sources) in run(python, "import heavywater.new.file", tmp_path)
    find = "import importlib.util; print(importlib.util.find_spec('heavywater{}').origin)"
    assert run(python, find.format("._engine"), tmp_path).strip() == str(sources / "heavywater/_engine.so")
    found = run(python, find.format(""), tmp_path, PYTHONPATH=str(other)).strip()
    assert found == str(other / "heavywater/__init__.py")
