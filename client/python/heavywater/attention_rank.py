"""One rank's AttentionService."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from heavywater.attention_types import Kept, error_of
from heavywater.errors import HeavywaterError, translated
from heavywater.pages import rows_of, split_rows
from heavywater.v1 import attention_pb2, attention_pb2_grpc

Floats = npt.NDArray[np.float32]


class AttentionRank:
    """Attached to one rank, with its Step stream; one call at a time."""

    def __init__(self, channel: grpc.Channel, request: attention_pb2.AttachEngineRequest, timeout_s: float) -> None:
        self._stub = attention_pb2_grpc.AttentionServiceStub(channel)
        self._timeout_s = timeout_s
        self._requests: queue.SimpleQueue[attention_pb2.StepRequest | None] = queue.SimpleQueue()
        self._responses: Any = None
        with translated():
            self.attached: attention_pb2.AttachEngineResponse = self._stub.Attach(request, timeout=timeout_s)

    def holds(self, kv_head: int) -> bool:
        """Whether the rank's heads include this one of the model's."""
        return 0 <= kv_head - self.attached.first_kv_head < self.attached.num_kv_heads

    def own_heads(self, q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats, Floats]:
        """Of rows [rows, heads, head_dim] of the whole model."""
        attached = self.attached
        queries = slice(attached.first_query_head, attached.first_query_head + attached.num_query_heads)
        heads = slice(attached.first_kv_head, attached.first_kv_head + attached.num_kv_heads)
        return q[:, queries], k[:, heads], v[:, heads]

    def call(self, **request: Any) -> attention_pb2.StepResponse:
        """One request of the stream (open=..., begin=..., ...) and its response. Raises what is refused."""
        if self._responses is None:
            with translated():
                self._responses = self._stub.Step(iter(self._requests.get, None))
        self._requests.put(attention_pb2.StepRequest(attachment_id=self.attached.attachment_id, **request))
        with translated():
            response: attention_pb2.StepResponse | None = next(self._responses, None)
        if response is None:
            raise HeavywaterError("UNAVAILABLE", "the worker has ended the stream")
        if response.HasField("error"):
            raise error_of(response.error.code, response.error.message)
        return response

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """This rank's rows of a layer; returns what attention returns, like q."""
        request = attention_pb2.AttendLayer(layer=layer, queries=_bytes(q), keys=_bytes(k), values=_bytes(v))
        return np.frombuffer(self.call(attend=request).attended.out, "<f4").reshape(q.shape)

    def kept(self, sequence_id: int) -> Kept:
        """What the sequence holds on this rank."""
        request = attention_pb2.KeptRequest(sequence_id=sequence_id)
        with translated():
            return Kept.from_messages(list(self._stub.Kept(request, timeout=self._timeout_s)))

    def read_kv(
        self, sequence_id: int, layer: int, kv_head: int, first_position: int, num_positions: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(K, V) as stored, every chunk's checksum verified."""
        request = attention_pb2.ReadKvRequest(
            sequence_id=sequence_id,
            layer=layer,
            kv_head=kv_head,
            first_position=first_position,
            num_positions=num_positions,
        )
        with translated():
            rows = rows_of(self._stub.ReadKv(request, timeout=self._timeout_s))
        return split_rows(rows, self.attached.fingerprint)

    def end_stream(self) -> None:
        """The worker closes the stream's sequences; waits for it, as far as it answers."""
        self._requests.put(None)
        if self._responses is None:
            return
        with contextlib.suppress(grpc.RpcError):  # it has ended, one way or the other
            _drain(self._responses)
        self._responses = None


def _drain(responses: Iterator[object]) -> None:
    for _ in responses:
        pass


def _bytes(rows: Floats) -> bytes:
    return np.ascontiguousarray(rows, "<f4").tobytes()
