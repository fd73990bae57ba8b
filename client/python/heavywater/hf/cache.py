"""The cache that Transformers is given: its layers hold nothing, the engines of BatchRows hold all."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from heavywater.engine import KeptSet, LocalDevice
from heavywater.hf.rows import BatchRows, RowsOptions
from heavywater.hf.saving import Saver

# On a K that `update` returned: the layer whose attention it is for.
LAYER_OF_KEYS = "_heavywater_layer"


@dataclass(frozen=True)
class CacheStats:
    """All rows of the batch together; tokens without padding, residents as the mean over layers."""

    tokens_seen: int
    tokens_resident: int
    tokens_demoted: int
    tokens_dropped: int
    kv_bytes: int  # on the device now: slots, scores, tables, sketches
    peak_kv_bytes: int  # the prompt's whole layer included; summed over the rows' peaks
    host_bytes: int  # pages of demoted tokens
    recall_reads: int
    promoted: int


class HeavywaterCache(Cache):  # type: ignore[misc]
    """A cache of fixed size on the device. Made by `attach`; one batch at a time, `reset()` begins another.

    `get_seq_length` counts tokens seen (padding included), `get_mask_sizes` residents.
    """

    def __init__(self, device: LocalDevice, options: RowsOptions, saver: Saver | None = None) -> None:
        self._rows = BatchRows(device, options)
        self._broken: str | None = None
        self._saver = saver
        super().__init__(layers=[HeavywaterLayer(self, layer) for layer in range(options.num_layers)])

    def expect_prompt(self, columns: int) -> None:
        """Says how long the prompt is, padding included, where it comes in chunks: budgets are ratios of it.

        `generate` of a model that was attached says so itself. Only for an empty cache; nothing otherwise."""
        if self._rows.columns == 0 and not self._rows.in_step:
            self._rows.prompt_columns = columns

    def attend(self, layer: int, queries: Any, keys: Any, values: Any, padding: Any, scale: float) -> Any:
        """What the attention function calls; as BatchRows.attend()."""
        self.check_usable()
        try:
            out = self._rows.attend(layer, queries, keys, values, padding, scale)
            if self._saver is not None and not self._rows.in_step:
                self._saver.write_through(self._rows)
            return out
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    def fail(self, reason: str) -> None:
        """A step has failed. Layers before the failing one have taken its tokens in: the batch cannot go on."""
        self._broken = reason

    def check_usable(self) -> None:
        """RuntimeError once a step has failed."""
        if self._broken is not None:
            raise RuntimeError(
                f"this cache cannot go on after a failed step ({self._broken}); call cache.reset() first"
            )

    @property
    def rows(self) -> BatchRows:
        return self._rows

    def stats(self) -> CacheStats:
        """Tokens and bytes now."""
        ended = [row.engine.stats(row.sequence) for row in self._rows.rows if row.prompt_done]
        engines = [row.engine for row in self._rows.rows]
        return CacheStats(
            tokens_seen=sum(row.taken for row in self._rows.rows),
            tokens_resident=sum(stats.tokens_resident for stats in ended),
            tokens_demoted=sum(stats.tokens_demoted for stats in ended),
            tokens_dropped=sum(stats.tokens_dropped for stats in ended),
            kv_bytes=sum(engine.kv_bytes for engine in engines),
            peak_kv_bytes=sum(engine.peak_kv_bytes for engine in engines),
            host_bytes=self._rows.device.host_bytes,
            recall_reads=sum(stats.recall_reads for stats in ended),
            promoted=sum(stats.promoted for stats in ended),
        )

    def kept(self, row: int = 0) -> list[KeptSet]:
        """What each layer of one row keeps on the device; positions count the row's tokens without padding."""
        sequence = self._rows.rows[row]
        return sequence.engine.kept(sequence.sequence)

    def reset(self) -> None:
        """Forgets the batch and frees its memory."""
        self._rows.close()
        self._broken = None
        for layer in self.layers:
            layer.columns = 0
            layer.pending = False

    def crop(self, tokens_to_remove: int) -> None:
        """As if the last -`tokens_to_remove` columns had never come: exactly, since the state from before is gone back
        to. All of them: as `reset()`. Policy "full" takes any back; others those that `crop_tokens` of attach() says,
        or once past recording is active those of the last step; NotImplementedError for more."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): want a negative number, of the tokens to remove, or 0")
        self.check_usable()
        columns = -tokens_to_remove
        if columns == 0:
            return
        if columns >= self.get_seq_length():
            self.reset()
            return
        with self._failing():
            self._rows.crop(columns)
        for layer in self.layers:
            layer.columns -= columns

    @property
    def has_session(self) -> bool:
        return self._saver is not None

    def commit(self) -> None:
        """Writes the batch to the session at the cache service, for attach(..., resume=True) in any process: as
        `generate` does when it has ended. HeavywaterError: the commit before is still good."""
        if self._saver is None:
            raise RuntimeError("this cache has no session, want service and session of attach()")
        self.check_usable()
        self._saver.commit(self._rows)

    def resume(self) -> None:
        """Goes on from the session's last commit, instead of from nothing. What attach(..., resume=True) does."""
        if self._saver is None or self._rows.rows:
            raise RuntimeError("an empty cache with a session can resume")
        with self._failing():
            self._saver.resume(self._rows)
        for layer in self.layers:
            layer.columns = self._rows.columns

    def activate_past_recording(self) -> None:
        """From now on the last step can be taken back, as assisted decoding wants it."""
        self._rows.record_past()

    @property
    def keeps_all(self) -> bool:
        """Whether the policy forgets nothing."""
        return self._rows.options.row.policy.policy == "full"

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i goes on from where row beam_idx[i] is: beams that split are copied."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, side by side."""
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}, want 1 or more")
        self._select([row for row in range(len(self._rows.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps the rows of `indices` (numbers, or a mask) in their order."""
        chosen = torch.as_tensor(indices)
        self._select((torch.nonzero(chosen).flatten() if chosen.dtype == torch.bool else chosen).tolist())

    def _select(self, indices: list[int]) -> None:
        self.check_usable()
        with self._failing():
            self._rows.select(indices)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error that is no refusal leaves rows that do not belong together."""
        try:
            yield
        except (NotImplementedError, IndexError):
            raise
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise


class HeavywaterLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer as Transformers sees it. K and V pass through; the attention function takes them from there."""

    is_sliding = False
    supports_early_init = False

    @property
    def is_croppable(self) -> bool:
        """Whether the last step can be taken back."""
        return self.cache.rows.croppable

    def __init__(self, cache: HeavywaterCache, layer: int) -> None:
        super().__init__()
        # No cycle: slots, pages and threads go with the last reference to the cache, not when
        # Python's collector comes by.
        self._cache = weakref.ref(cache)
        self.layer = layer
        self.columns = 0
        self.pending = False  # K and V have come, their attention has not
        self.is_initialized = True

    @property
    def cache(self) -> HeavywaterCache:
        cache = self._cache()
        if cache is None:
            raise RuntimeError("the HeavywaterCache of this layer is gone; keep a reference to it")
        return cache

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing: rows are made by the first attention, which knows Q, too."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns what it was given: earlier K and V stay where they are."""
        self.cache.check_usable()
        if self.pending:
            raise RuntimeError(
                f"the attention of layer {self.layer} did not come to this cache: the model must use attention "
                'implementation "heavywater", as heavywater.hf.attach() sets it'
            )
        self.pending = True
        self.columns += key_states.shape[2]
        setattr(key_states, LAYER_OF_KEYS, self)
        return key_states, value_states

    def attend(self, queries: Any, keys: Any, values: Any, padding: Any, scale: float) -> Any:
        """Attention to all that this layer has taken in; as BatchRows.attend()."""
        out = self.cache.attend(self.layer, queries, keys, values, padding, scale)
        self.pending = False
        return out

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Residents and new tokens; where they would begin if they were the last ones."""
        rows = [row for row in self.cache.rows.rows if row.prompt_done]
        residents = max((row.engine.stats(row.sequence).tokens_resident for row in rows), default=self.columns)
        return residents + query_length, self.columns - residents

    def get_max_length(self) -> int:
        return self.cache.rows.options.row.max_tokens
