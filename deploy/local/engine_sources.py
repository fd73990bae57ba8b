#!/usr/bin/env python3
"""Fetches the Python modules that define what SGLang's and vLLM's cache backends must be.

Their wheels want CUDA's libraries, a GPU and gigabytes; the abstract classes want torch at most. So the wheel comes
from PyPI as it is (pinned in engine-requirements.txt), these modules are taken out of it, unchanged, and the rest is
thrown away: without the packages' own __init__.py they import on any machine.

    deploy/local/engine_sources.py FOLDER ENGINE...      sglang: 39 MB are fetched; vllm: 336 MB
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("engine-requirements.txt")

# Modules, and folders of them.
WANTED = {
    "sglang": (
        "sglang/srt/environ.py",
        "sglang/srt/mem_cache/hicache_storage.py",
        "sglang/srt/mem_cache/storage/backend_factory.py",
    ),
    "vllm": (
        "vllm/envs.py",
        "vllm/logger.py",
        "vllm/logging_utils/",
        "vllm/v1/kv_hints/",
        "vllm/v1/kv_offload/base.py",
        "vllm/v1/kv_offload/config.py",
        "vllm/v1/kv_offload/tiering/",
        "vllm/v1/metrics/cache_hit_source.py",
    ),
}


def pinned(engine: str) -> str:
    for line in REQUIREMENTS.read_text().splitlines():
        if line.startswith(engine + "=="):
            return line
    sys.exit(f"error: {engine} is not in {REQUIREMENTS.name}, want one of {', '.join(WANTED)}")


def is_wanted(name: str, engine: str) -> bool:
    in_folders = tuple(wanted for wanted in WANTED[engine] if wanted.endswith("/"))
    return name.endswith(".py") and (name in WANTED[engine] or (bool(in_folders) and name.startswith(in_folders)))


def extract(wheel: Path, engine: str, folder: Path) -> int:
    """How many modules."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if is_wanted(name, engine)]
        archive.extractall(folder, names)
    return len(names)


def fetch(engine: str, folder: Path) -> None:
    """Nothing where the pinned version is there already."""
    version = pinned(engine)
    stamp = folder / f"{engine}.version"
    if stamp.exists() and stamp.read_text() == version:
        return
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", "-d", temporary, version], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        count = extract(wheel, engine, folder)
    if count < len(WANTED[engine]):
        sys.exit(f"error: {version} has {count} of the modules that are wanted")
    stamp.write_text(version)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: engine_sources.py FOLDER ENGINE...")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for engine in sys.argv[2:]:
        fetch(engine, folder)


if __name__ == "__main__":
    main()
