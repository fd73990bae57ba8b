"""deploy/cmake/kernel_table: occupancy from registers and shared memory, and a document that is kept true."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

TABLE = Path(__file__).resolve().parents[1] / "deploy/cmake/kernel_table"

PTXAS = """\
ptxas info    : Compiling entry function '{name}' for '{target}'
ptxas info    : Function properties for {name}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers
"""
MERGE = "_ZN10heavywater4cuda5MergeEi"
LAUNCH = '{"kernel":"heavywater::cuda::(anonymous namespace)::Merge","threads":128,"shared_bytes":2048}'
DOCUMENT = "before\n<!-- kernel_table 13.0 -->\n<!-- end -->\nafter\n"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    loader = SourceFileLoader("kernel_table", str(TABLE))
    spec = spec_from_loader("kernel_table", loader)
    assert spec is not None
    loaded = module_from_spec(spec)
    sys.modules["kernel_table"] = loaded
    loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("target", "registers", "threads", "shared_bytes", "blocks"),
    [
        # As the toolkit's own calculator has them.
        ("sm_90", 128, 256, 0, 2),
        ("sm_90", 72, 256, 0, 3),
        ("sm_90", 32, 256, 0, 8),
        ("sm_90", 16, 32, 0, 32),
        ("sm_90", 32, 128, 100 * 1024, 2),
        ("sm_80", 32, 128, 100 * 1024, 1),
        ("sm_80", 255, 1024, 0, 0),
    ],
)
def test_blocks_follow_from_registers_shared_memory_and_threads(
    module: ModuleType, target: str, registers: int, threads: int, shared_bytes: int, blocks: int
) -> None:
    assert module.blocks_at_once(target, registers, threads, shared_bytes) == blocks


class Build:
    """A folder of what ptxas said, and a program that prints launches."""

    def __init__(self, folder: Path, targets: tuple[str, ...] = ("sm_80", "sm_90", "sm_100")) -> None:
        self.folder = folder
        self.document = folder / "gpu.md"
        self.document.write_text(DOCUMENT)
        said = "".join(PTXAS.format(name=MERGE, target=target, registers=40) for target in targets)
        (folder / "merge.cu.o.ptxas").write_text(said)
        self.launches(LAUNCH)

    def launches(self, lines: str) -> None:
        program = self.folder / "launches"
        program.write_text(f"#!/bin/sh\ncat <<'E'\n{lines}\nE\n")
        program.chmod(0o755)

    def run(self, *arguments: str, version: str = "13.0.88") -> subprocess.CompletedProcess[str]:
        command = [TABLE, self.folder, self.folder / "launches", version, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_document_is_written_and_then_true_until_the_build_changes(tmp_path: Path) -> None:
    build = Build(tmp_path)
    assert build.run(str(build.document)).returncode == 1
    assert build.run(str(build.document), "--write").returncode == 0
    text = build.document.read_text()
    assert "| `Merge` | 128 | 2.0 | 40 / 40 / 40 | 12 / 12 / 12 | 75 / 75 / 75 |" in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert build.run(str(build.document)).returncode == 0
    build.launches(LAUNCH.replace("2048", "4096"))
    result = build.run(str(build.document))
    assert result.returncode == 1
    assert "4.0" in result.stderr


def test_another_toolkit_or_fewer_targets_are_skipped(tmp_path: Path) -> None:
    build = Build(tmp_path)
    assert build.run(str(build.document), version="12.4.1").returncode == 77
    (tmp_path / "one").mkdir()
    one = Build(tmp_path / "one", targets=("sm_90",))
    result = one.run(str(one.document))
    assert result.returncode == 77
    assert "sm_90" in result.stdout


def test_a_kernel_of_which_ptxas_said_nothing_is_named(tmp_path: Path) -> None:
    build = Build(tmp_path)
    build.launches(LAUNCH.replace("Merge", "Split"))
    result = build.run(str(build.document))
    assert result.returncode == 1
    assert "Split is launched" in result.stderr


@pytest.mark.parametrize(("other", "rows"), [(1024, ["`Add<16-bit>`"]), (2048, ["`Add<BFloat16>`", "`Add<Float16>`"])])
def test_both_16_bit_types_are_one_row_where_their_figures_are_equal(
    module: ModuleType, other: int, rows: list[str]
) -> None:
    registers = {name: dict.fromkeys(module.SHARED_BYTES, 40) for name in ("Add<BFloat16>", "Add<Float16>")}
    launches = {
        "Add<BFloat16>": module.Launch("Add<BFloat16>", 128, 1024),
        "Add<Float16>": module.Launch("Add<Float16>", 128, other),
    }
    assert [row.split(" | ")[0].lstrip("| ") for row in module.rows_of(registers, launches)] == rows
