"""The YAML of `heavywater serve --config`: what to start, and how each server is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_RANKS = 256  # as many as a group may have
_FIELDS = ("ranks", "model", "cache", "worker")
# Who starts them gives each server its own.
_STARTERS = {
    "cache": ("slab_name", "config"),
    "worker": ("cache_address", "config", "listen_address", "model", "rank", "size"),
}


@dataclass(frozen=True)
class ServeConfig:
    """`cache` and `worker`: fields of CacheConfig and WorkerConfig, as in their own YAML."""

    ranks: int = 1
    model: Path | None = None
    cache: Mapping[str, object] = field(default_factory=dict)
    worker: Mapping[str, object] = field(default_factory=dict)


def read_serve_config(path: Path) -> ServeConfig:
    """Raises ValueError naming the file, the field, what it is and what was wanted. A server refuses the names and
    values that it does not know itself."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is {type(values).__name__}, want fields: {', '.join(_FIELDS)}")
    unknown = [str(name) for name in values if name not in _FIELDS]
    if unknown:
        raise ValueError(f"{path}: no field {unknown[0]!r}, want {', '.join(_FIELDS)}")
    ranks = values.get("ranks", 1)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"{path}: ranks is {ranks!r}, want a whole number, 1 to {MAX_RANKS}")
    model = values.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"{path}: model is {model!r}, want a GGUF file or a folder")
    # As the file's own folder has it, wherever the command is run.
    return ServeConfig(
        ranks,
        None if model is None else path.parent / Path(model).expanduser(),
        _server(path, "cache", values.get("cache")),
        _server(path, "worker", values.get("worker")),
    )


def _server(path: Path, name: str, values: Any) -> dict[str, object]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {name} is {values!r}, want the fields of heavywater-{name}'s configuration")
    for field_name, value in values.items():
        if str(field_name).startswith("tls_") or field_name in ("token_file", "tokens_file"):
            raise ValueError(
                f"{path}: {name}.{field_name} is for all servers: want --{field_name} or its like of serve"
            )
        if field_name in _STARTERS[name]:
            raise ValueError(f"{path}: {name}.{field_name} is what heavywater serve gives the server, want it absent")
        if not isinstance(value, str | int | float | bool):
            raise ValueError(f"{path}: {name}.{field_name} is {value!r}, want one value")
    return {str(field_name): value for field_name, value in values.items()}
