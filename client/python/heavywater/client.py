"""The client: one method per call of the API, named as in C++."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy.typing as npt
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heavywater.admin import AdminCalls
from heavywater.errors import translated
from heavywater.generation import Generation
from heavywater.generation_request import Prompt, generation_request
from heavywater.model import Model
from heavywater.pages import rows_of, split_rows
from heavywater.retry import read_with_retries
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

# gRPC repeats a call by itself when a connection ends under it. Nothing is repeated
# here but reads, by us; and with grpcio 1.76 such a call could hang for ever.
# A server that has died is looked for again and again, so that a stream goes on soon; one
# whose machine has vanished closes no connection, and is asked whether it is there.
CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Client(AdminCalls):
    """Talks to rank 0 of a worker group (`worker`) and to the cache service (`cache`), host:port each.

    Either may be left out when its calls are not used. Every call raises
    HeavywaterError; reads are repeated while a server is UNAVAILABLE, and Generate goes
    on where it broke off; nothing else is repeated.
    Threads may share one client.

        with Client(worker="127.0.0.1:7701", cache="127.0.0.1:7700") as client:
            print(client.generate("Once upon a time", max_new_tokens=16).text())
    """

    def __init__(
        self,
        worker: str | None = None,
        cache: str | None = None,
        *,
        security: Security | None = None,
        timeout_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
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
        self._channels.append(self._security.channel(address, CHANNEL_OPTIONS))
        return self._channels[-1]

    @property
    def has_cache(self) -> bool:
        """Whether the cache service's address was given."""
        return self._sequences is not None

    def disconnect(self) -> None:
        """Closes the connections; running calls are cancelled."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

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
        """Continues a prompt, given as text or token ids, or answers a conversation, given as messages ({"role",
        "content"} each), which the server renders with the model's chat template. The defaults are the API's.

        When a server dies or the connection breaks after the request was accepted, the
        same stream goes on, each token exactly once, as soon as a server is there again:
        tried for `resume_timeout_s` without a new token (0: not at all).

        `suffix` is appended after the policy has compressed the prompt, as a second turn
        would be; what is generated follows it. `return_reads` needs a policy with recall.
        `continues`: a further turn of the sequence of that id, which has ended its generation
        or was suspended. `prompt` is then its text so far as token ids, all that it was given
        and has generated; new ones follow there or as `suffix`. The sequence goes on with the
        cache that it had, only what is new is computed. Where the text differs from the
        sequence's, after the prompt, it goes back to there; where the sequence is gone
        (`Generation.sequence_id` is another then), all is computed anew. It keeps its policy:

            with client.generate(ids, max_new_tokens=64) as first:
                ids += [token.token for token in first]
            client.suspend(first.sequence_id)  # while nobody knows when the next turn comes
            with client.generate(ids, suffix=question, max_new_tokens=64, continues=first.sequence_id) as second:
                answer = second.text()

        `prefix_reuse`: the prompt may begin with pages that are stored of another prompt with the same first tokens,
        of the same tenant, and only the rest is computed (None: as the worker is configured). How much did, or
        why nothing, is in `Generation.summary` (`prefix_tokens_reused`, `prefix_not_reused`).

        Above temperature 0 tokens are drawn from the `top_k` likeliest (0 = all), of those the
        fewest that have the probability `top_p` together.
        """
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

    def get_model(self) -> Model:
        """The served model with its tokenizer and chat template."""
        stub = wanted(self._generation, "worker")
        request = generation_pb2.GetModelRequest()

        def read() -> Model:
            with translated():
                return Model.from_responses(stub.GetModel(request, timeout=self._timeout_s))

        return read_with_retries(read, self._sleep)

    def is_ready(self, timeout_s: float = 2.0) -> bool:
        """Whether the worker takes requests. Raises when it does not answer."""
        request = health_pb2.HealthCheckRequest(service="readiness")
        with translated():
            answer = wanted(self._health, "worker").Check(request, timeout=timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    # The cache service.

    def open(self, request: sequence_pb2.OpenSequenceRequest) -> sequence_pb2.OpenSequenceResponse:
        """Registers a sequence (what rank 0 does for Generate). A request id is added when absent."""
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        with translated():
            response: sequence_pb2.OpenSequenceResponse
            response = wanted(self._sequences, "cache").Open(request, timeout=self._timeout_s)
            return response

    def get(self, sequence_id: int) -> sequence_pb2.Sequence:
        """One sequence, with the token ids reported so far."""
        stub = wanted(self._sequences, "cache")
        request = sequence_pb2.GetSequenceRequest(sequence_id=sequence_id)
        sequence: sequence_pb2.Sequence = self._read(stub.Get, request)
        # Long ones come in pages: as many as there were when the first was read.
        while len(sequence.tokens) < sequence.num_tokens:
            request.first_token = len(sequence.tokens)
            page = self._read(stub.Get, request)
            if not page.tokens:
                break
            sequence.tokens.extend(page.tokens)
        return sequence

    def list(self, group: str = "") -> Iterator[sequence_pb2.Sequence]:
        """All sequences (of a group), without tokens."""
        request = sequence_pb2.ListSequencesRequest(group=group)
        while True:
            page = self._read(wanted(self._sequences, "cache").List, request)
            yield from page.sequences
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def close(self, sequence_id: int) -> None:
        """Ends the sequence's lease now and frees its pages."""
        request = sequence_pb2.CloseSequenceRequest(sequence_id=sequence_id, request_id=uuid.uuid4().hex)
        with translated():
            wanted(self._sequences, "cache").Close(request, timeout=self._timeout_s)

    def suspend(self, sequence_id: int, ttl_s: float = 0.0) -> sequence_pb2.SuspendSequenceResponse:
        """Takes the sequence off the devices (a generation of it ends with ABORTED) and keeps it for `ttl_s`
        (0: as long as the service lets): pages, set and scores, for `generate(..., continues=sequence_id)`."""
        request = sequence_pb2.SuspendSequenceRequest(sequence_id=sequence_id, ttl_ms=round(1000 * ttl_s))
        with translated():
            response: sequence_pb2.SuspendSequenceResponse
            response = wanted(self._sequences, "cache").Suspend(request, timeout=self._timeout_s)
            return response

    def resume(self, sequence_id: int) -> None:
        """A suspended sequence gets its ordinary lease again. A generation that continues it does so, too."""
        request = sequence_pb2.ResumeSequenceRequest(sequence_id=sequence_id)
        with translated():
            wanted(self._sequences, "cache").Resume(request, timeout=self._timeout_s)

    def truncate(self, sequence_id: int, tokens: int) -> sequence_pb2.TruncateSequenceResponse:
        """The sequence, which must not run, goes back to its first `tokens` tokens (at least its prompt): what came
        later is forgotten, and `generate(..., continues=sequence_id)` goes on from there, with the set and the
        scores that it had there. Raises OUT_OF_RANGE, FAILED_PRECONDITION, NOT_FOUND."""
        request = sequence_pb2.TruncateSequenceRequest(sequence_id=sequence_id, tokens=tokens)
        with translated():
            response: sequence_pb2.TruncateSequenceResponse
            response = wanted(self._sequences, "cache").Truncate(request, timeout=self._timeout_s)
            return response

    def fork(
        self, sequence_id: int, *, lease_s: float = 0.0, request_id: str = ""
    ) -> sequence_pb2.ForkSequenceResponse:
        """A second sequence that is as this one, which must not run, is now: `generate(..., continues=...)` goes on
        with either, independently. They share the pages that they have in common, which count once. Its lease is
        `lease_s` (0: as the sequence's); `suspend` keeps it for longer. The same `request_id` again gives the first
        answer (one is added when absent). Raises FAILED_PRECONDITION, RESOURCE_EXHAUSTED, NOT_FOUND."""
        request = fork_request(sequence_id, lease_s, request_id)
        with translated():
            response: sequence_pb2.ForkSequenceResponse
            response = wanted(self._sequences, "cache").Fork(request, timeout=self._timeout_s)
            return response

    def stats(self) -> admin_pb2.StatsResponse:
        """What the cache service holds, tier by tier."""
        stats: admin_pb2.StatsResponse = self._read(wanted(self._admin, "cache").Stats, admin_pb2.StatsRequest())
        return stats

    def get_sets(self, sequence_id: int, layers: Sequence[int] = ()) -> Sequence[SequenceSet]:
        """Sinks, heavy, recent, demoted and dropped positions per layer; all layers by default."""
        request = sequence_pb2.GetSetsRequest(sequence_id=sequence_id, layers=layers)
        messages = self._read_stream(wanted(self._sequences, "cache").GetSets, request, whole_sets)
        return [SequenceSet.from_proto(message) for message in messages]

    def read(
        self, sequence: sequence_pb2.Sequence, layer: int, kv_head: int, first_position: int, num_positions: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(K, V) of positions within one page, each [num_positions, head_dim].

        float32, or uint16 holding bfloat16's bits. Every chunk's checksum is verified.
        """
        request = page_store_pb2.ReadRequest(
            sequence_id=sequence.sequence_id,
            layer=layer,
            kv_head=kv_head,
            first_position=first_position,
            num_positions=num_positions,
            fingerprint=sequence.fingerprint,
        )
        rows = self._read_stream(wanted(self._pages, "cache").Read, request, rows_of)
        return split_rows(rows, sequence.fingerprint)

    def _read(self, call: Callable[..., Any], request: Any) -> Any:
        def read() -> Any:
            with translated():
                return call(request, timeout=self._timeout_s)

        return read_with_retries(read, self._sleep)

    def _read_stream(self, call: Callable[..., Any], request: Any, collect: Callable[..., Any]) -> Any:
        """Reads a whole stream; a read that broke off is repeated from its start."""
        return self._read(lambda *args, **options: collect(call(*args, **options)), request)


def fork_request(sequence_id: int, lease_s: float, request_id: str) -> sequence_pb2.ForkSequenceRequest:
    """As Client.fork describes its arguments."""
    return sequence_pb2.ForkSequenceRequest(
        sequence_id=sequence_id, lease_ms=round(1000 * lease_s), request_id=request_id or uuid.uuid4().hex
    )


def wanted(stub: Any, name: str) -> Any:
    """The stub, where its server's address was given. Raises ValueError naming it."""
    if stub is None:
        raise ValueError(f"this call needs the {name}'s address: Client({name}='host:port')")
    return stub
