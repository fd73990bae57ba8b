"""What this machine has: GPUs and tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """As nvidia-smi describes it."""

    name: str
    compute_capability: str  # "9.0"
    memory_mib: str
    driver: str

    @property
    def architecture(self) -> str:
        """As CMake names it."""
        return self.compute_capability.replace(".", "") + "-real"


def find_gpus() -> list[Gpu]:
    """Empty without a driver or without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "name,compute_cap,memory.total,driver_version"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if asked.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in asked.stdout.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == 4]


def find_tool(name: str) -> str | None:
    """On PATH, or beside Python: cmake and ninja may be Python packages."""
    beside = Path(sys.executable).parent
    return shutil.which(name) or shutil.which(name, path=str(beside))


def find_python_nccl() -> Path | None:
    """The folder of NCCL where it is a Python package: a toolkit may come without it."""
    for folder in sys.path:
        root = Path(folder) / "nvidia/nccl"
        if (root / "include/nccl.h").exists():
            return root
    return None


def cuda_tool(name: str, build: Path) -> str | None:
    """A tool of the CUDA toolkit that CMake has found for this build."""
    found = shutil.which(name)
    if found is not None:
        return found
    folders = [Path(os.environ["CUDA_HOME"]) / "bin"] if "CUDA_HOME" in os.environ else []
    cache = build / "CMakeCache.txt"
    if cache.exists():
        for line in cache.read_text(errors="replace").splitlines():
            if line.startswith(("CMAKE_CUDA_COMPILER:", "CUDAToolkit_NVCC_EXECUTABLE:")):
                folders.append(Path(line.split("=", 1)[1]).parent)
    return next((str(folder / name) for folder in folders if (folder / name).exists()), None)
