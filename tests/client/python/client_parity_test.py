"""Every call of the API that is a client's is a method of each client, by the same name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import heavywater
import pytest
from heavywater import aio
from heavywater.v1 import admin_pb2, generation_pb2, page_store_pb2, sequence_pb2

ROOT = Path(__file__).resolve().parents[3]
SERVICES = {
    "GenerationService": (generation_pb2, "client.h"),
    "SequenceService": (sequence_pb2, "client.h"),
    "AdminService": (admin_pb2, "admin_client.h"),
    "PageStoreService": (page_store_pb2, "client.h"),
}
# What ranks ask of the cache service, of sequences that they have leases of.
OF_RANKS = {
    "SequenceService": {"Reopen", "ReadSnapshot"},
    "PageStoreService": {"Attach", "Reserve", "Write", "Commit", "Abort", "Rest", "Ask"},
}


def calls() -> list[tuple[str, str]]:
    return [
        (service, method.name)
        for service, (module, _) in SERVICES.items()
        for method in module.DESCRIPTOR.services_by_name[service].methods
        if method.name not in OF_RANKS.get(service, ())
    ]


def python_name(call: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", call).lower()


@pytest.mark.parametrize(("service", "call"), calls())
def test_each_client_has_it_typed_and_documented(service: str, call: str) -> None:
    name = python_name(call)
    of_both = [inspect.signature(getattr(client, name)) for client in (heavywater.Client, aio.Client)]
    assert list(of_both[0].parameters) == list(of_both[1].parameters)
    for client, signature in zip((heavywater.Client, aio.Client), of_both, strict=True):
        assert inspect.getdoc(getattr(client, name)), f"{client}.{name} has no description"
        assert signature.return_annotation is not inspect.Signature.empty
        untyped = [one.name for one in signature.parameters.values() if one.annotation is one.empty]
        assert untyped == ["self"]
    header = (ROOT / "client/cpp" / SERVICES[service][1]).read_text(encoding="utf-8")
    assert re.search(rf"[ >]{call}\(", header), f"{SERVICES[service][1]} has no {call}"


def test_what_the_clients_have_beyond_it_is_the_same_in_both() -> None:
    def public(of: type) -> set[str]:
        return {name for name in dir(of) if not name.startswith("_")}

    assert public(aio.Client) == public(heavywater.Client)
    header = (ROOT / "client/cpp/admin_client.h").read_text(encoding="utf-8")
    for call in ("Unpin", "UndoDrain"):
        assert hasattr(heavywater.Client, python_name(call))
        assert re.search(rf"[ >]{call}\(", header)
