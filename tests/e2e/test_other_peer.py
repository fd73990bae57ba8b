"""A peer of another version of the API, without another build: fields that nobody knows, fields that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from cluster import Cluster, cluster, takes_long
from google.protobuf.message import Message
from heavywater import Client
from heavywater.v1 import group_pb2, page_store_pb2, sequence_pb2
from other_peer import Change, Proxy, newer
from test_turns import OFTEN, RECALL, Conversation

# What came to the API after its first half year: an older peer does not know it. Of requests:
LATE_OF_REQUESTS: Mapping[str, tuple[type[Message], tuple[str, ...]]] = {
    "/heavywater.v1.GroupService/Heartbeat": (group_pb2.HeartbeatRequest, ("answered_number",)),
}
# Of responses:
LATE: Mapping[str, tuple[type[Message], tuple[str, ...]]] = {
    "/heavywater.v1.GroupService/Heartbeat": (
        group_pb2.HeartbeatResponse,
        ("host_shortage_bytes", "host_restable_bytes", "suspended_sequence_ids", "number"),
    ),
    "/heavywater.v1.SequenceService/Open": (sequence_pb2.OpenSequenceResponse, ("prefix_tokens",)),
    "/heavywater.v1.PageStoreService/Ask": (page_store_pb2.AskResponse, ("offsets",)),
}


def _same(method: str, message: bytes) -> bytes:
    return message


def _without(
    late: Mapping[str, tuple[type[Message], tuple[str, ...]]], method: str, message: bytes
) -> bytes:
    if method not in late:
        return message
    kind, fields = late[method]
    parsed = kind.FromString(message)
    for field in fields:
        parsed.ClearField(field)
    return parsed.SerializeToString()


_older_request = partial(_without, LATE_OF_REQUESTS)
_older_response = partial(_without, LATE)


def _talk(group: Cluster, service: Cluster, prompt: list[int], turns: bool) -> list[int]:
    talk = Conversation(group, prompt[:100], RECALL)
    answer = talk.say(30)
    if not turns:  # pages that were streamed are not read back
        return answer
    with Client(worker=group.worker_address, cache=service.cache_address) as client:
        client.suspend(talk.sequence)
    return answer + talk.say(20, prompt[400:410])


@pytest.mark.parametrize(
    ("request_change", "response_change"),
    [(newer, _same), (_same, newer), (_older_request, _same), (_older_request, _older_response)],
    ids=["worker-is-newer", "cache-service-is-newer", "worker-is-older", "cache-service-is-older"],
)
@pytest.mark.parametrize(
    "worker", [{}, pytest.param({"disable_slab": True}, marks=takes_long)], ids=["slab", "streamed"]
)
def test_a_peer_with_more_or_fewer_fields_is_as_one_of_this_version(
    folder: Path, long_prompt: list[int], request_change: Change, response_change: Change, worker: dict[str, object]
) -> None:
    with ExitStack() as stack:
        service = stack.enter_context(cluster(folder / "cache", 0))
        proxy = Proxy(service.cache_address, request_change, response_change)
        stack.callback(proxy.close)
        flags = {**OFTEN, **worker, "cache_address": proxy.address}
        group = stack.enter_context(cluster(folder / "group", 1, cache=None, worker=flags))
        plain = stack.enter_context(cluster(folder / "plain", 1, worker={**OFTEN, **worker}))
        assert _talk(group, service, long_prompt, not worker) == _talk(plain, plain, long_prompt, not worker)
        assert proxy.calls["/heavywater.v1.GroupService/ReportPlan"] > 0
        seen = "PageStoreService/Write" if worker else "SequenceService/Reopen"
        assert proxy.calls[f"/heavywater.v1.{seen}"] > 0
        assert proxy.changed > 0
        assert "refused" not in group.workers[0].log.read_text()
