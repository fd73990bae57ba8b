"""Memory that a deployment needs, as the worker itself computes it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heavywater.server_process import find_binary

BINARY = "heavywater-plan-memory"

_TOKENS = re.compile(r"(\d+)([km]?)", re.IGNORECASE)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB|TiB|GB|TB)?")
_BYTE_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "GB": 10**9,
    "TB": 10**12,
}
# What config.json of Transformers calls the sizes of a Llama-family model.
_CONFIG_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_query_heads",
    "intermediate_size": "ffn_size",
    "vocab_size": "vocab_size",
}


def parse_tokens(text: str) -> int:
    """32768, "32k" (of 1024) or "1m" (of 1024 x 1024). Raises ValueError."""
    found = _TOKENS.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no number of tokens, want for example 32768, 32k or 1m")
    return int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2].lower()]


def parse_bytes(text: str) -> int:
    """A number with B, KiB, MiB, GiB, TiB, GB or TB. Raises ValueError."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no amount of memory, want for example 80GiB or 141GB")
    return int(float(found[1]) * _BYTE_UNITS[found[2] or "B"])


def model_of_config(path: Path) -> dict[str, object]:
    """The shape in a Transformers folder or its config.json. Raises ValueError naming the field."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    model: dict[str, object] = {ours: _size(config, theirs, file) for theirs, ours in _CONFIG_SIZES.items()}
    model["num_kv_heads"] = _size(config, "num_key_value_heads", file, otherwise="num_attention_heads")
    if config.get("head_dim") is not None:
        model["head_dim"] = _size(config, "head_dim", file)
    else:
        model["head_dim"] = _size(config, "hidden_size", file) // _size(config, "num_attention_heads", file)
    model["tied_embeddings"] = bool(config.get("tie_word_embeddings", False))
    model["name"] = str(config.get("_name_or_path") or file.resolve().parent.name)
    return model


def _size(config: Mapping[str, Any], field: str, file: Path, otherwise: str = "") -> int:
    name = field if config.get(field) is not None or not otherwise else otherwise
    value = config.get(name)
    if value is None:
        raise ValueError(f"{file}: field {name!r} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{file}: field {name!r} is {value!r}, want a whole number of 1 or more")
    return value


def plan_memory(request: Mapping[str, object]) -> dict[str, Any]:
    """The worker's answer to a request (worker/sizing/plan_request.h). Raises ValueError with its complaint."""
    done = subprocess.run(
        [find_binary(BINARY)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(done.stderr.strip() or f"{BINARY} ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
