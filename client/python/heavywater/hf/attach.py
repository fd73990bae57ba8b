"""`attach`: one line in a script that uses Transformers."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import torch

from heavywater.blobs import BlobClient
from heavywater.engine import DEFAULT_HOST_MEMORY_BYTES, LocalDevice
from heavywater.errors import HeavywaterError
from heavywater.hf.attention import NAME, register
from heavywater.hf.cache import HeavywaterCache
from heavywater.hf.candidates import split_first_passes
from heavywater.hf.fingerprint import fingerprint
from heavywater.hf.models import UnsupportedModelError, check_supported, context_limit, kv_heads
from heavywater.hf.policy import policy_options
from heavywater.hf.rows import RowsOptions
from heavywater.hf.saving import Saver
from heavywater.hf.sequence import RowOptions
from heavywater.hf.session import Session
from heavywater.hf.tensor_parallel import group_of

_MOST_THREADS = 256  # that a LocalDevice takes


def attach(
    model: Any,
    *,
    policy: str = "snapkv_h2o",
    max_tokens: int | None = None,
    host_memory_bytes: int | None = None,
    device_memory_bytes: int = 0,
    num_threads: int | None = None,
    kv_dtype: str | None = None,
    max_step_tokens: int = 2048,
    page_tokens: int = 256,
    crop_tokens: int | None = None,
    service: str | None = None,
    session: str | None = None,
    resume: bool = False,
    **options: Any,
) -> HeavywaterCache:
    """Lets `model` attend through a cache of fixed size, and makes such a cache.

    `policy`: a preset ("full", "h2o", "snapkv_h2o", "recall", ...), changed by heavy_ratio, recent_ratio (of the
    prompt), heavy_tokens, recent_tokens, recall (True or "all") and further options (heavywater.hf.policy).
    `max_tokens`: of a row, all turns together; None: the model's context. `host_memory_bytes` for tokens that have left
    the device; None: 4 GiB with recall, else none. `device_memory_bytes`: a limit for each row, 0: none. `num_threads`:
    of attention, None: torch's. `kv_dtype`: "fp32", "bf16" or "fp16", None: as the model's. `max_step_tokens`: the most
    tokens of a later turn. `crop_tokens`: the last so many can be taken back by `crop`, exactly, for up to three copies
    of the bounded cache and Q, K and V of twice as many tokens; policy "full" takes any tokens back without.

    `service`: the address (host:port) of a running cache service, to which the cache is written under the name
    `session` (HeavywaterCache.commit); `resume`: it goes on from there, in this process or another, else it begins
    anew.

    The model works as before without such a cache. UnsupportedModelError names a model that cannot be served.
    """
    _prepare(model)
    config = model.config
    chosen = policy_options(policy, **options)
    if host_memory_bytes is None:
        host_memory_bytes = DEFAULT_HOST_MEMORY_BYTES if chosen.recall.enabled else 0
    limit = context_limit(config)
    window = getattr(config, "sliding_window", None)
    if max_tokens is not None and max_tokens > limit and limit == window:
        raise ValueError(
            f"max_tokens is {max_tokens}, want at most {limit}, the model's sliding_window: beyond it the model "
            "forgets, which the cache does not do"
        )
    if crop_tokens is not None and crop_tokens < 0:
        raise ValueError(f"crop_tokens is {crop_tokens}, want 0 (the last step's) or more, or None")
    threads = num_threads or min(torch.get_num_threads(), _MOST_THREADS)
    device = LocalDevice(device=_device_of(model), num_threads=threads, host_memory_bytes=host_memory_bytes)
    rows = RowsOptions(
        row=RowOptions(policy=chosen, max_tokens=max_tokens or limit, crop_tokens=crop_tokens),
        num_layers=config.num_hidden_layers,
        num_kv_heads=kv_heads(config),
        max_step_tokens=max_step_tokens,
        page_tokens=page_tokens,
        device_memory_bytes=device_memory_bytes,
        kv_dtype=kv_dtype,
        group=group_of(model),
    )
    if service is None:
        if session is not None or resume:
            raise ValueError("session and resume are of a cache service, want service, its host:port")
        return HeavywaterCache(device, rows)
    return _with_session(model, device, rows, service, session, resume)


def _device_of(model: Any) -> str:
    """As LocalDevice names it."""
    device = torch.device(model.device)
    return f"{device.type}:{device.index or 0}" if device.type == "cuda" else device.type


def _with_session(
    model: Any, device: LocalDevice, rows: RowsOptions, service: str, session: str | None, resume: bool
) -> HeavywaterCache:
    if rows.group is not None:
        raise UnsupportedModelError("service is not served for a model that is split over ranks (tp_plan)")
    if session is None:
        raise ValueError("service wants a session, the name under which the cache is kept there")
    saver = Saver(Session(BlobClient(service), session), fingerprint(model, rows))
    cache = HeavywaterCache(device, rows, saver)
    if resume:
        cache.resume()
    else:
        saver.begin()
    return cache


def _prepare(model: Any) -> None:
    """What a model needs once: its attention, and `generate` that announces prompts."""
    check_supported(model)
    register()
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedModelError(f"{type(model).__name__} does not take another attention implementation")
    announce_prompts(type(model))
    split_first_passes(type(model))


def announce_prompts(model_class: Any) -> None:
    """From now on `generate` of this class tells a HeavywaterCache how long the prompt is, which chunks do not. (The
    class: a copy of a model must not call the model that it is a copy of.)"""
    generate = model_class.generate
    if getattr(generate, "_heavywater", False):
        return

    @functools.wraps(generate)
    def announcing(self: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        announce_prompt(inputs, kwargs)
        generated = generate(self, inputs, *args, **kwargs)
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        if isinstance(cache, HeavywaterCache) and cache.has_session:
            try:
                cache.commit()
            except HeavywaterError as error:  # the answer is there all the same
                warnings.warn(f"the session was not committed: {error}", RuntimeWarning, stacklevel=2)
        return generated

    announcing._heavywater = True  # type: ignore[attr-defined]
    model_class.generate = announcing


def announce_prompt(inputs: Any, kwargs: dict[str, Any]) -> None:
    """From the arguments of `generate`; refuses a cache that cannot go on before anything runs."""
    cache = kwargs.get("past_key_values", kwargs.get("cache"))
    if not isinstance(cache, HeavywaterCache):
        return
    cache.check_usable()
    for prompt in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if prompt is not None:
            cache.expect_prompt(prompt.shape[1])
            break


def cache_argument(model_class: Any) -> str:
    """What this version of Transformers calls a model's cache."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"
