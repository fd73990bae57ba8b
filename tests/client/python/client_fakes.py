"""Servers that answer the Python client in tests: real gRPC, no model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
from admin_fakes import FakeAdmin
from grpc_health.v1 import health_pb2, health_pb2_grpc
from heavywater.crc32c import crc32c
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

# A byte-level vocabulary: letters, digits, a space ("Ġ"), a newline ("Ċ"), two merges
# and control tokens.
CONTROL = ("<|im_start|>", "<|im_end|>")
PIECES = (*CONTROL, *"abcdefghijklmnopqrstuvwxyz0123456789.,", "Ġ", "Ċ", "ab", "Ġab")
MERGES = ("a b", "Ġ ab")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# 2.5 positions a query in the mean.
RECALL_COUNTS = common_pb2.RecallCounts(
    queries=4, reads=10, reads_max=7, promoted=3, mass_missing=0.125, sketch_bytes=9
)
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 4


def logits_of(policy: str, position: int) -> np.ndarray:
    """[vocab] float32: the full cache's, or near them for a policy; both known to the tests."""
    full = np.random.default_rng(position).normal(size=len(PIECES)).astype(np.float32)
    if policy == "full":
        return full
    return full + np.random.default_rng(len(policy) + 1000 * position).normal(scale=0.1, size=len(full)).astype(
        np.float32
    )


@dataclass
class FakeWorker(generation_pb2_grpc.GenerationServiceServicer):
    """Generates the token (position % vocab); counts what runs at once."""

    requests: list[generation_pb2.GenerateRequest] = field(default_factory=list)
    unavailable: int = 0  # calls of GetModel to refuse first
    breaks: list[int] = field(default_factory=list)  # the stream breaks off before these tokens, in turn
    down: bool = False  # Generate is refused before it is accepted
    refusal: tuple[grpc.StatusCode, str] | None = None  # likewise, with this
    cancelled: threading.Event = field(default_factory=threading.Event)
    context_tokens: int = 0  # longer sequences are refused; 0: none
    before_accepting: Callable[[], object] = lambda: None
    after_accepting: Callable[[], object] = lambda: None
    answer: Callable[[generation_pb2.GenerateRequest], str] | None = None  # instead, in the vocabulary's letters

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        text = request.text or "".join(message.content for message in request.messages)
        if not text and not request.tokens:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "neither text nor tokens, want one")
        context.add_callback(self.cancelled.set)
        prompt = len(request.tokens) or len(text)
        suffix = len(request.suffix_tokens) or len(request.suffix_text)
        seen = prompt + suffix
        count = len(request.forced_tokens) or request.max_new_tokens
        budget = request.policy.heavy_tokens + request.policy.recent_tokens or seen
        answer = [PIECES.index(letter) for letter in self.answer(request)] if self.answer else []
        if self.down:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the group is not complete")
        if self.refusal:
            context.abort(*self.refusal)
        if 0 < self.context_tokens < seen + count:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, f"prompt of {prompt} tokens, and {count} new ones are too many")
        self.before_accepting()
        yield generation_pb2.GenerateResponse(sequence_id=42)
        self.after_accepting()
        for index in range(request.resume.from_token, count):
            if self.breaks and index == self.breaks[0]:
                self.breaks.pop(0)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the worker group failed")
            token = (request.forced_tokens or answer or range(seen, seen + count))[index] % len(PIECES)
            response = generation_pb2.GenerateResponse(
                sequence_id=42 if index == 0 else 0, index=index, token=token, text=PIECES[token], device_bytes=budget
            )
            response.counts.tokens_seen = seen + index
            response.counts.tokens_resident = budget
            if request.return_logits:
                response.logits = logits_of(request.policy.policy, seen + index).astype("<f4").tobytes()
            if request.return_reads and index > 0:
                times = 2 if request.policy.HasField("recall_min_share") else 1
                response.reads.add(position=2, count=times * (index + 1))
                response.reads.add(position=0, count=1)
            yield response
        summary = generation_pb2.GenerateSummary(
            finish_reason="length",
            prompt_tokens=prompt,
            suffix_tokens=suffix,
            new_tokens=count,
            device_bytes_peak=budget,
            full_cache_bytes=seen,
            plan=3,
        )
        summary.counts.tokens_seen = seen + count - 1
        summary.budget.policy = request.policy.policy or "snapkv_h2o"
        if request.policy.recall or request.policy.policy == "recall":
            summary.budget.policy, summary.budget.recall_tokens = "snapkv_h2o", request.policy.recall_tokens or 64
            summary.recall.CopyFrom(RECALL_COUNTS)
        yield generation_pb2.GenerateResponse(summary=summary)

    def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GetModelResponse]:
        if self.unavailable > 0:
            self.unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        info = generation_pb2.ModelInfo(
            name="tiny",
            vocab_size=len(PIECES),
            context_tokens=4096,
            tokenizer_model="gpt2",
            pre_tokenizer="smollm",
            eos_token=1,
            chat_template=TEMPLATE,
        )
        yield generation_pb2.GetModelResponse(model=info)
        for piece in PIECES:  # one a message: a client must join them
            kind = 3 if piece in CONTROL else 1
            yield generation_pb2.GetModelResponse(pieces=[generation_pb2.Piece(text=piece.encode(), type=kind)])
        yield generation_pb2.GetModelResponse(merges=MERGES)


