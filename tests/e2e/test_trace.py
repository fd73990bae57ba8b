"""One request in the logs of all processes: the trace id of its caller, or one that the worker makes and tells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, cluster
from heavywater.v1 import generation_pb2, generation_pb2_grpc, sequence_pb2, sequence_pb2_grpc

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("trace"), 1) as started:
        yield started


def generate(group: Cluster, metadata: tuple[tuple[str, str], ...] = ()) -> tuple[int, str]:
    """The sequence, and the trace id that the worker tells."""
    request = generation_pb2.GenerateRequest(max_new_tokens=2, ignore_eos=True)
    request.tokens.extend([504, 260, 253])
    with grpc.insecure_channel(group.worker_address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata)
        told = dict(call.initial_metadata())["x-trace-id"]
        return next(iter([message.sequence_id for message in call])), told


def lines(log: Path, *wanted: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if all(word in line for word in wanted)]


def test_the_callers_trace_is_in_the_logs_of_all_processes(group: Cluster) -> None:
    sequence, told = generate(group, PARENT)
    assert told == TRACE
    with grpc.insecure_channel(group.cache_address) as channel:
        close = sequence_pb2.CloseSequenceRequest(sequence_id=sequence)
        sequence_pb2_grpc.SequenceServiceStub(channel).Close(close, metadata=PARENT)
    name, trace = f'sequence="{sequence}"', f'trace="{TRACE}"'
    deadline = time.monotonic() + 5
    while not lines(group.workers[0].log, "sequence ended", name) and time.monotonic() < deadline:
        time.sleep(0.05)
    for log, event in [
        (group.workers[0].log, "sequence admitted"),
        (group.workers[0].log, "sequence ended"),
        (group.folder / "cache.log", "sequence opened"),
        (group.folder / "cache.log", "sequence closed"),
    ]:
        assert len(lines(log, event, name, trace)) == 1, (log.name, event)


def test_a_request_without_one_gets_one_of_its_own(group: Cluster) -> None:
    (first, one), (second, other) = generate(group), generate(group, (("traceparent", "rubbish"),))
    assert len(one) == len(other) == 32 and one != other
    opened = group.folder / "cache.log"
    assert lines(opened, "sequence opened", f'sequence="{first}"', f'trace="{one}"')
    assert lines(opened, "sequence opened", f'sequence="{second}"', f'trace="{other}"')
    assert not lines(group.workers[0].log, "rubbish")
