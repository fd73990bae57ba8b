"""The client for asyncio: one method per call of the API, named as in the other client."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy.typing as npt
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heavywater.aio.admin import AdminCalls
from heavywater.aio.generation import Generation
from heavywater.client import CHANNEL_OPTIONS, fork_request, wanted
from heavywater.errors import HeavywaterError, translated
from heavywater.generation_request import Prompt, generation_request
from heavywater.model import Model
from heavywater.pages import rows_of, split_rows
from heavywater.retry import BACKOFFS_S
from heavywater.security import Security
from heavywater.sets import SequenceSet, whole_sets
from heavywater.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    page_store_pb2,
    page_store_pb2_grpc,
    sequence_pb2,
    sequence_pb2_grpc,
)

Result = TypeVar("Result")


class Client(AdminCalls):
    """heavywater.Client for asyncio: the same addresses, arguments, errors and repeats.

    Belongs to the event loop that runs when it is made; tasks of that loop may share it.
    """

    def __init__(
        self,
        worker: str | None = None,
        cache: str | None = None,
        *,
        security: Security | None = None,
        timeout_s: float = 30.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`timeout_s` bounds every call but Generate, which takes as long as its text.

        `security`: TLS and the token; None: Security.from_environment().
        """
        self._security = Security.from_environment() if security is None else security
        self._channels: list[Any] = []
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._generation = self._health = self._sequences = self._pages = self._admin = None
        if worker:
            channel = self._connect(worker)
            self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
            self._health = health_pb2_grpc.HealthStub(channel)
        if cache:
            channel = self._connect(cache)
            self._sequences = sequence_pb2_grpc.SequenceServiceStub(channel)
            self._pages = page_store_pb2_grpc.PageStoreServiceStub(channel)
            self._admin = admin_pb2_grpc.AdminServiceStub(channel)

    def _connect(self, address: str) -> Any:
        self._channels.append(self._security.aio_channel(address, CHANNEL_OPTIONS))
        return self._channels[-1]

    @property
    def has_cache(self) -> bool:
        """Whether the cache service's address was given."""
        return self._sequences is not None

    async def disconnect(self) -> None:
        """Closes the connections; running calls are cancelled."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    # The worker group.

    def generate(
        self,
        prompt: Prompt,
        *,
        suffix: str | Sequence[int] = (),
        max_new_tokens: int = 0,
        policy: common_pb2.PolicyOptions | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        ignore_eos: bool = False,
        forced_tokens: Sequence[int] = (),
        return_logits: bool = False,
        return_reads: bool = False,
        request_id: str = "",
        tenant: str = "",
        resume_timeout_s: float = 60.0,
        continues: int = 0,
        prefix_reuse: bool | None = None,
    ) -> Generation:
        """Continues a prompt, as heavywater.Client.generate; nothing waits before the first token is asked for."""
        request = generation_request(
            prompt,
            suffix,
            max_new_tokens=max_new_tokens,
            policy=policy,
            sampling=generation_pb2.Sampling(temperature=temperature, seed=seed, top_p=top_p, top_k=top_k),
            ignore_eos=ignore_eos,
            forced_tokens=forced_tokens,
            return_logits=return_logits,
            return_reads=return_reads,
            request_id=request_id,
            tenant=tenant,
            continue_sequence_id=continues,
            prefix_reuse=prefix_reuse,
        )
        return Generation(wanted(self._generation, "worker").Generate, request, resume_timeout_s, self._sleep)

    async def get_model(self) -> Model:
        """The served model with its tokenizer and chat template."""
        call = wanted(self._generation, "worker").GetModel
        return Model.from_responses(await self._read_stream(call, generation_pb2.GetModelRequest()))

    async def is_ready(self, timeout_s: float = 2.0) -> bool:
        """Whether the worker takes requests. Raises when it does not answer."""
        request = health_pb2.HealthCheckRequest(service="readiness")
        with translated():
            answer = await wanted(self._health, "worker").Check(request, timeout=timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    # The cache service.

    async def open(self, request: sequence_pb2.OpenSequenceRequest) -> sequence_pb2.OpenSequenceResponse:
        """Registers a sequence (what rank 0 does for Generate). A request id is added when absent."""
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        with translated():
            response: sequence_pb2.OpenSequenceResponse
            response = await wanted(self._sequences, "cache").Open(request, timeout=self._timeout_s)
            return response

    async def get(self, sequence_id: int) -> sequence_pb2.Sequence:
        """One sequence, with the token ids reported so far."""
        call = wanted(self._sequences, "cache").Get
        request = sequence_pb2.GetSequenceRequest(sequence_id=sequence_id)
        sequence: sequence_pb2.Sequence = await self._read(call, request)
        # Long ones come in pages: as many as there were when the first was read.
        while len(sequence.tokens) < sequence.num_tokens:
            request.first_token = len(sequence.tokens)
            page = await self._read(call, request)
            if not page.tokens:
                break
            sequence.tokens.extend(page.tokens)
        return sequence

    async def list(self, group: str = "") -> AsyncIterator[sequence_pb2.Sequence]:
        """All sequences (of a group), without tokens."""
        request = sequence_pb2.ListSequencesRequest(group=group)
        while True:
            page = await self._read(wanted(self._sequences, "cache").List, request)
            for sequence in page.sequences:
                yield sequence
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def close(self, sequence_id: int) -> None:
        """Ends the sequence's lease now and frees its pages."""
        request = sequence_pb2.CloseSequenceRequest(sequence_id=sequence_id, request_id=uuid.uuid4().hex)
        with translated():
            await wanted(self._sequences, "cache").Close(request, timeout=self._timeout_s)

    async def suspend(self, sequence_id: int, ttl_s: float = 0.0) -> sequence_pb2.SuspendSequenceResponse:
        """As heavywater.Client.suspend."""
        request = sequence_pb2.SuspendSequenceRequest(sequence_id=sequence_id, ttl_ms=round(1000 * ttl_s))
        with translated():
            response: sequence_pb2.SuspendSequenceResponse
            response = await wanted(self._sequences, "cache").Suspend(request, timeout=self._timeout_s)
            return response

    async def resume(self, sequence_id: int) -> None:
        """As heavywater.Client.resume."""
        request = sequence_pb2.ResumeSequenceRequest(sequence_id=sequence_id)
        with translated():
            await wanted(self._sequences, "cache").Resume(request, timeout=self._timeout_s)

    async def truncate(self, sequence_id: int, tokens: int) -> sequence_pb2.TruncateSequenceResponse:
        """As heavywater.Client.truncate."""
        request = sequence_pb2.TruncateSequenceRequest(sequence_id=sequence_id, tokens=tokens)
        with translated():
            response: sequence_pb2.TruncateSequenceResponse
            response = await wanted(self._sequences, "cache").Truncate(request, timeout=self._timeout_s)
            return response

    async def fork(
        self, sequence_id: int, *, lease_s: float = 0.0, request_id: str = ""
    ) -> sequence_pb2.ForkSequenceResponse:
        """As heavywater.Client.fork."""
        request = fork_request(sequence_id, lease_s, request_id)
        with translated():
            response: sequence_pb2.ForkSequenceResponse
            response = await wanted(self._sequences, "cache").Fork(request, timeout=self._timeout_s)
            return response

    async def stats(self) -> admin_pb2.StatsResponse:
        """What the cache service holds, tier by tier."""
        stats: admin_pb2.StatsResponse = await self._read(wanted(self._admin, "cache").Stats, admin_pb2.StatsRequest())
        return stats

    async def get_sets(self, sequence_id: int, layers: Sequence[int] = ()) -> Sequence[SequenceSet]:
        """Sinks, heavy, recent, demoted and dropped positions per layer; all layers by default."""
        request = sequence_pb2.GetSetsRequest(sequence_id=sequence_id, layers=layers)
        messages = await self._read_stream(wanted(self._sequences, "cache").GetSets, request)
        return [SequenceSet.from_proto(message) for message in whole_sets(messages)]

    async def read(
        self, sequence: sequence_pb2.Sequence, layer: int, kv_head: int, first_position: int, num_positions: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(K, V) of positions within one page, as heavywater.Client.read; every chunk's checksum is verified."""
        request = page_store_pb2.ReadRequest(
            sequence_id=sequence.sequence_id,
            layer=layer,
            kv_head=kv_head,
            first_position=first_position,
            num_positions=num_positions,
            fingerprint=sequence.fingerprint,
        )
        messages = await self._read_stream(wanted(self._pages, "cache").Read, request)
        return split_rows(rows_of(messages), sequence.fingerprint)

    async def _read(self, call: Callable[..., Any], request: Any) -> Any:
        async def read() -> Any:
            return await call(request, timeout=self._timeout_s)

        return await self._with_retries(read)

    async def _read_stream(self, call: Callable[..., Any], request: Any) -> Any:
        """All messages of a stream; one that broke off is read again from its start."""

        async def read() -> Any:
            return [message async for message in call(request, timeout=self._timeout_s)]

        return await self._with_retries(read)

    async def _with_retries(self, read: Callable[[], Awaitable[Result]]) -> Result:
        """As read_with_retries()."""
        for backoff_s in BACKOFFS_S:
            try:
                with translated():
                    return await read()
            except HeavywaterError as error:
                if error.code != "UNAVAILABLE":
                    raise
            await self._sleep(backoff_s)
        with translated():
            return await read()
