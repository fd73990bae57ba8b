"""Whose keys these are: the spaces of engines' values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_MODEL_CHARACTERS = 100
_DIGEST_CHARACTERS = 32


def space_of(engine: str, model: str, fields: Mapping[str, Any]) -> str:
    """A name that is equal exactly where the bytes of a key are: `fields` is all that they depend on beside the key.

    At most 256 bytes, and readable as far as engine and model go.
    """
    text = json.dumps({"model": model, **fields}, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    readable = "".join(c if c.isascii() and c.isprintable() else "_" for c in model)
    return f"{engine}/{readable[:_MODEL_CHARACTERS]}/{digest}"
