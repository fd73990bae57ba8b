"""Says which tests of this folder are skipped, where some are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conftest import WANTED, missing


@pytest.mark.parametrize("engine", WANTED)
def test_the_engines_classes_are_there(engine: str) -> None:
    if lacks := missing(engine):
        pytest.skip(f"{', '.join(lacks)} missing: deploy/local/test --all fetches what {engine} needs")
