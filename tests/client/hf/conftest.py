"""These tests need torch and transformers (deploy/local/setup --transformers); hf_available_test.py says where they are
missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
sys.path += [str(TESTS / "reference"), str(TESTS / "client")]

try:
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)  # these models are small: threads would only wait for each other
except ImportError:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("*_test.py") if "available" not in path.name]


@pytest.fixture(autouse=True)
def seeded() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(7)


@pytest.fixture(scope="session")
def embedded():
    """The embedded model in Transformers, and what texts are made with: loading takes seconds."""
    if "HEAVYWATER_MODEL" not in os.environ:
        pytest.skip("HEAVYWATER_MODEL is not set: run through deploy/local/test")
    from heavywater.eval.needle_transformers import load
    from heavywater.local import find_model

    return load(find_model())
