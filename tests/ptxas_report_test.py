"""deploy/cmake/ptxas_report: what ptxas said, and what fails a build."""

from __future__ import annotations

import subprocess
from pathlib import Path

REPORT = Path(__file__).resolve().parents[1] / "deploy/cmake/ptxas_report"

KERNEL = """\
ptxas info    : Compiling entry function '_ZN10heavywater4cuda5MergeEi' for 'sm_90'
ptxas info    : Function properties for _ZN10heavywater4cuda5MergeEi
    {spilled} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 47 registers, used 1 barriers
ptxas info    : Compile time = 4.192 ms
"""


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([REPORT, folder], capture_output=True, text=True, check=False)


def test_kernels_without_spills_are_listed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/merge.cu.o.ptxas").write_text(KERNEL.format(spilled=0) * 2)
    result = run(tmp_path)
    assert result.returncode == 0
    assert result.stdout.count("sm_90 | 47 | 0 | 0 |") == 2


def test_a_kernel_that_spills_fails_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "merge.cu.o.ptxas").write_text(
        KERNEL.format(spilled=0) + KERNEL.format(spilled=8)
    )
    result = run(tmp_path)
    assert result.returncode == 1
    assert "Merge" in result.stderr
    assert "spills on sm_90" in result.stderr


def test_a_build_without_kernels_fails(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 1
    assert "no kernels found" in result.stderr
