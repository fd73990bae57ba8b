"""The attention implementation "heavywater": what a HeavywaterCache has taken in is attended by its engine, anything
else by Transformers' own function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from heavywater.hf.cache import LAYER_OF_KEYS

NAME = "heavywater"

# What models pass to attention and changes its result, beyond scaling: not served.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass(frozen=True)
class MaskRequest:
    """What a forward pass asks of its mask. The engine needs the padding alone; a dense mask is made on demand."""

    padding: Any  # [B][columns] bool, or None
    arguments: dict[str, Any]

    def dense(self) -> Any:
        return sdpa_mask(**self.arguments)


def mask(*, attention_mask: Any = None, **arguments: Any) -> MaskRequest:
    """The mask builder, as AttentionMaskInterface wants it."""
    return MaskRequest(attention_mask, {"attention_mask": attention_mask, **arguments})


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Any, None]:
    """The attention function, as AttentionInterface wants it. No weights are returned."""
    layer = getattr(key, LAYER_OF_KEYS, None)
    if layer is None:
        dense = attention_mask.dense() if isinstance(attention_mask, MaskRequest) else attention_mask
        out, _ = sdpa_attention_forward(module, query, key, value, dense, scaling=scaling, **kwargs)
        return out, None
    problem = _problem(module, attention_mask, kwargs)
    if problem is not None:
        layer.cache.fail(problem)
        raise ValueError(problem)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.attend(query, key, value, attention_mask.padding, scale), None


def _problem(module: Any, attention_mask: Any, kwargs: dict[str, Any]) -> str | None:
    """Why this attention cannot be served."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            return f"{type(module).__name__} attends with {name}, which is not served"
    if module.training:
        return "a HeavywaterCache is for inference, but the model is in training mode; call model.eval()"
    if not isinstance(attention_mask, MaskRequest):
        return f"attention_mask is {type(attention_mask).__name__}, want [batch, tokens] with 0 for padding"
    return None


def register() -> None:
    """Makes "heavywater" known to Transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
