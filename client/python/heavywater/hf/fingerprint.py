"""What must be the same where a session goes on."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from heavywater.hf.policy import POLICY_FIELDS, RECALL_FIELDS
from heavywater.hf.rows import RowsOptions

_BUDGET_FIELDS = ("heavy_tokens", "recent_tokens", "heavy_ratio", "recent_ratio", "device_ratio")
_SAMPLE = 1024  # elements of each parameter


def fingerprint(model: Any, options: RowsOptions) -> dict[str, Any]:
    """Names and values that JSON can hold."""
    policy = options.row.policy
    facts: dict[str, Any] = {
        "model_type": model.config.model_type,
        "weights": weights_sum(model),
        "layers": options.num_layers,
        "kv_heads": options.num_kv_heads,
        "ranks": options.group.size if options.group is not None else 1,
        "max_tokens": options.row.max_tokens,
        "page_tokens": options.page_tokens,
        "kv_dtype": options.kv_dtype or str(model.dtype),
        "policy": policy.policy,
    }
    facts |= {f"policy.{name}": getattr(policy, name) for name in (*POLICY_FIELDS, *_BUDGET_FIELDS)}
    facts |= {f"recall.{name}": getattr(policy.recall, name) for name in (*RECALL_FIELDS, "enabled", "all")}
    return facts


def weights_sum(model: Any) -> int:
    """A checksum over the beginning of each parameter: other weights give other K and V."""
    total = 0
    for _, parameter in sorted(model.named_parameters(), key=lambda named: named[0]):
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        sample = local.flatten()[:_SAMPLE].contiguous().view(torch.uint8).cpu()
        total = zlib.crc32(sample.numpy().tobytes(), total)
    return total


def check_same(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """ValueError naming the first field that differs."""
    for name in sorted({*saved, *here}):
        if saved.get(name) != here.get(name):
            raise ValueError(f"the session was saved with {name} {saved.get(name)!r}, here it is {here.get(name)!r}")
