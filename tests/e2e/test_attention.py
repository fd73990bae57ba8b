"""AttentionService over real processes, against plain references on the same Q, K and V."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from attention_reference import (
    FLAGS,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    SIZE,
    PolicyReference,
    RecallReference,
    Text,
    policies,
)
from cluster import Cluster, cluster
from heavywater import (
    DECODE,
    PROMPT,
    PROMPT_LAST,
    AttentionClient,
    AttentionItem,
    AttentionShape,
    HeavywaterError,
    PolicyOptions,
)
from heavywater.v1 import page_store_pb2, sequence_pb2

SHAPE = AttentionShape(LAYERS, QUERY_HEADS, KV_HEADS, SIZE, dtype="fp32")
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[1, 3])
def group(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("attention")
    with cluster(folder, request.param, worker={**FLAGS, "prompt_chunk_tokens": 48, "max_batch": 16}) as started:
        yield started


@pytest.fixture
def engine(group: Cluster) -> Iterator[AttentionClient]:
    with AttentionClient(group.worker_addresses, SHAPE, group="e2e") as client:
        yield client


def bounded(name: str, scope: str) -> tuple[PolicyOptions, policies.Policy]:
    """The same policy for the service and for the reference."""
    numbers = {"window": 16, "plan_interval_steps": 2, "sink_tokens": 2}
    policy = PolicyOptions(policy=name, scope=scope, heavy_tokens=18, recent_tokens=8, **numbers)
    return policy, policies.Policy(name, scope, budget_tokens=26, recent_tokens=8, **numbers)  # type: ignore[arg-type]


def prompt(engine: AttentionClient, text: Text, tokens: int, policy: PolicyOptions, more: int = 64) -> int:
    """Opens a sequence and runs its prompt; checks what that returns."""
    sequence = engine.open(policy, prompt_tokens=tokens, max_tokens=tokens + more).sequence_id
    out = engine.prompt(sequence, *text.rows(0, tokens))
    for layer in range(LAYERS):
        np.testing.assert_allclose(out[layer], text.prompt_out(layer, tokens), atol=TOLERANCE)
    return sequence


def decode(engine: AttentionClient, texts: dict[int, Text], position: dict[int, int], **note: bool) -> np.ndarray:
    """One token of each sequence, in one step: [layers, sequences, query heads, head size]."""
    items = [AttentionItem(sequence, DECODE, position[sequence], **note) for sequence in texts]
    rows = [texts[sequence].rows(position[sequence]) for sequence in texts]
    return engine.step(items, *(np.concatenate(arrays, axis=1) for arrays in zip(*rows, strict=True)))


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_several_sequences_of_one_stream_keep_and_return_what_the_reference_does(
    engine: AttentionClient, scope: str
) -> None:
    texts: dict[int, Text] = {}
    references: dict[int, PolicyReference] = {}
    position: dict[int, int] = {}
    for seed, (name, tokens) in enumerate([("snapkv_h2o", 90), ("h2o", 57), ("snapkv_h2o", 33), ("streaming", 70)]):
        policy, plain = bounded(name, scope)
        text = Text(seed, tokens + 30)
        sequence = prompt(engine, text, tokens, policy)
        texts[sequence], position[sequence] = text, tokens
        references[sequence] = PolicyReference(text, tokens, plain)
    for _ in range(24):
        out = decode(engine, texts, position)
        for index, sequence in enumerate(texts):
            want = references[sequence].append(position[sequence])
            np.testing.assert_allclose(out[:, index], want, atol=TOLERANCE)
            position[sequence] += 1
    for sequence, reference in references.items():
        kept = engine.kept(sequence)
        assert kept.counts.tokens_seen == position[sequence]
        assert kept.counts.tokens_resident == 26
        assert len(kept.sets) == LAYERS * (1 if scope == "layer" else KV_HEADS)
        for one in kept.sets:
            of_heads = reference.kept(one.layer)
            assert one.positions.tolist() == of_heads[max(one.kv_head, 0)], (one.layer, one.kv_head)


def test_recall_picks_keeps_and_returns_what_the_reference_does(engine: AttentionClient) -> None:
    numbers = {"window": 16, "plan_interval_steps": 4, "sink_tokens": 2, "decay": 0.9}
    numbers_of_recall = {"recall": True, "recall_tokens": 6, "promote_candidates": 0}
    policy = PolicyOptions(heavy_tokens=12, recent_tokens=32, **numbers, **numbers_of_recall)
    plain = policies.Policy("snapkv_h2o", "layer", budget_tokens=44, recent_tokens=32, **numbers)  # type: ignore[arg-type]
    text, tokens = Text(7, 160), 128
    sequence = prompt(engine, text, tokens, policy)
    references = [RecallReference(text, layer, tokens, plain, picks=6) for layer in range(LAYERS)]
    read = 0
    for position in range(tokens, tokens + 24):
        out = decode(engine, {sequence: text}, {sequence: position}, note_picks=True)
        kept = engine.kept(sequence)
        got = {(p.layer, p.kv_head): p.positions.tolist() for p in kept.picks}
        for layer, reference in enumerate(references):
            want, picks = reference.append()
            np.testing.assert_allclose(out[layer, 0], want, atol=TOLERANCE)
            assert [got.get((layer, head), []) for head in range(KV_HEADS)] == picks, (layer, position)
            assert kept.sets[layer].positions.tolist() == sorted(reference.scores)
            read += sum(map(len, picks))
    assert kept.counts.recall.reads == read > 0
    assert all(p.query == tokens + 23 for p in kept.picks)


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_recall_of_everything_equals_the_full_cache(engine: AttentionClient, scope: str) -> None:
    policy = PolicyOptions(policy="recall", scope=scope, heavy_tokens=12, recent_tokens=8, recall_all=True)
    text, tokens = Text(8, 130), 100
    sequence = prompt(engine, text, tokens, policy)
    for position in range(tokens, tokens + 24):
        out = decode(engine, {sequence: text}, {sequence: position})
        for layer in range(LAYERS):
            np.testing.assert_allclose(out[layer, 0], text.full_out(layer, position), atol=1e-3)
    assert engine.kept(sequence).counts.tokens_resident <= 20 + 16


def test_every_query_of_a_second_turn_attends_to_all_before_it_with_recall_of_everything(
    engine: AttentionClient,
) -> None:
    policy = PolicyOptions(policy="recall", heavy_tokens=12, recent_tokens=8, recall_all=True)
    text, tokens = Text(9, 130), 70
    sequence = prompt(engine, text, tokens, policy)
    out = engine.step([AttentionItem(sequence, DECODE, tokens, num_tokens=30)], *text.rows(tokens, 30))
    for position in (tokens, tokens + 29):
        np.testing.assert_allclose(out[1, position - tokens], text.full_out(1, position), atol=1e-3)


def test_a_prompt_in_steps_beside_a_sequence_that_decodes_equals_one_at_once(engine: AttentionClient) -> None:
    policy, _ = bounded("snapkv_h2o", "layer")
    text, other = Text(10, 100), Text(11, 120)
    decoding = prompt(engine, other, 60, policy)
    whole = prompt(engine, text, 80, policy)
    steps = engine.open(policy, prompt_tokens=80, max_tokens=120, prompt_in_steps=True).sequence_id
    for first in range(0, 80, 20):
        phase = PROMPT_LAST if first == 60 else PROMPT
        items = [AttentionItem(steps, phase, first, 20), AttentionItem(decoding, DECODE, 60 + first // 20)]
        pairs = zip(text.rows(first, 20), other.rows(60 + first // 20), strict=True)
        out = engine.step(items, *(np.concatenate(pair, axis=1) for pair in pairs))
        np.testing.assert_allclose(out[1, :20], text.prompt_out(1, first + 20)[first:], atol=TOLERANCE)
    a, b = engine.kept(whole), engine.kept(steps)
    for one, two in zip(a.sets, b.sets, strict=True):
        assert one.positions.tolist() == two.positions.tolist()
        np.testing.assert_allclose(one.scores, two.scores, rtol=1e-5)


def test_rows_read_back_bit_for_bit_and_the_cache_service_knows_the_sets(
    group: Cluster, engine: AttentionClient
) -> None:
    policy, _ = bounded("snapkv_h2o", "layer")
    text, tokens = Text(12, 100), 80
    sequence = prompt(engine, text, tokens, policy)
    for position in range(tokens, tokens + 8):
        decode(engine, {sequence: text}, {sequence: position})
    kept = engine.kept(sequence)
    assert kept.counts.tokens_resident == 26
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            k, v = engine.read_kv(sequence, layer, head, 0, tokens + 8)
            np.testing.assert_array_equal(k, text.k[layer, : tokens + 8, head])
            np.testing.assert_array_equal(v, text.v[layer, : tokens + 8, head])
    engine.close(sequence)
    deadline = time.monotonic() + 10
    while True:
        sets = list(group.sequences.GetSets(sequence_pb2.GetSetsRequest(sequence_id=sequence), timeout=10))
        if sets and sets[0].tokens_seen == tokens + 8:
            break
        assert time.monotonic() < deadline, sets
        time.sleep(0.05)
    for one, resident in zip(sets, kept.sets, strict=True):
        assert sorted([*one.sinks, *one.heavy, *one.recent]) == resident.positions.tolist()
    demoted = sets[0].demoted_ranges[0]
    request = page_store_pb2.ReadRequest(
        sequence_id=sequence, layer=0, kv_head=2, first_position=demoted, num_positions=1
    )
    rows = b"".join(chunk.rows for chunk in group.pages.Read(request, timeout=10))
    assert rows == text.k[0, demoted, 2].tobytes() + text.v[0, demoted, 2].tobytes()


def test_rows_that_one_rank_would_refuse_reach_none_and_the_step_goes_on(engine: AttentionClient) -> None:
    text = Text(15, 40)
    policy, _ = bounded("h2o", "layer")
    sequence = engine.open(policy, prompt_tokens=40, max_tokens=50).sequence_id
    q, k, v = text.rows(0, 40)
    bad = v[0].copy()
    bad[3, KV_HEADS - 1, 1] = np.nan
    engine.begin([AttentionItem(sequence, PROMPT_LAST, 0, 40)])
    with pytest.raises(HeavywaterError, match=r"INVALID_ARGUMENT: values\["):
        engine.attend(0, q[0], k[0], bad)
    for layer in range(LAYERS):
        out = engine.attend(layer, q[layer], k[layer], v[layer])
        np.testing.assert_allclose(out, text.prompt_out(layer, 40), atol=TOLERANCE)
    assert all(status.ok() for status in engine.end())


def test_a_client_that_goes_leaves_nothing_on_the_device(group: Cluster) -> None:
    policy, _ = bounded("h2o", "layer")
    for _ in range(3):
        with AttentionClient(group.worker_addresses, SHAPE, group="e2e") as engine:
            opened = engine.open(policy, prompt_tokens=100, max_tokens=200)
            engine.begin([AttentionItem(opened.sequence_id, PROMPT_LAST, 0, 100)])
    # One that does not say goodbye, either.
    engine = AttentionClient(group.worker_addresses, SHAPE, group="e2e")
    sequence = engine.open(policy, prompt_tokens=100, max_tokens=200).sequence_id
    for channel in engine._channels:
        channel.close()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_wait_until_attachable, group).result(timeout=20)
    with AttentionClient(group.worker_addresses, SHAPE, group="e2e") as engine:
        with pytest.raises(Exception, match="NOT_FOUND"):
            engine.kept(sequence)
        prompt(engine, Text(13, 40), 40, policy)


def _wait_until_attachable(group: Cluster) -> None:
    while True:
        try:
            AttentionClient(group.worker_addresses, SHAPE, group="e2e").disconnect()
        except Exception as error:
            assert "stream is open" in str(error)
            time.sleep(0.1)
        else:
            return


def test_a_rank_that_dies_ends_the_group_within_seconds(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = {**FLAGS, "peer_timeout_ms": 1500}
    with cluster(tmp_path_factory.mktemp("dies"), 3, worker=flags) as group:
        engine = AttentionClient(group.worker_addresses, SHAPE, group="e2e")
        policy, _ = bounded("h2o", "layer")
        text = Text(14, 60)
        sequence = prompt(engine, text, 40, policy)
        group.workers[2].kill()
        start = time.monotonic()
        with pytest.raises(Exception, match="UNAVAILABLE"):
            decode(engine, {sequence: text}, {sequence: 40})
        assert time.monotonic() - start < 5
        while any(worker.alive() for worker in group.workers):
            assert time.monotonic() - start < 15
            time.sleep(0.1)
        for channel in engine._channels:
            channel.close()


def test_an_open_stream_does_not_keep_a_worker_from_ending(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = {**FLAGS, "drain_ms": 500}
    with cluster(tmp_path_factory.mktemp("drain"), 1, worker=flags) as group:
        engine = AttentionClient(group.worker_addresses, SHAPE, group="e2e")
        engine.open(bounded("h2o", "layer")[0], prompt_tokens=40, max_tokens=60)
        assert group.workers[0].terminate(timeout_s=10) == 0
        with pytest.raises(grpc.RpcError):
            engine._ranks[0]._responses.next()
