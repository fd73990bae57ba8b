"""deploy/local/gpu-check: what it makes of programs that pass, fail, hang or are missing. Its own need a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_check.check import ABSENT, FAILED, NO_TIME, PASSED, run_parts
from gpu_check.machine import find_gpus
from gpu_check.pack import MAX_BYTES, PackError, cmake_options, installed_packages, make_pack
from gpu_check.parts import SANITIZED, TARGETS, Part, parts
from gpu_check.runner import run_logged
from gpu_check.summary import Summary

ROOT = Path(__file__).resolve().parents[3]

GTEST = {
    "tests": 2,
    "testsuites": [
        {
            "name": "Suite",
            "testsuite": [{"name": "Runs", "result": "COMPLETED"}, {"name": "Skips", "result": "SKIPPED"}],
        }
    ],
}


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def part(**changes: object) -> Part:
    first = parts()[0]
    return Part(**{**first.__dict__, "name": "one", "program": "program", "timeout_s": 10.0, **changes})


@pytest.fixture
def build(tmp_path: Path) -> Path:
    (tmp_path / "results/logs").mkdir(parents=True)
    return tmp_path


def run_one(build: Path, text: str | None, seconds: float = 60.0, **changes: object) -> dict[str, object]:
    """One part whose program is this script; what it left as JSON."""
    if text is not None:
        script(build / "bin/program", text)
    built = ["program"] if text is not None else []
    run_parts([part(**changes)], build, built, build / "results", time.monotonic() + seconds, lambda text: None)
    return json.loads((build / "results/one.json").read_text())


def state_of(process: Path) -> str:
    """R, S, Z, ... or "gone"."""
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"


def report(text: str = "", code: int = 0) -> str:
    """A script like a test program."""
    return f"{text}\ncat > ${{2#--gtest_output=json:}} <<'E'\n{json.dumps(GTEST)}\nE\nexit {code}\n"


def test_a_part_that_passes_leaves_its_counts_and_names_what_it_skipped(build: Path) -> None:
    result = run_one(build, report())
    assert result["status"] == PASSED
    assert result["details"] == {"tests": 2, "failed": [], "skipped": ["Suite.Skips"]}


def test_a_part_that_fails_shows_the_end_of_its_log(build: Path) -> None:
    result = run_one(build, report("echo it broke", code=1))
    assert result["status"] == FAILED
    assert "exit status 1" in str(result["reason"])
    assert "it broke" in str(result["reason"])


def test_a_program_that_leaves_no_report_has_failed(build: Path) -> None:
    assert run_one(build, "exit 0\n")["status"] == FAILED


def test_a_program_without_such_a_test_has_failed(build: Path) -> None:
    empty = json.dumps({"tests": 0, "testsuites": []})
    assert run_one(build, f"echo '{empty}' > ${{2#--gtest_output=json:}}\n")["status"] == FAILED


def test_a_program_that_was_not_built_has_failed(build: Path) -> None:
    result = run_one(build, None)
    assert result["status"] == FAILED
    assert "program was not built" in str(result["reason"])


def test_a_program_that_hangs_is_ended_with_its_children(build: Path) -> None:
    started = time.monotonic()
    result = run_one(build, f"sleep 60 & echo $! > {build}/child\nsleep 60\n", timeout_s=1.0)
    assert time.monotonic() - started < 20
    assert result["status"] == FAILED
    assert "still running after 1 s" in str(result["reason"])
    child = Path("/proc") / (build / "child").read_text().strip()
    while state_of(child) not in ("gone", "Z"):
        assert time.monotonic() - started < 20
        time.sleep(0.01)


def test_without_time_a_part_does_not_run_and_counts_as_failed(build: Path) -> None:
    marker = build / "ran"
    results = []
    script(build / "bin/program", report(f"touch {marker}"))
    results = run_parts([part()], build, ["program"], build / "results", time.monotonic() + 1, lambda text: None)
    assert results[0].status == NO_TIME
    assert results[0].counts_as_failed
    assert not marker.exists()


def test_without_compute_sanitizer_its_part_is_absent_and_no_failure(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    script(build / "bin/program", report())
    (result,) = run_parts(
        [part(sanitizer="memcheck")], build, ["program"], build / "results", time.monotonic() + 60, lambda text: None
    )
    assert result.status == ABSENT
    assert not result.counts_as_failed


def test_the_sanitizer_is_found_beside_the_compiler_that_cmake_found(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    # As the real one: its own options, then the program.
    script(build / "toolkit/compute-sanitizer", 'echo "$@" > ' + str(build) + '/asked\nshift 4\nexec "$@"\n')
    (build / "CMakeCache.txt").write_text(f"CMAKE_CUDA_COMPILER:FILEPATH={build}/toolkit/nvcc\n")
    assert run_one(build, report(), sanitizer="racecheck")["status"] == PASSED
    assert (build / "asked").read_text().startswith("--tool racecheck --error-exitcode ")


def test_a_benchmarks_figures_are_its_last_json_line(build: Path) -> None:
    bench = next(one for one in parts() if one.name == "attention")
    result = run_one(build, "echo starting\necho '{\"rows\": [1]}'\n", details=bench.details)
    assert result["details"] == {"rows": [1]}


def test_every_program_of_a_part_is_a_target() -> None:
    assert {one.program for one in parts()} == set(TARGETS)
    assert sum(one.timeout_s for one in parts()) < 400


def test_the_cases_for_the_sanitizer_are_in_the_suite() -> None:
    suite = "".join(file.read_text() for file in (ROOT / "tests/worker/backend").glob("*_test.cc"))
    missing = [case for case in SANITIZED if f"TEST_P(BackendTest, {case})" not in suite]
    assert missing == []


def test_gpus_are_what_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "nvidia-smi", "echo 'NVIDIA Example, 9.0, 81559, 580.1'\necho 'NVIDIA Other, 10.0, 1, 580.1'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    first, second = find_gpus()
    assert (first.name, first.architecture, second.architecture) == ("NVIDIA Example", "90-real", "100-real")
    script(tmp_path / "nvidia-smi", "echo 'no driver' >&2\nexit 9\n")
    assert find_gpus() == []


def test_output_of_a_program_goes_to_its_log(tmp_path: Path) -> None:
    program = script(tmp_path / "program", "echo out; echo err >&2; exit 3\n")
    ended = run_logged([program], tmp_path / "log", 10)
    assert ended.code == 3
    assert (tmp_path / "log").read_text() == "out\nerr\n"


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not installed_packages():
        pytest.skip("the packages that go into the pack are not installed")
    folder = tmp_path_factory.mktemp("pack")
    make_pack(folder)
    yield folder


def test_the_pack_is_small_and_has_no_links(pack: Path) -> None:
    files = list(pack.rglob("*"))
    assert sum(file.stat().st_size for file in files if file.is_file()) < MAX_BYTES
    assert not any(file.is_symlink() for file in files)


def test_the_pack_tells_cmake_where_everything_is(pack: Path) -> None:
    options = cmake_options(pack)
    for name in ("absl_DIR", "GTest_DIR", "HWY_DIR", "nlohmann_json_DIR", "HEAVYWATER_GLOO_LIBRARY"):
        (value,) = (option.split("=", 1)[1] for option in options if option.startswith(f"-D{name}="))
        assert Path(value).exists()


def test_libraries_of_the_pack_find_what_they_load_in_the_pack(pack: Path) -> None:
    folders = {file.parent for file in (pack / "usr/lib").rglob("*.so*")}
    for library in (pack / "usr/lib").rglob("libgloo.so*"):
        loaded = subprocess.run(
            ["ldd", library],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders))},
        ).stdout
        for name in ("libhiredis", "libibverbs", "libnl-3", "libnl-route-3"):
            assert any(name in line and str(pack) in line for line in loaded.splitlines()), loaded


def test_a_broken_pack_is_named(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    with pytest.raises(PackError, match=r"0 files named abslConfig\.cmake"):
        cmake_options(tmp_path)


# What cmake would do, without compiling: every target is a program that passes.
FAKE_CMAKE = """
if [ "$1" = -S ]; then touch "$4/build.ninja"; exit 0; fi
build=$2
if [ "$4" = help ]; then for name in $TARGETS; do echo "$name: phony"; done; exit 0; fi
if [ $# -eq 4 ]; then [ "$4" != "$STALE" ]; exit; fi
shift 5
mkdir -p "$build/bin"
while [ "$1" != -- ]; do
  printf '#!/bin/sh\\n' > "$build/bin/$1"; chmod +x "$build/bin/$1"
  shift
done
[ -z "$STALE" ]
"""


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--build-only"], 0)])
def test_without_a_gpu_it_builds_says_so_and_ends_with_2(tmp_path: Path, arguments: list[str], code: int) -> None:
    script(tmp_path / "tools/cmake", FAKE_CMAKE)
    done = subprocess.run(
        [ROOT / "deploy/local/gpu-check", "--build-dir", tmp_path / "build", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tmp_path}/tools:/usr/bin:/bin", "TARGETS": " ".join(TARGETS)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert f"built {len(TARGETS)} of {len(TARGETS)} programs" in done.stdout
    assert ("no GPU" in done.stdout) == (code == 2)
    summary = json.loads((tmp_path / "build/results/summary.json").read_text())
    assert (summary["exit_status"], summary["parts"]) == (code, [])
    assert summary["not_run"] == [one.name for one in parts()]
    assert ("no GPU" in summary["error"]) == (code == 2)


def test_a_program_that_this_machine_cannot_build_is_named_and_the_others_are_built(tmp_path: Path) -> None:
    script(tmp_path / "tools/cmake", FAKE_CMAKE)
    done = subprocess.run(
        [ROOT / "deploy/local/gpu-check", "--build-dir", tmp_path / "build"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tmp_path}/tools:/usr/bin:/bin", "TARGETS": " ".join(TARGETS[1:])},
    )
    assert done.returncode == 1
    assert f"built {len(TARGETS) - 1} of {len(TARGETS)} programs" in done.stdout
    assert f"not built: {TARGETS[0]} " in done.stdout


def test_a_program_of_an_earlier_build_does_not_stand_for_one_that_fails_now(tmp_path: Path) -> None:
    script(tmp_path / "tools/cmake", FAKE_CMAKE)
    script(tmp_path / f"build/bin/{TARGETS[1]}", "exit 0\n")
    done = subprocess.run(
        [ROOT / "deploy/local/gpu-check", "--build-dir", tmp_path / "build"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tmp_path}/tools:/usr/bin:/bin", "TARGETS": " ".join(TARGETS), "STALE": TARGETS[1]},
    )
    assert done.returncode == 1
    assert f"not built: {TARGETS[1]} " in done.stdout


def test_what_cannot_be_configured_is_one_message(tmp_path: Path) -> None:
    script(tmp_path / "tools/cmake", "echo no toolkit here\nexit 1\n")
    done = subprocess.run(
        [ROOT / "deploy/local/gpu-check", "--build-dir", tmp_path / "build"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tmp_path}/tools:/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert done.stderr == "error: cmake could not configure:\n  no toolkit here\n"
    summary = json.loads((tmp_path / "build/results/summary.json").read_text())
    assert (summary["exit_status"], summary["passed"], summary["build"]) == (1, [], None)
    assert "no toolkit here" in summary["error"]


def test_a_machine_without_a_toolkit_is_told_what_to_do(tmp_path: Path) -> None:
    script(tmp_path / "tools/cmake", "echo 'Could NOT find CUDAToolkit (missing: CUDA_CUDART)'\nexit 1\n")
    done = subprocess.run(
        [ROOT / "deploy/local/gpu-check", "--build-dir", tmp_path / "build"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tmp_path}/tools:/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no CUDA toolkit was found (put nvcc on PATH or set CUDA_HOME)")


def test_the_summary_says_after_each_part_what_has_passed_until_then(build: Path) -> None:
    script(build / "bin/good", report())
    script(build / "bin/bad", report(code=1))
    two = [part(name="first", program="good"), part(name="second", program="bad"), part(name="third", program="good")]
    file = build / "summary.json"
    summary = Summary(file, [one.name for one in two])
    seen: list[dict[str, object]] = []

    def done(ended: list[object]) -> None:
        summary.parts_ended(ended)  # type: ignore[arg-type]
        seen.append(json.loads(file.read_text()))

    run_parts(two, build, ["good", "bad"], build / "results", time.monotonic() + 60, lambda text: None, done)
    assert [one["passed"] for one in seen] == [["first"], ["first"], ["first", "third"]]
    assert [one["failed"] for one in seen] == [[], ["second"], ["second"]]
    assert [one["not_run"] for one in seen] == [["second", "third"], ["third"], []]
    assert [one["exit_status"] for one in seen] == [None, None, None]
    assert summary.counts() == "2 passed, 1 failed"


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "deploy/local/gpu-check", "--part", "speed"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--part speed, want one of: backend" in done.stderr
