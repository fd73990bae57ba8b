"""Assisted decoding with a policy that forgets: its first candidates come behind the prompt, in one forward pass, and
must not be compressed with it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from heavywater.hf.cache import HeavywaterCache

_BY_COLUMN = ("input_ids", "position_ids")  # the last dimension of each


def split_first_passes(model_class: Any) -> None:
    """From now on a forward pass of this class that brings more than the announced prompt to an empty cache is two: the
    prompt, which the policy compresses, and what follows it, which can be taken back. Nor is what a cache has taken in
    taken in again."""
    forward = model_class.forward
    if getattr(forward, "_heavywater", False):
        return

    @functools.wraps(forward)
    def splitting(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache, ids = kwargs.get("cache", kwargs.get("past_key_values")), kwargs.get("input_ids")
        if args or not isinstance(cache, HeavywaterCache) or ids is None:
            return forward(self, *args, **kwargs)
        if cache.get_seq_length() > 0:
            return forward(self, **_new_columns(kwargs, cache.get_seq_length()))
        columns = cache.rows.prompt_columns
        if cache.keeps_all or columns is None or columns >= ids.shape[1]:
            return forward(self, **kwargs)
        prompt = forward(self, **_part(kwargs, slice(0, columns), 1))
        output = forward(self, **_part(kwargs, slice(columns, None), ids.shape[1] - columns))
        return _joined(prompt, output)

    splitting._heavywater = True  # type: ignore[attr-defined]
    model_class.forward = splitting


def _new_columns(kwargs: dict[str, Any], seen: int) -> dict[str, Any]:
    """Assisted decoding (of one row) in Transformers 5.24 brings a further turn's whole text again, which `generate`
    otherwise does not: its positions then begin anew."""
    ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
    if positions is None or positions.shape != ids.shape or ids.shape[0] != 1 or ids.shape[1] <= seen:
        return kwargs
    if int(positions[0, 0]) != 0:
        return kwargs
    return kwargs | {name: kwargs[name][..., seen:] for name in _BY_COLUMN}


def _part(kwargs: dict[str, Any], columns: slice, logits: int) -> dict[str, Any]:
    part = dict(kwargs)
    for name in _BY_COLUMN:
        if part.get(name) is not None:
            part[name] = part[name][..., columns]
    if part.get("attention_mask") is not None:
        part["attention_mask"] = part["attention_mask"][:, : columns.stop]  # of what came before, too
    if "logits_to_keep" in part:
        part["logits_to_keep"] = logits
    return part


def _joined(prompt: Any, output: Any) -> Any:
    """As if one pass had given both."""
    output.logits = torch.cat([prompt.logits, output.logits], dim=1)
    if output.get("hidden_states") is not None:
        pairs = zip(prompt.hidden_states, output.hidden_states, strict=True)
        output.hidden_states = tuple(torch.cat(pair, dim=1) for pair in pairs)
    return output
