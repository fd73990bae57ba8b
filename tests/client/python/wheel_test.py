"""The wheel that carries the compiled module, in a fresh virtual environment."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from heavywater.local import LocalServers

ROOT = Path(__file__).resolve().parents[3]
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = importlib.util.find_spec("heavywater._engine")
    if engine is None or engine.origin is None:
        pytest.skip("heavywater._engine is not built: run deploy/local/setup")
    pytest.importorskip("auditwheel", reason="auditwheel is missing: deploy/local/setup installs it")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / "deploy/local/pack_wheel.py"), engine.origin, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of an environment that has the wheel, what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    # The versions that all other tests run with.
    pins = ROOT / "deploy/local/requirements.txt"
    install = [str(folder / "bin/pip"), "install", "--disable-pip-version-check", "-q", "-c", str(pins), str(wheel)]
    # What these tests run from must not count as installed there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False, env=environment)
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


def test_without_a_module_the_wheel_has_no_compiled_code(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "deploy/local"))
    try:
        from pack_wheel import copy_sources
    finally:
        sys.path.pop(0)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(copy_sources(tmp_path))], check=True, timeout=300, env={"PATH": "/usr/bin:/bin"})
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
