"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cluster import BIN, ROOT

EXPECTED = ROOT / "tests/reference/expected_ids.json"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Visible skips where there is nothing to run."""
    reason = ""
    if not (BIN / "heavywater-worker").exists():
        reason = f"no heavywater-worker in {BIN}: build first (deploy/local/setup)"
    elif not os.environ.get("HEAVYWATER_MODEL"):
        reason = "HEAVYWATER_MODEL does not name a GGUF file"
    if reason:
        for item in items:
            if "e2e" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def expected() -> list[dict[str, object]]:
    """Prompts with the ids that an independent implementation generates."""
    return json.loads(EXPECTED.read_text())["cases"]


@pytest.fixture(scope="session")
def long_prompt(expected: list[dict[str, object]]) -> list[int]:
    """About 1200 tokens of a novel."""
    return max((p["prompt_ids"] for p in expected), key=len)  # type: ignore[arg-type,return-value]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
