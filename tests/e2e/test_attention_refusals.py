"""What AttentionService refuses: each by name, with nothing changed, and the server stays up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from attention_reference import FLAGS, KV_HEADS, LAYERS, QUERY_HEADS, SIZE, Text
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
from heavywater.v1 import attention_pb2, attention_pb2_grpc

SHAPE = AttentionShape(LAYERS, QUERY_HEADS, KV_HEADS, SIZE, dtype="fp32")
GOOD = {"prompt_tokens": 40, "max_tokens": 60}
POLICY = PolicyOptions(policy="h2o", heavy_tokens=8, recent_tokens=8)
ATTACH = {
    "group": "e2e",
    "rank": 0,
    "size": 1,
    "num_layers": LAYERS,
    "num_query_heads": QUERY_HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": SIZE,
    "dtype": "fp32",
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = {**FLAGS, "prompt_chunk_tokens": 64, "device_memory_bytes": 16 << 20}
    with cluster(tmp_path_factory.mktemp("refusals"), 1, worker=flags) as started:
        yield started


@pytest.fixture(scope="module")
def engine(group: Cluster) -> Iterator[AttentionClient]:
    """One client for all cases: what one of them breaks, the next ones find."""
    with AttentionClient(group.worker_addresses, SHAPE, group="e2e") as client:
        yield client


@pytest.fixture(scope="module")
def ready(engine: AttentionClient) -> int:
    """A sequence with 20 of its 40 tokens of prompt in its layers."""
    sequence = engine.open(POLICY, **GOOD, prompt_in_steps=True).sequence_id
    engine.step([AttentionItem(sequence, PROMPT, 0, 20)], *Text(1, 20).rows(0, 20))
    return sequence


def works(engine: AttentionClient) -> None:
    text = Text(2, 41)
    sequence = engine.open(POLICY, **GOOD).sequence_id
    out = engine.prompt(sequence, *text.rows(0, 40))
    np.testing.assert_allclose(out[1], text.prompt_out(1, 40), atol=1e-4)
    engine.step([AttentionItem(sequence, DECODE, 40)], *text.rows(40))
    assert engine.kept(sequence).counts.tokens_resident == 16
    engine.close(sequence)


def refused(call: Callable[[], object], code: str, named: str) -> None:
    with pytest.raises(HeavywaterError) as error:
        call()
    assert error.value.code == code, error.value
    assert named in error.value.message, error.value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group": "another"}, "group is another, want e2e"),
        ({"rank": 1}, "rank is 1, want 0"),
        ({"size": 2}, "size is 2, want 1"),
        ({"num_layers": 3}, "num_layers is 3, want 2"),
        ({"num_query_heads": 8}, "num_query_heads is 8, want 9"),
        ({"num_kv_heads": 9}, "num_kv_heads is 9, want 3"),
        ({"head_dim": 128}, "head_dim is 128, want 64"),
        ({"dtype": "bf16"}, "dtype is bf16, want fp32"),
        ({}, "Step stream is open"),
    ],
)
def test_an_attachment_that_differs_is_refused_by_name(
    group: Cluster, ready: int, change: dict[str, object], named: str
) -> None:
    stub = attention_pb2_grpc.AttentionServiceStub(group.channel(group.worker_address))
    with pytest.raises(grpc.RpcError) as error:
        stub.Attach(attention_pb2.AttachEngineRequest(**{**ATTACH, **change}), timeout=10)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert named in error.value.details()


@pytest.mark.parametrize(
    ("policy", "change", "code", "named"),
    [
        (POLICY, {"prompt_tokens": 0}, "INVALID_ARGUMENT", "prompt_tokens is 0"),
        (POLICY, {"max_tokens": 39}, "INVALID_ARGUMENT", "max_tokens is 39, want 40"),
        (POLICY, {"max_tokens": 1 << 60}, "INVALID_ARGUMENT", "max_tokens"),
        (POLICY, {"tenant": "x" * 200}, "INVALID_ARGUMENT", "tenant"),
        (PolicyOptions(policy="lru"), {}, "INVALID_ARGUMENT", "policy.policy"),
        (PolicyOptions(scope="galaxy"), {}, "INVALID_ARGUMENT", "policy.scope"),
        (PolicyOptions(policy="h2o", heavy_tokens=8, recent_tokens=-1), {}, "INVALID_ARGUMENT", "recent_tokens"),
        (PolicyOptions(decay=float("nan")), {}, "INVALID_ARGUMENT", "decay"),
        (POLICY, {"prompt_tokens": 1 << 20, "max_tokens": 1 << 21}, "RESOURCE_EXHAUSTED", "longest prompt that fits"),
    ],
)
def test_a_sequence_that_cannot_be_is_refused_by_name(
    engine: AttentionClient, policy: PolicyOptions, change: dict[str, object], code: str, named: str
) -> None:
    refused(lambda: engine.open(policy, **{**GOOD, **change}), code, named)  # type: ignore[arg-type]
    works(engine)


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"sequence_id": 987654321}, "NOT_FOUND", "987654321"),
        ({"phase": 0}, "INVALID_ARGUMENT", "items[0].phase is 0"),
        ({"phase": 17}, "INVALID_ARGUMENT", "items[0].phase is 17"),
        ({"phase": DECODE}, "FAILED_PRECONDITION", "20 of 40 tokens"),
        ({"first_position": 0}, "INVALID_ARGUMENT", "want 20 (tokens appended)"),
        ({"first_position": -1}, "INVALID_ARGUMENT", "items[0].first_position is -1"),
        ({"first_position": 1 << 40}, "INVALID_ARGUMENT", "items[0].first_position"),
        ({"num_tokens": 0}, "INVALID_ARGUMENT", "items[0].num_tokens is 0"),
        ({"num_tokens": 1 << 40}, "INVALID_ARGUMENT", "items[0].num_tokens"),
        ({"num_tokens": 19}, "INVALID_ARGUMENT", "39 tokens with PROMPT_LAST, want 40"),
        ({"phase": PROMPT}, "INVALID_ARGUMENT", "want fewer than 40"),
    ],
)
def test_a_step_that_cannot_be_is_refused_by_name(
    engine: AttentionClient, ready: int, change: dict[str, int], code: str, named: str
) -> None:
    item = {"sequence_id": ready, "phase": PROMPT_LAST, "first_position": 20, "num_tokens": 20, **change}
    refused(lambda: engine.begin([AttentionItem(**item)]), code, named)
    works(engine)


def test_steps_of_nothing_of_twice_the_same_and_of_too_much_are_refused(engine: AttentionClient, ready: int) -> None:
    item = AttentionItem(ready, PROMPT_LAST, 20, 20)
    refused(lambda: engine.begin([]), "INVALID_ARGUMENT", "items is empty")
    refused(lambda: engine.begin([item, item]), "INVALID_ARGUMENT", "twice")
    refused(lambda: engine.begin([item] * 1025), "INVALID_ARGUMENT", "1025 entries")
    more = engine.open(POLICY, prompt_tokens=60, max_tokens=60).sequence_id
    refused(
        lambda: engine.begin([item, AttentionItem(more, PROMPT_LAST, 0, 60)]), "INVALID_ARGUMENT", "max_step_tokens, 64"
    )
    refused(lambda: engine.begin([AttentionItem(more, PROMPT, 0, 20)]), "FAILED_PRECONDITION", "prompt_in_steps")
    engine.close(more)
    refused(lambda: engine.close(more), "NOT_FOUND", "not open in this stream")
    works(engine)


def test_rows_that_cannot_be_are_refused_by_name_and_the_step_goes_on(engine: AttentionClient) -> None:
    text = Text(3, 41)
    sequence = engine.open(POLICY, **GOOD).sequence_id
    q, k, v = text.rows(0, 40)
    refused(lambda: engine.attend(0, q[0], k[0], v[0]), "FAILED_PRECONDITION", "no step has begun")
    refused(engine.end, "FAILED_PRECONDITION", "no step has begun")
    engine.begin([AttentionItem(sequence, PROMPT_LAST, 0, 40)])
    refused(lambda: engine.begin([AttentionItem(sequence, PROMPT_LAST, 0, 40)]), "FAILED_PRECONDITION", "not ended")
    refused(lambda: engine.attend(1, q[0], k[0], v[0]), "FAILED_PRECONDITION", "layer is 1, want 0")
    refused(lambda: engine.attend(-1, q[0], k[0], v[0]), "FAILED_PRECONDITION", "layer is -1")
    refused(lambda: engine.attend(0, q[0], k[0, :39], v[0]), "INVALID_ARGUMENT", "keys has")
    refused(lambda: engine.attend(0, q[0], k[0], v[0, :, :2]), "INVALID_ARGUMENT", "values has")
    refused(lambda: engine.attend(0, q[0, :, :, :7], k[0], v[0]), "INVALID_ARGUMENT", "queries has")
    refused(lambda: engine.attend(0, q[0, :0], k[0, :0], v[0, :0]), "INVALID_ARGUMENT", "queries has 0")
    for name, index in [("queries", 0), ("keys", 1), ("values", 2)]:
        for bad in (float("nan"), float("inf"), -float("inf")):
            rows = [q[0].copy(), k[0].copy(), v[0].copy()]
            rows[index][0, 0, 5] = bad
            refused(lambda rows=rows: engine.attend(0, *rows), "INVALID_ARGUMENT", f"{name}[5]")
    refused(engine.end, "FAILED_PRECONDITION", "layer 0")
    refused(lambda: engine.kept(sequence), "FAILED_PRECONDITION", "not ended")
    refused(lambda: engine.read_kv(sequence, 0, 0, 0, 1), "FAILED_PRECONDITION", "")
    refused(lambda: engine.close(sequence), "FAILED_PRECONDITION", "not ended")
    refused(lambda: engine.open(POLICY, **GOOD), "FAILED_PRECONDITION", "not ended")
    out = [engine.attend(layer, q[layer], k[layer], v[layer]) for layer in range(LAYERS)]
    np.testing.assert_allclose(out[1], text.prompt_out(1, 40), atol=1e-4)
    refused(lambda: engine.attend(2, q[0], k[0], v[0]), "FAILED_PRECONDITION", "layer is 2")
    assert [status.code for status in engine.end()] == [0]
    engine.close(sequence)
    works(engine)


def test_reads_of_what_is_not_there_are_refused(engine: AttentionClient) -> None:
    text = Text(4, 40)
    sequence = engine.open(POLICY, **GOOD).sequence_id
    refused(lambda: engine.kept(sequence), "FAILED_PRECONDITION", "prompt")
    engine.prompt(sequence, *text.rows(0, 40))
    refused(lambda: engine.kept(987654321), "NOT_FOUND", "987654321")
    refused(lambda: engine.read_kv(987654321, 0, 0, 0, 1), "NOT_FOUND", "987654321")
    refused(lambda: engine.read_kv(sequence, 2, 0, 0, 1), "INVALID_ARGUMENT", "layer is 2")
    refused(lambda: engine.read_kv(sequence, 0, 0, 40, 1), "OUT_OF_RANGE", "40 seen")
    refused(lambda: engine.read_kv(sequence, 0, 0, -1, 1), "OUT_OF_RANGE", "from -1")
    refused(lambda: engine.read_kv(sequence, 0, 0, 0, 0), "INVALID_ARGUMENT", "num_positions is 0")
    request = attention_pb2.ReadKvRequest(sequence_id=sequence, kv_head=3, num_positions=1)
    with pytest.raises(grpc.RpcError) as error:
        list(engine._ranks[0]._stub.ReadKv(request, timeout=10))
    assert "kv_head is 3, want 0 to 2" in error.value.details()
    engine.close(sequence)
    works(engine)


def test_streams_without_an_attachment_and_oversize_messages_end_alone(group: Cluster) -> None:
    stub = attention_pb2_grpc.AttentionServiceStub(group.channel(group.worker_address))
    with cluster(group.folder / "own", 1, worker=FLAGS) as other:
        stub = attention_pb2_grpc.AttentionServiceStub(other.channel(other.worker_address))
        for attachment in (0, 12345):
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Step(iter([attention_pb2.StepRequest(attachment_id=attachment)]), timeout=10))
            assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "attachment_id" in error.value.details()
        attached = stub.Attach(attention_pb2.AttachEngineRequest(**ATTACH), timeout=10).attachment_id
        empty = attention_pb2.StepRequest(attachment_id=attached)
        answers = list(stub.Step(iter([empty, attention_pb2.StepRequest(attachment_id=attached + 2)]), timeout=10))
        assert ["absent" in answers[0].error.message, "attachment_id" in answers[1].error.message] == [True, True]
        attached = stub.Attach(attention_pb2.AttachEngineRequest(**ATTACH), timeout=10).attachment_id
        large = attention_pb2.StepRequest(
            attachment_id=attached, attend=attention_pb2.AttendLayer(queries=b"x" * (5 << 20))
        )
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Step(iter([large]), timeout=10))
        assert error.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
        with AttentionClient(other.worker_addresses, SHAPE, group="e2e") as engine:
            works(engine)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"engine_layers": 0}, "engine_layers is 0"),
        ({"engine_model": ""}, "engine_model"),
        ({"engine_query_heads": 8}, "num_kv_heads"),
        ({"engine_attention_scale": -1}, "engine_attention_scale"),
        ({"model": "some.gguf"}, "engine_* fields are set"),
    ],
)
def test_a_worker_for_engines_names_what_is_wrong_in_its_configuration(
    tmp_path_factory: pytest.TempPathFactory, change: dict[str, object], named: str
) -> None:
    with (
        pytest.raises(RuntimeError, match=named.replace("*", r"\*")),
        cluster(tmp_path_factory.mktemp("config"), 1, cache=None, worker={**FLAGS, **change}),
    ):
        pass
