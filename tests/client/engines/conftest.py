"""These tests hold heavywater.integrations to the engines' own abstract classes: they need torch (.venv-hf) and the
modules that deploy/local/engine_sources.py takes out of the engines' wheels. engines_available_test.py says what is
missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINES = ROOT / ".engines"
sys.path.insert(0, str(ROOT / "tests/client"))

WANTED = {"sglang": ("torch", "sglang"), "vllm": ("torch", "msgspec", "vllm")}


def missing(engine: str) -> list[str]:
    """What the tests of this engine lack."""
    return [
        name
        for name in WANTED[engine]
        if not ((ENGINES / name).is_dir() if name in WANTED else importlib.util.find_spec(name))
    ]


collect_ignore = [
    path.name for engine in WANTED if missing(engine) for path in Path(__file__).parent.glob(f"{engine}_*test.py")
]
if ENGINES.is_dir():
    sys.path.insert(0, str(ENGINES))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real cache service that takes 64 MiB of values."""
    from real_cache import cache_service

    folder = tmp_path_factory.mktemp("cache")
    with cache_service(folder, host_bytes=128 << 20, blob_bytes=64 << 20) as (address, _):
        yield address
