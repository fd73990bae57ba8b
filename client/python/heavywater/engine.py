"""The worker library in this process: attention over a bounded cache, for a caller that brings its own Q, K and V.

    device = LocalDevice(num_threads=2)
    shape = AttentionShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64, dtype="fp32")
    engine = AttentionEngine(device, shape)
    engine.open(1, preset("h2o"), prompt_tokens=100, max_tokens=200)
    engine.begin([EngineItem(1, Phase.PROMPT_LAST, 0, 100)])
    for layer in range(2):
        engine.attend(layer, q[layer], k[layer], v[layer], out[layer])  # [100, heads, 64], float32
    engine.end()

A step is `begin`, `attend` for each layer in order, `end`. Every call raises HeavywaterError: one that is refused
(INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, OUT_OF_RANGE) changes nothing. More in
worker/rank/attention_engine.h.

Arrays: C-contiguous float32 in the device's memory, of anything that speaks DLPack or the buffer protocol (numpy,
torch). They are used where they lie: read once by `attend`, which stores K and V as `shape.dtype` says. Other types and
strides are refused with TypeError, those of another device with INVALID_ARGUMENT, and not converted in silence. On a
GPU they must be finished before (torch.cuda.current_stream().synchronize()), and `out` is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from heavywater._engine import EngineGroup as _EngineGroup
    from heavywater._engine import LocalDevice as _LocalDevice
    from heavywater._engine import LocalEngine as _LocalEngine
    from heavywater._engine import Phase, PolicyOptions, RecallOptions, SequenceStats, preset
except ModuleNotFoundError as error:
    if error.name != "heavywater._engine":
        raise
    raise ModuleNotFoundError(
        "heavywater.engine wants the compiled module heavywater._engine: install the wheel that deploy/local/wheel "
        "builds, or run within deploy/local/run (pip install ./client/python has none)",
        name=error.name,
    ) from error
from heavywater.attention_types import AttentionShape

__all__ = [
    "AttentionEngine",
    "AttentionShape",
    "EngineGroup",
    "EngineItem",
    "KeptSet",
    "LocalDevice",
    "Phase",
    "PolicyOptions",
    "RecallOptions",
    "SequenceStats",
    "preset",
]

DEFAULT_HOST_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class EngineItem:
    """New tokens of one sequence in a step."""

    sequence: int
    phase: Phase
    first_position: int  # must be the number of tokens that the sequence has taken in
    num_tokens: int = 1


@dataclass(frozen=True)
class KeptSet:
    """What one layer keeps on the device: `kv_head` -1 where all heads share the set."""

    layer: int
    kv_head: int
    positions: npt.NDArray[np.int64]  # ascending
    scores: npt.NDArray[np.int64]  # of each, attention mass in units of 2^-32


class LocalDevice:
    """The device and the host memory that engines of this process share; their calls take turns."""

    def __init__(
        self,
        *,
        device: str = "cpu",
        num_threads: int = 1,
        target: str = "best",
        host_memory_bytes: int = DEFAULT_HOST_MEMORY_BYTES,
    ) -> None:
        """`device`: "cpu", or "cuda:0" and so on, FAILED_PRECONDITION where this module has no CUDA or the machine no
        such GPU. Of the CPU: `num_threads`, and `target`, "best", "avx2" or "avx512". `host_memory_bytes` limits what
        holds demoted tokens, of all engines; with 0 nothing is demoted: what leaves the device is dropped."""
        self._device = _LocalDevice(device, num_threads, target, host_memory_bytes)

    @property
    def host_bytes(self) -> int:
        """Of the pages that sequences have reserved."""
        return self._device.host_bytes


class EngineGroup:
    """The ranks of a tensor-parallel model, this process being one of them: their engines reduce scores over TCP."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        put: Callable[[str, bytes], None],
        wait: Callable[[str, float], bytes],
        listen_address: str = "127.0.0.1",
        timeout_s: float = 30.0,
    ) -> None:
        """Returns when all ranks have connected. `put(key, value)` and `wait(key, seconds)`: a store that all ranks
        see. `listen_address`: where the others reach this rank. `timeout_s`: of every collective, too.
        DEADLINE_EXCEEDED or UNAVAILABLE names what was missing."""
        self._group = _EngineGroup(rank, size, put, wait, listen_address, timeout_s)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size


