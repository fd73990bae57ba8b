"""Says that the tests of this folder are skipped, where they are."""

import pytest


def test_torch_and_transformers_are_there():
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is missing: deploy/local/setup --transformers installs it")
