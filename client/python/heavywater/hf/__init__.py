"""Heavywater for Transformers: a cache of fixed size on the device, in one line.

cache = heavywater.hf.attach(model, policy="snapkv_h2o", heavy_ratio=0.1, recent_ratio=0.1, recall=True)
model.generate(**inputs, past_key_values=cache)

Needs torch and transformers (5.x), and the module that `deploy/local/setup` builds. docs/transformers.md says what is
supported.
"""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"heavywater.hf wants {error.name}, which is not installed: the extra [hf] of ./client/python, or of "
        "the wheel, has what it needs",
        name=error.name,
    ) from error

from heavywater.hf.attach import attach
from heavywater.hf.cache import CacheStats, HeavywaterCache
from heavywater.hf.models import UnsupportedModelError

__all__ = ["CacheStats", "HeavywaterCache", "UnsupportedModelError", "attach"]
