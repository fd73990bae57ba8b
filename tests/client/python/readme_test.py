"""What the README shows is what is tested."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import heavywater
import pytest

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readme_opens_with_the_two_commands() -> None:
    commands = re.findall(r"^deploy/local/\S+", blocks("sh")[0], re.MULTILINE)
    assert commands == ["deploy/local/demo", "deploy/local/test"]
    assert README.index("```sh") < 200
    for command in commands:
        assert (ROOT / command).stat().st_mode & 0o111, f"{command} cannot be run"


def test_the_cpp_lines_are_those_of_the_example() -> None:
    (lines,) = blocks("cpp")
    example = (ROOT / "client/cpp/example.cc").read_text(encoding="utf-8")
    assert example.split("// [readme\n")[1].split("  // readme]")[0] == lines


def test_the_lines_for_engines_use_names_and_arguments_that_exist() -> None:
    _, code, _ = blocks("python")
    calls = re.findall(r"engine\.(\w+)\(", code)
    assert calls == ["open", "prompt", "begin", "attend", "end"]
    for name in calls:
        assert callable(getattr(heavywater.AttentionClient, name))
    opening = next(line for line in code.splitlines() if "engine.open" in line)
    parameters = inspect.signature(heavywater.AttentionClient.open).parameters
    assert set(re.findall(r"(\w+)=(?!\")", opening)) <= {*parameters, "policy"}
    compile(code, "README.md", "exec")


def test_the_ten_lines_are_about_ten() -> None:
    for language in ("python", "cpp"):
        for code in blocks(language):
            assert len([line for line in code.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("command", re.findall(r"^deploy/local/run (heavywater .*?)(?:  +#.*)?$", README, re.MULTILINE))
def test_each_command_and_option_of_the_readme_exists(command: str) -> None:
    words = command.split()[1:]
    depth = 2 if words[0] == "eval" else 1
    done = subprocess.run(
        [sys.executable, "-m", "heavywater", *words[:depth], "--help"],
        capture_output=True,
        text=True,
        env={"COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for option in (word for word in words if word.startswith("--")):
        assert option in done.stdout


def test_every_link_of_the_readme_leads_somewhere() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", prose)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_the_python_lines_run_as_they_stand(local_servers) -> None:
    # The second one's server is tested in tests/e2e/test_attention.py, the third in tests/client/hf.
    code, *_ = blocks("python")
    environment = {
        "HEAVYWATER_ADDRESS": local_servers.worker_address,
        "HEAVYWATER_CACHE": local_servers.cache_address,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "bytes of KV on the device" in done.stdout
    assert "heavy in layer 0" in done.stdout


def test_the_cpp_example_runs(local_servers) -> None:
    done = subprocess.run(
        ["heavywater-example", local_servers.worker_address], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    text, _, figures = done.stdout.strip().rpartition("\n")
    assert len(text) > 20
    assert re.fullmatch(r"\d+ bytes of KV on the device", figures)


def test_building_the_python_package_compiles_the_protos_there_and_not_into_the_sources(tmp_path: Path) -> None:
    sources = ROOT / "client/python/heavywater/v1"
    before = {file: file.stat().st_mtime_ns for file in sources.glob("*_pb2*")}
    done = subprocess.run(
        [sys.executable, "-c", "import sys, build_backend; build_backend.build_wheel(sys.argv[1])", str(tmp_path)],
        cwd=ROOT / "client/python",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert {"heavywater/v1/generation_pb2_grpc.py", "heavywater/client.py"} <= set(zipfile.ZipFile(wheel).namelist())
    assert {file: file.stat().st_mtime_ns for file in sources.glob("*_pb2*")} == before
