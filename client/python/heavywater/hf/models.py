"""Which models are served: those whose attention is a plain softmax over the keys that the cache was given."""

from __future__ import annotations

from typing import Any

# Tested, each against Transformers' own cache (tests/client/hf). K comes rotated where the model rotates, so learned
# positions (OPT) and partial rotary (GPT-NeoX) are all the same here.
SUPPORTED = ("gemma", "gpt_neox", "llama", "mistral", "opt", "qwen2", "qwen3")


class UnsupportedModelError(ValueError):
    """The model's attention cannot be served: names the model and why."""


def check_supported(model: Any) -> None:
    """UnsupportedModelError unless the model is one of SUPPORTED."""
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in SUPPORTED:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {kind!r}) is not served, want one of: {', '.join(SUPPORTED)}"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} caps attention logits (attn_logit_softcapping), not served"
        )


def kv_heads(config: Any) -> int:
    """KV heads of a layer."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def context_limit(config: Any) -> int:
    """Tokens for which the model's attention is exact: its trained positions, and within a sliding window if it has one
    (beyond it the model itself would forget, which the cache does not do)."""
    limits = [getattr(config, "max_position_embeddings", None), getattr(config, "sliding_window", None)]
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        limits.pop()
    return min((limit for limit in limits if limit is not None), default=1 << 17)
