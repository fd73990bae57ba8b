"""Bad input: a clear status that names the field; nothing changes; the server stays up."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from cluster import Cluster, cluster, token_ids
from heavywater.v1 import page_store_pb2, sequence_pb2

GOOD = {"tokens": [504, 260, 253], "max_new_tokens": 4, "ignore_eos": True}
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("bad_input"), 1) as started:
        yield started


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"tokens": []}, INVALID, "tokens"),
        ({"text": "both"}, INVALID, "text"),
        ({"tokens": [49152]}, INVALID, "49152"),
        ({"tokens": [-1]}, INVALID, "-1"),
        ({"max_new_tokens": 0}, INVALID, "max_new_tokens"),
        ({"max_new_tokens": -3}, INVALID, "max_new_tokens"),
        ({"max_new_tokens": 9000}, grpc.StatusCode.OUT_OF_RANGE, "8192"),
        ({"sampling": {"temperature": -1.0}}, INVALID, "temperature"),
        ({"sampling": {"temperature": float("nan")}}, INVALID, "temperature"),
        ({"sampling": {"temperature": float("inf")}}, INVALID, "temperature"),
        ({"policy": {"policy": "lru"}}, INVALID, "lru"),
        ({"policy": {"scope": "galaxy"}}, INVALID, "galaxy"),
        ({"policy": {"policy": "h2o", "heavy_tokens": 8, "recent_tokens": -1}}, INVALID, "recent"),
        ({"policy": {"policy": "h2o", "heavy_tokens": -8, "recent_tokens": 8}}, INVALID, "heavy"),
        ({"policy": {"heavy_tokens": 2, "recent_tokens": 2, "sink_tokens": 4}}, INVALID, "sink"),
        ({"policy": {"heavy_ratio": 1.5}}, INVALID, "heavy_ratio"),
        ({"policy": {"recent_ratio": float("nan")}}, INVALID, "recent_ratio"),
        ({"policy": {"pool_kernel": 4}}, INVALID, "pool_kernel"),
        ({"policy": {"pooling": "median"}}, INVALID, "median"),
        ({"policy": {"plan_interval_steps": -1}}, INVALID, "plan_interval_steps"),
        ({"policy": {"decay": 2.0}}, INVALID, "decay"),
        ({"policy": {"window": -2}}, INVALID, "window"),
        ({"forced_tokens": [5, 6], "max_new_tokens": 3}, INVALID, "forced_tokens"),
    ],
)
def test_a_wrong_field_of_generate_is_named(
    group: Cluster, change: dict[str, object], code: grpc.StatusCode, named: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        group.generate(**{**GOOD, **change})
    assert refused.value.code() == code, refused.value
    assert named in refused.value.details(), refused.value.details()
    assert len(token_ids(group.generate(**GOOD))) == 4


def test_an_oversize_message_is_refused_and_the_server_stays_up(group: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        group.generate(text="x" * (40 << 20), max_new_tokens=1)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(token_ids(group.generate(**GOOD))) == 4


def test_unknown_sequences_are_not_found(group: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=987654321))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as refused:
        list(group.sequences.GetSets(sequence_pb2.GetSetsRequest(sequence_id=987654321)))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as refused:
        list(group.pages.Read(page_store_pb2.ReadRequest(sequence_id=987654321, num_positions=1)))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_reads_outside_a_sequence_or_with_another_dtype_are_refused(group: Cluster) -> None:
    sequence = group.generate(**GOOD)[0].sequence_id
    fingerprint = group.sequences.Get(sequence_pb2.GetSequenceRequest(sequence_id=sequence)).fingerprint
    good = {"sequence_id": sequence, "layer": 0, "kv_head": 0, "first_position": 0, "num_positions": 1}
    assert len(list(group.pages.Read(page_store_pb2.ReadRequest(**good)))) == 1
    for change, codes in [
        ({"layer": 99}, {INVALID, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND}),
        ({"kv_head": -1}, {INVALID, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND}),
        ({"first_position": 200}, {INVALID, grpc.StatusCode.OUT_OF_RANGE}),
        ({"num_positions": 0}, {INVALID}),
        ({"num_positions": 100000}, {INVALID, grpc.StatusCode.OUT_OF_RANGE}),
    ]:
        with pytest.raises(grpc.RpcError) as refused:
            list(group.pages.Read(page_store_pb2.ReadRequest(**{**good, **change})))
        assert refused.value.code() in codes, (change, refused.value)
    fingerprint.dtype = "fp32"
    with pytest.raises(grpc.RpcError) as refused:
        list(group.pages.Read(page_store_pb2.ReadRequest(**good, fingerprint=fingerprint)))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "dtype" in refused.value.details()
