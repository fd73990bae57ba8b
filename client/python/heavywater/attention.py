"""Attention over a bounded cache, for an engine that brings its own Q, K and V: AttentionService of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from heavywater.attention_rank import AttentionRank
from heavywater.attention_types import AttentionItem, AttentionShape, ItemStatus, Kept
from heavywater.errors import HeavywaterError
from heavywater.security import Security
from heavywater.v1 import attention_pb2, common_pb2

Floats = npt.NDArray[np.float32]
Result = TypeVar("Result")


@dataclass(frozen=True)
class OpenedAttention:
    """A sequence on all ranks. Bytes are summed over them."""

    sequence_id: int
    budget: common_pb2.ResolvedBudget
    prompt_bytes: int


class AttentionClient:
    """Drives all ranks of a worker group that was started with `model: none`.

    `workers`: host:port of each rank, in order. Arrays are the whole model's; each rank
    gets its heads. Every call raises HeavywaterError; one that is refused changes
    nothing. One thread.

        shape = AttentionShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64)
        with AttentionClient(["127.0.0.1:7701"], shape) as engine:
            opened = engine.open(PolicyOptions(policy="recall"), prompt_tokens=1000, max_tokens=2000)
            out = engine.prompt(opened.sequence_id, q, k, v)  # [num_layers, 1000, heads, head_dim]
            out = engine.step([AttentionItem(opened.sequence_id, DECODE, 1000)], q1, k1, v1)
    """

    def __init__(
        self,
        workers: Sequence[str],
        shape: AttentionShape,
        *,
        group: str = "default",
        timeout_s: float = 30.0,
        security: Security | None = None,
    ) -> None:
        """Attaches to every rank; `timeout_s` bounds each call but those of the stream, which wait for all ranks.

        `security`: TLS and the token, which is a worker's; None: Security.from_environment().
        """
        security = Security.from_environment() if security is None else security
        self.shape = shape
        self._channels = [security.channel(worker, [("grpc.enable_retries", 0)]) for worker in workers]
        self._pool = ThreadPoolExecutor(max_workers=len(workers))
        self._ranks: list[AttentionRank] = []
        try:
            for rank, channel in enumerate(self._channels):
                request = attention_pb2.AttachEngineRequest(
                    group=group,
                    rank=rank,
                    size=len(workers),
                    num_layers=shape.num_layers,
                    num_query_heads=shape.num_query_heads,
                    num_kv_heads=shape.num_kv_heads,
                    head_dim=shape.head_dim,
                    dtype=shape.dtype,
                )
                self._ranks.append(AttentionRank(channel, request, timeout_s))
        except HeavywaterError:
            self.disconnect()
            raise

    @property
    def max_step_tokens(self) -> int:
        """Rows of a step, but for a prompt that is alone."""
        return min(rank.attached.max_step_tokens for rank in self._ranks)

    def disconnect(self) -> None:
        """Ends the streams, which closes the sequences, and the connections."""
        for rank in self._ranks:
            rank.end_stream()
        self._pool.shutdown()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> AttentionClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def open(
        self,
        policy: common_pb2.PolicyOptions | None = None,
        *,
        prompt_tokens: int,
        max_tokens: int,
        prompt_in_steps: bool = False,
        tenant: str = "",
    ) -> OpenedAttention:
        """A sequence, on every rank or on none. `prompt_in_steps`: its prompt comes part by part through all layers."""
        request = attention_pb2.OpenAttention(
            policy=policy,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            prompt_in_steps=prompt_in_steps,
            tenant=tenant,
        )
        opened = [answer.opened for answer in self._all(lambda rank: rank.call(open=request))]
        return OpenedAttention(opened[0].sequence_id, opened[0].budget, sum(one.prompt_bytes for one in opened))

    def close(self, sequence_id: int) -> None:
        """Frees the sequence; its pages live on at the cache service until its lease ends."""
        request = attention_pb2.CloseAttention(sequence_id=sequence_id)
        self._all(lambda rank: rank.call(close=request))

    def begin(self, items: Sequence[AttentionItem]) -> list[ItemStatus]:
        """Begins a step. What is not ok() cannot run on some rank, and will fail on all of them."""
        request = attention_pb2.BeginStep(items=[item.to_proto() for item in items])
        answers = self._all(lambda rank: rank.call(begin=request))
        return _first_failures([answer.begun.items for answer in answers])

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """One layer of the step: q [rows, query heads, head_dim], k and v [rows, KV heads, head_dim] -> like q."""
        if len(self._ranks) > 1:  # a rank that refused what the others take would fall behind them
            for name, rows, heads in (
                ("queries", q, self.shape.num_query_heads),
                ("keys", k, self.shape.num_kv_heads),
                ("values", v, self.shape.num_kv_heads),
            ):
                _check_rows(name, rows, (len(q), heads, self.shape.head_dim))
        answers = self._all(lambda rank: rank.attend(layer, *rank.own_heads(q, k, v)))
        return np.concatenate(answers, axis=1)

    def end(self) -> list[ItemStatus]:
        """Ends the step on all ranks: scores are reduced, plans made."""
        request = attention_pb2.EndStep()
        answers = self._all(lambda rank: rank.call(end=request))
        return _first_failures([answer.ended.items for answer in answers])

    def step(self, items: Sequence[AttentionItem], q: Floats, k: Floats, v: Floats) -> Floats:
        """A whole step of rows that are all there: q [layers, rows, query heads, head_dim] -> like q.

        Raises the first item's error after the step has ended.
        """
        self.begin(items)
        alone = len(items) == 1 and items[0].phase != attention_pb2.DECODE
        part = self.max_step_tokens if alone else q.shape[1]
        out = np.empty_like(q)
        for layer in range(self.shape.num_layers):
            for first in range(0, q.shape[1], part):
                rows = slice(first, first + part)
                out[layer, rows] = self.attend(layer, q[layer, rows], k[layer, rows], v[layer, rows])
        for status in self.end():
            status.raise_if_failed()
        return out

    def prompt(self, sequence_id: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """The whole prompt in one step, as `step`."""
        item = AttentionItem(sequence_id, attention_pb2.PROMPT_LAST, first_position=0, num_tokens=q.shape[1])
        return self.step([item], q, k, v)

    def kept(self, sequence_id: int) -> Kept:
        """What the sequence holds after its last step: positions, scores and picks, of all ranks."""
        return Kept.joined(self._all(lambda rank: rank.kept(sequence_id)))

    def read_kv(
        self, sequence_id: int, layer: int, kv_head: int, first_position: int, num_positions: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(K, V) as stored, each [num_positions, head_dim]: float32, float16, or uint16 holding bfloat16's bits."""
        for rank in self._ranks:
            if rank.holds(kv_head):
                return rank.read_kv(sequence_id, layer, kv_head, first_position, num_positions)
        raise ValueError(f"kv_head is {kv_head}, want 0 to {self.shape.num_kv_heads - 1}")

    def _all(self, call: Callable[[AttentionRank], Result]) -> list[Result]:
        """The call on every rank at once, since ranks wait for each other; the first rank's error of any."""
        futures: list[Future[Result]] = [self._pool.submit(call, rank) for rank in self._ranks]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _check_rows(name: str, rows: Floats, shape: tuple[int, int, int]) -> None:
    if rows.shape != shape:
        raise HeavywaterError("INVALID_ARGUMENT", f"{name} has shape {rows.shape}, want {shape}")
    wrong = np.flatnonzero(~np.isfinite(rows))
    if wrong.size:
        index = int(wrong[0])
        message = f"{name}[{index}] is {rows.flat[index]}, want a finite number"
        raise HeavywaterError("INVALID_ARGUMENT", message)


def _first_failures(by_rank: Sequence[Sequence[attention_pb2.ItemStatus]]) -> list[ItemStatus]:
    """Of each item, the first rank's status that is not ok."""
    return [
        next((ItemStatus(s.code, s.message) for s in of_ranks if s.code), ItemStatus(0, ""))
        for of_ranks in zip(*by_rank, strict=True)
    ]
