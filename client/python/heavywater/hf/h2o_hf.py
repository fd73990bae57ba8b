"""The form of the H2O paper's own code: a model class whose `generate` evicts, without further arguments.

from heavywater.hf.h2o_hf import H2OLlamaForCausalLM
model = H2OLlamaForCausalLM.from_pretrained(NAME_OR_PATH, heavy_ratio=0.1, recent_ratio=0.1)
model.generate(**inputs)

Policy h2o: scores over the whole prompt, one token out for each that comes in, no recall; heavy and recent tokens are
ratios of the prompt. K and V of evicted tokens are freed, not masked.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import (
    GemmaForCausalLM,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    OPTForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from heavywater.hf.attach import announce_prompt, attach, cache_argument
from heavywater.hf.cache import HeavywaterCache

__all__ = [
    "H2OGPTNeoXForCausalLM",
    "H2OGemmaForCausalLM",
    "H2OLlamaForCausalLM",
    "H2OMistralForCausalLM",
    "H2OOPTForCausalLM",
    "H2OQwen2ForCausalLM",
    "H2OQwen3ForCausalLM",
]


class _H2OMixin:
    """`from_pretrained` with the ratios, and `generate` with a fresh cache of them."""

    _h2o_options: ClassVar[dict[str, Any]] = {"policy": "h2o", "heavy_ratio": 0.1, "recent_ratio": 0.1}
    last_cache: HeavywaterCache | None = None  # of the last `generate` that made its own

    @classmethod
    def from_pretrained(cls, *args: Any, heavy_ratio: float = 0.1, recent_ratio: float = 0.1, **kwargs: Any) -> Any:
        """As Transformers', with the shares of the prompt that stay: the highest scores, and the last tokens."""
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._h2o_options = {"policy": "h2o", "heavy_ratio": heavy_ratio, "recent_ratio": recent_ratio}
        attach(model, **model._h2o_options)  # refuses now what it would refuse at the first `generate`
        return loaded

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Transformers', with a new cache unless one is passed or `use_cache` is false."""
        given = kwargs.get("past_key_values") is not None or kwargs.get("cache") is not None
        if not given and kwargs.get("use_cache", True):
            self.last_cache = attach(self, **self._h2o_options)
            kwargs[cache_argument(type(self))] = self.last_cache
        announce_prompt(inputs, kwargs)
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    generate._heavywater = True  # type: ignore[attr-defined]


class H2OLlamaForCausalLM(_H2OMixin, LlamaForCausalLM):  # type: ignore[misc]
    """LlamaForCausalLM that keeps heavy hitters and recent tokens."""


class H2OMistralForCausalLM(_H2OMixin, MistralForCausalLM):  # type: ignore[misc]
    """MistralForCausalLM that keeps heavy hitters and recent tokens."""


class H2OQwen2ForCausalLM(_H2OMixin, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2ForCausalLM that keeps heavy hitters and recent tokens."""


class H2OQwen3ForCausalLM(_H2OMixin, Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3ForCausalLM that keeps heavy hitters and recent tokens."""


class H2OGemmaForCausalLM(_H2OMixin, GemmaForCausalLM):  # type: ignore[misc]
    """GemmaForCausalLM that keeps heavy hitters and recent tokens."""


class H2OOPTForCausalLM(_H2OMixin, OPTForCausalLM):  # type: ignore[misc]
    """OPTForCausalLM that keeps heavy hitters and recent tokens."""


class H2OGPTNeoXForCausalLM(_H2OMixin, GPTNeoXForCausalLM):  # type: ignore[misc]
    """GPTNeoXForCausalLM that keeps heavy hitters and recent tokens."""