class AttentionEngine:
    """One rank, with its heads of a model: all of them where `group` is None. The ranks of a group make the same calls
    in the same order. Sequences of all engines of a device have different ids, above 0."""

    def __init__(
        self,
        device: LocalDevice,
        shape: AttentionShape,
        *,
        attention_scale: float = 0.0,
        page_tokens: int = 256,
        max_step_tokens: int = 512,
        device_memory_bytes: int = 0,
        group: EngineGroup | None = None,
    ) -> None:
        """`shape` has this rank's heads, the others as many each. `attention_scale` of the logits, 0: 1 /
        sqrt(head_dim). `max_step_tokens`: rows of a step, but for a prompt that is alone. `device_memory_bytes`: a
        limit that sequences are admitted under, 0: none."""
        self.shape = shape
        self._engine = _LocalEngine(
            device._device,
            num_layers=shape.num_layers,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            page_tokens=page_tokens,
            attention_scale=attention_scale,
            max_step_tokens=max_step_tokens,
            device_memory_bytes=device_memory_bytes,
            group=None if group is None else group._group,
        )

    def open(
        self,
        sequence: int,
        policy: PolicyOptions,
        *,
        prompt_tokens: int,
        max_tokens: int,
        prompt_in_steps: bool = False,
        drop_when_host_full: bool = False,
    ) -> None:
        """Admits a sequence of `prompt_tokens` and at most `max_tokens` in all. `prompt_in_steps`: its prompt comes in
        several steps, PROMPT and at last PROMPT_LAST, and all layers stay whole until then. RESOURCE_EXHAUSTED names
        need and limit."""
        self._engine.open(sequence, policy, prompt_tokens, max_tokens, prompt_in_steps, drop_when_host_full)

    def fork(self, sequence: int, source_engine: AttentionEngine, source: int) -> None:
        """Opens `sequence` in the state of `source`, a sequence of `source_engine` (of the same device and shape; it
        may be this engine) whose prompt has ended: both go on from there, bit for bit as one would."""
        self._engine.fork(sequence, source_engine._engine, source)

    def save_state(self, sequence: int) -> bytes:
        """The state between two steps, for `load_state` of this version in any process. FAILED_PRECONDITION before the
        prompt's end, and for policies whose state cannot be saved (scissorhands, adaptive head budgets)."""
        return self._engine.save_state(sequence)

    def read_page(self, sequence: int, page: int) -> bytes:
        """The host page of `page_tokens` positions, all layers and heads of this rank. NOT_FOUND without a copy."""
        return self._engine.read_page(sequence, page)

    def load_state(
        self,
        sequence: int,
        policy: PolicyOptions,
        *,
        prompt_tokens: int,
        max_tokens: int,
        state: bytes,
        pages: Sequence[bytes],
        tokens_seen: int,
    ) -> None:
        """Opens `sequence` in a state that was saved of one with the same options and shape; `pages`: with recall, of
        all its tokens. DATA_LOSS: the bytes do not fit."""
        self._engine.load_state(sequence, policy, prompt_tokens, max_tokens, state, list(pages), tokens_seen)

    def truncate(self, sequence: int, tokens: int) -> None:
        """As if only the first `tokens` had come. FAILED_PRECONDITION where the policy forgets: then fork before."""
        self._engine.truncate(sequence, tokens)

    def close(self, sequence: int) -> None:
        """Frees what the sequence holds, its pages in host memory included."""
        self._engine.close(sequence)

    def begin(self, items: Sequence[EngineItem]) -> None:
        """Begins a step; rows of `attend` are the items', in their order."""
        self._engine.begin([(item.sequence, item.phase, item.first_position, item.num_tokens) for item in items])

    def attend(self, layer: int, queries: Any, keys: Any, values: Any, out: Any) -> None:
        """Appends the layer's K and V, attends, writes `out`.

        `queries`, `out`: [rows, query heads, head_dim]; `keys`, `values`: [rows, KV heads, head_dim]; rotated where the
        model rotates. A prompt that is alone may bring its rows in several calls."""
        self._engine.attend(layer, queries, keys, values, out)

    def end(self) -> None:
        """Ends the step and plans. Raises what the first failing item failed with: its sequence is as before the step
        (a prompt cannot go on), the others have gone on."""
        self._engine.end()

    def abandon(self) -> None:
        """Ends a step early: no sequence has advanced; prompts in it cannot go on. Nothing outside a step."""
        self._engine.abandon()

    def stats(self, sequence: int) -> SequenceStats:
        """Tokens seen, resident, demoted and dropped, bytes, recall."""
        return self._engine.stats(sequence)

    def kept(self, sequence: int) -> list[KeptSet]:
        """The residents of every layer and set, once the prompt has ended."""
        return [
            KeptSet(layer, kv_head, np.asarray(positions, np.int64), np.asarray(scores, np.int64))
            for layer, kv_head, positions, scores in self._engine.kept(sequence)
        ]

    def read_kv(self, sequence: int, layer: int, kv_head: int, position: int) -> bytes:
        """K and then V of one position, resident or demoted, as stored."""
        return self._engine.read_kv(sequence, layer, kv_head, position)

    @property
    def kv_bytes(self) -> int:
        """On the device now: slots, scores, tables, sketches, and a running prompt's whole layer."""
        return self._engine.kv_bytes

    @property
    def peak_kv_bytes(self) -> int:
        """The most that `kv_bytes` has been."""
        return self._engine.peak_kv_bytes