def make_sets(layers: list[int], seen: int = 20) -> list[sequence_pb2.SequenceSet]:
    """Per layer: sink 0, heavy 3 and 5 + layer, the last two recent, the rest demoted."""
    sets = []
    for layer in layers:
        heavy = [3, 5 + layer]
        resident = {0, *heavy, seen - 2, seen - 1}
        demoted = [bound for p in range(seen) if p not in resident for bound in (p, p + 1)]
        scores = [9.0, 4.0, 2.0 + layer, 1.0, 0.5]
        sets.append(
            sequence_pb2.SequenceSet(
                layer=layer,
                kv_head=-1,
                plan=3,
                tokens_seen=seen,
                sinks=[0],
                heavy=heavy,
                recent=[seen - 2, seen - 1],
                demoted_ranges=demoted,
                scores=scores,
            )
        )
    return sets


@dataclass
class FakeCache(
    sequence_pb2_grpc.SequenceServiceServicer,
    page_store_pb2_grpc.PageStoreServiceServicer,
    FakeAdmin,
):
    """Knows every sequence; fails its first `unavailable` calls."""

    calls: int = 0
    corrupt: bool = False
    closed: list[int] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    num_tokens: int = 20
    suspended: dict[int, int] = field(default_factory=dict)  # for how many ms
    truncated: dict[int, int] = field(default_factory=dict)  # to how many tokens
    forks: list[sequence_pb2.ForkSequenceRequest] = field(default_factory=list)

    def _refuse(self, context: grpc.ServicerContext) -> None:
        self.calls += 1
        if self.unavailable > 0:
            self.unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    def Open(
        self, request: sequence_pb2.OpenSequenceRequest, context: grpc.ServicerContext
    ) -> sequence_pb2.OpenSequenceResponse:
        self._refuse(context)
        self.opened.append(request.request_id)
        return sequence_pb2.OpenSequenceResponse(sequence_id=1)

    def Get(self, request: sequence_pb2.GetSequenceRequest, context: grpc.ServicerContext) -> sequence_pb2.Sequence:
        self._refuse(context)
        # 8 a page.
        tokens = range(2, 2 + self.num_tokens)[request.first_token : request.first_token + 8]
        sequence = sequence_pb2.Sequence(
            sequence_id=request.sequence_id,
            tokens=tokens,
            num_tokens=self.num_tokens,
            prompt_tokens=self.num_tokens - 2,
            finished=True,
        )
        sequence.fingerprint.dtype = "fp32"
        sequence.fingerprint.head_dim = HEAD_DIM
        sequence.budget.policy, sequence.budget.scope = "snapkv_h2o", "layer"
        return sequence

    def List(
        self, request: sequence_pb2.ListSequencesRequest, context: grpc.ServicerContext
    ) -> sequence_pb2.ListSequencesResponse:
        first = int(request.page_token or 0)
        page = sequence_pb2.ListSequencesResponse(next_page_token=str(first + 2) if first + 2 < 5 else "")
        page.sequences.extend(sequence_pb2.Sequence(sequence_id=i) for i in range(first, min(first + 2, 5)))
        return page

    def Stats(self, request: admin_pb2.StatsRequest, context: grpc.ServicerContext) -> admin_pb2.StatsResponse:
        self._refuse(context)
        host = admin_pb2.TierStats(tier="host", total_bytes=1000, used_bytes=250, free_bytes=750, failures_corrupt=3)
        tenants = self.tenants.values()
        return admin_pb2.StatsResponse(
            version=self.version, uptime_ms=65_000, tiers=[host], sequences=5, groups=1, tenants=tenants
        )

    def Close(
        self, request: sequence_pb2.CloseSequenceRequest, context: grpc.ServicerContext
    ) -> sequence_pb2.CloseSequenceResponse:
        self._refuse(context)
        self.closed.append(request.sequence_id)
        return sequence_pb2.CloseSequenceResponse()

    def Suspend(
        self, request: sequence_pb2.SuspendSequenceRequest, context: grpc.ServicerContext
    ) -> sequence_pb2.SuspendSequenceResponse:
        self._refuse(context)
        self.suspended[request.sequence_id] = request.ttl_ms
        return sequence_pb2.SuspendSequenceResponse(ttl_ms=request.ttl_ms or 3_600_000, tokens_seen=20)

    def Resume(
        self, request: sequence_pb2.ResumeSequenceRequest, context: grpc.ServicerContext
    ) -> sequence_pb2.ResumeSequenceResponse:
        self._refuse(context)
        del self.suspended[request.sequence_id]
        return sequence_pb2.ResumeSequenceResponse(lease_ms=60_000)

    def Fork(
        self, request: sequence_pb2.ForkSequenceRequest, context: grpc.ServicerContext
    ) -> sequence_pb2.ForkSequenceResponse:
        self._refuse(context)
        self.forks.append(request)
        return sequence_pb2.ForkSequenceResponse(sequence_id=request.sequence_id + 1, shared_tokens=512)

    def Truncate(
        self, request: sequence_pb2.TruncateSequenceRequest, context: grpc.ServicerContext
    ) -> sequence_pb2.TruncateSequenceResponse:
        self._refuse(context)
        self.truncated[request.sequence_id] = request.tokens
        return sequence_pb2.TruncateSequenceResponse(tokens_seen=request.tokens - 1)

    def GetSets(
        self, request: sequence_pb2.GetSetsRequest, context: grpc.ServicerContext
    ) -> Iterator[sequence_pb2.SequenceSet]:
        for one in make_sets(list(request.layers) or list(range(LAYERS))):
            yield one
            self._refuse(context)  # breaks off in the middle

    def Read(
        self, request: page_store_pb2.ReadRequest, context: grpc.ServicerContext
    ) -> Iterator[page_store_pb2.ReadResponse]:
        for position in range(request.first_position, request.first_position + request.num_positions):
            rows = kv_row(position).tobytes()
            yield page_store_pb2.ReadResponse(
                first_position=position, rows=rows, crc32c=crc32c(rows) ^ int(self.corrupt)
            )


def kv_row(position: int) -> np.ndarray:
    """[2, HEAD_DIM]: K, then V."""
    return (np.arange(2 * HEAD_DIM, dtype="<f4") + 100 * position).reshape(2, HEAD_DIM)


@dataclass
class FakeHealth(health_pb2_grpc.HealthServicer):
    """Of both."""

    ready: bool = True

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self.ready else statuses.NOT_SERVING)


@dataclass
class FakeServers:
    """Both, on one port."""

    worker: FakeWorker
    cache: FakeCache
    health: FakeHealth
    address: str


@contextmanager
def fake_servers() -> Iterator[FakeServers]:
    server = grpc.server(ThreadPoolExecutor(16))
    worker, cache, health = FakeWorker(), FakeCache(), FakeHealth()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(worker, server)
    sequence_pb2_grpc.add_SequenceServiceServicer_to_server(cache, server)
    page_store_pb2_grpc.add_PageStoreServiceServicer_to_server(cache, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield FakeServers(worker, cache, health, f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
