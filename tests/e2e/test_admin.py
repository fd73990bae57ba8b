"""Quotas, pins, drain and flush with real processes and the real model."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, cluster, summary, token_ids
from heavywater.v1 import admin_pb2, generation_pb2, page_store_pb2, sequence_pb2

LAYERS = 30
HEADS = 3
PAGE_TOKENS = 32
# A page of 32 positions takes 8 KiB, of all layers and heads 90 times that.
PAGE_ROW = LAYERS * HEADS * 8192
POLICY = {"heavy_tokens": 24, "recent_tokens": 8, "sink_tokens": 4}
WORKER = {"page_tokens": PAGE_TOKENS, "reserve_ahead_tokens": PAGE_TOKENS}
PROMPT = 64  # two pages


def _id() -> str:
    return uuid.uuid4().hex


def _quota(group: Cluster, tenant: str, **quota: int) -> None:
    request = admin_pb2.SetQuotaRequest(request_id=_id(), tenant=tenant, quota=admin_pb2.TenantQuota(**quota))
    group.admin.SetQuota(request, timeout=10)


def _stats(group: Cluster) -> admin_pb2.StatsResponse:
    return group.admin.Stats(admin_pb2.StatsRequest(), timeout=10)


def _ask(group: Cluster, tokens: list[int], tenant: str, new_tokens: int = 8) -> list[generation_pb2.GenerateResponse]:
    return group.generate(tokens=tokens, max_new_tokens=new_tokens, ignore_eos=True, policy=POLICY, tenant=tenant)


def _wait_until(is_so: object, what: str) -> None:
    deadline = time.monotonic() + 20
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_tenant_at_its_quota_is_refused_and_stopped_and_nobody_else_notices(
    folder: Path, long_prompt: list[int]
) -> None:
    with cluster(folder, worker=WORKER) as group:
        free = token_ids(_ask(group, long_prompt[:PROMPT], "other", 60))
        _quota(group, "acme", host_bytes=3 * PAGE_ROW)
        # Three pages hold 96 positions: the text needs four.
        with pytest.raises(grpc.RpcError) as stopped:
            _ask(group, long_prompt[:PROMPT], "acme", 60)
        assert stopped.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 'tenant "acme"' in stopped.value.details()
        with pytest.raises(grpc.RpcError) as refused:
            _ask(group, long_prompt[: 4 * PAGE_TOKENS], "acme")
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{3 * PAGE_ROW}" in refused.value.details()
        assert token_ids(_ask(group, long_prompt[:PROMPT], "other", 60)) == free
        tenants = {tenant.tenant: tenant for tenant in _stats(group).tenants}
        assert tenants["acme"].used.host_bytes <= 3 * PAGE_ROW
        assert tenants["other"].used.host_bytes > 3 * PAGE_ROW
        _quota(group, "acme")
        assert token_ids(_ask(group, long_prompt[:PROMPT], "acme", 60)) == free


def test_a_pinned_sequence_outlives_its_lease_and_its_pages_stay(folder: Path, long_prompt: list[int]) -> None:
    cache = {"disk_path": folder / "pages", "sequence_lease_ms": 1500}
    with cluster(folder, cache=cache, worker=WORKER) as group:
        pinned, other = (_ask(group, long_prompt[i : i + PROMPT], "t")[0].sequence_id for i in (0, 5))
        pin = admin_pb2.PinRequest(request_id=_id(), sequence_id=pinned, owner="e2e", ttl_ms=8000)
        assert group.admin.Pin(pin, timeout=10).pins == 1
        flushed = group.admin.Flush(admin_pb2.FlushRequest(request_id=_id()), timeout=60)
        assert flushed.moved_bytes > 0
        host = group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=pinned), timeout=10).host_bytes
        assert host > 0
        assert group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=other), timeout=10).host_bytes == 0

        def is_there(sequence: int) -> bool:
            return any(
                s.sequence_id == sequence for s in group.sequences.List(sequence_pb2.ListSequencesRequest()).sequences
            )

        _wait_until(lambda: not is_there(other), "its lease has not ended")
        assert is_there(pinned)
        read = page_store_pb2.ReadRequest(sequence_id=pinned, num_positions=PAGE_TOKENS)
        assert sum(len(chunk.rows) for chunk in group.pages.Read(read, timeout=10)) == 8192
        _wait_until(lambda: not is_there(pinned), "its pin has not ended")
        assert _stats(group).pins == 0


def test_a_drain_lets_a_text_end_or_suspends_it_and_refuses_new_ones(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, worker={**WORKER, "snapshot_interval_tokens": 8}) as group:
        texts: list[list[int]] = []
        asked = threading.Thread(target=lambda: texts.append(token_ids(_ask(group, long_prompt[:PROMPT], "t", 100))))
        asked.start()
        _wait_until(lambda: _stats(group).sequences == 1, "it has not begun")
        drain = admin_pb2.DrainRequest(request_id=_id(), deadline_ms=120_000)
        assert group.admin.Drain(drain, timeout=150).drain.running_sequences == 0
        asked.join()
        assert len(texts[0]) == 100
        with pytest.raises(grpc.RpcError) as refused:
            _ask(group, long_prompt[:PROMPT], "t")
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        group.admin.Drain(admin_pb2.DrainRequest(request_id=_id(), undo=True), timeout=10)
        assert summary(_ask(group, long_prompt[:PROMPT], "t")).finish_reason == "length"

        stream = group.generation.Generate(
            generation_pb2.GenerateRequest(
                tokens=long_prompt[:PROMPT], max_new_tokens=2000, ignore_eos=True, policy=POLICY
            ),
            timeout=300,
        )
        sequence = next(stream).sequence_id
        drain = admin_pb2.DrainRequest(request_id=_id(), deadline_ms=120_000, suspend=True)
        # The one before has ended, which its ranks may not have said yet: then it is suspended, too.
        assert group.admin.Drain(drain, timeout=150).drain.suspended_by_drain in (1, 2)
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() == grpc.StatusCode.ABORTED
        assert group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=sequence), timeout=10).suspended
