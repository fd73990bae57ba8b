"""Includes follow the dependency picture (docs/architecture.md); names of classes are used once.

cache_service/base <- worker/{policy,cache,backend,comm} <- worker/rank <- worker/server
cache_service/base <- cache_service/tier <- worker/rank
worker/rank, tier  <- worker/python
proto, base, tier  <- cache_service/registry <- cache_service/server
proto, base        <- client, worker/model, worker/server
base               <- cache_service/security <- client, cache_service/{runtime,server}, worker/server
proto, base        <- cache_service/runtime <- cache_service/server, worker/server
security           <- cache_service/etcd <- cache_service/cluster
registry, runtime  <- cache_service/cluster <- cache_service/server
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("*.h", "*.cuh", "*.cc", "*.cu", "*.inc")

# Folder -> the project's folders that its files may include, itself apart.
# "proto" stands for the generated headers (heavywater/v1/...).
BASE = "cache_service/base"
TIER = "cache_service/tier"
RUNTIME = "cache_service/runtime"
SECURITY = "cache_service/security"
ETCD = "cache_service/etcd"
CLUSTER = "cache_service/cluster"
RANK_PARTS = ("worker/policy", "worker/cache", "worker/backend", "worker/comm")
ALLOWED: dict[str, set[str]] = {
    BASE: set(),
    TIER: {BASE},
    # One layer in the picture: backends know the layout, slot tables the backend's
    # buffers. Policies know none of them.
    "worker/policy": {BASE},
    "worker/cache": {BASE, *RANK_PARTS},
    "worker/backend": {BASE, *RANK_PARTS} - {"worker/comm"},
    "worker/comm": {BASE, "worker/backend"},
    "worker/rank": {BASE, TIER, *RANK_PARTS},
    "worker/model": {BASE, "proto", *RANK_PARTS, "worker/rank"},
    "worker/python": {BASE, TIER, *RANK_PARTS, "worker/rank"},
    "worker/sizing": {BASE, *RANK_PARTS, "worker/rank", "worker/model"},
    "worker/replay": {BASE, TIER, *RANK_PARTS, "worker/rank", "worker/sizing"},
    "worker/server": {
        *(BASE, TIER, RUNTIME, SECURITY, "proto", *RANK_PARTS),
        *("worker/rank", "worker/model", "worker/replay", "client/cpp"),
    },
    SECURITY: {BASE},
    ETCD: {BASE, SECURITY},
    RUNTIME: {BASE, SECURITY, "proto"},
    "cache_service/registry": {BASE, TIER, "proto"},
    CLUSTER: {BASE, ETCD, SECURITY, TIER, RUNTIME, "proto", "cache_service/registry"},
    "cache_service/server": {BASE, TIER, SECURITY, RUNTIME, CLUSTER, "proto", "cache_service/registry"},
    "client/cpp": {BASE, SECURITY, "proto"},
}

# The core builds without these (docs/architecture.md).
CORE = (BASE, TIER, *RANK_PARTS, "worker/rank", "worker/sizing", "worker/replay")
SERVER_ONLY = re.compile(r"^(grpc|google/protobuf|spdlog|yaml-cpp|prometheus|heavywater/v1)")

NAMESPACE = re.compile(r"^namespace (\w[\w:]*)", re.MULTILINE)
DEFINITION = re.compile(r"^(?:class|struct|union|enum class)(?: ABSL_\w+)* (\w+)(?: final)?[^;{(]*\{", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)


def layer_of(path: str) -> str | None:
    """The layer that a path from the root belongs to, None when it is not the project's."""
    if path.startswith("heavywater/v1/"):
        return "proto"
    return next((layer for layer in ALLOWED if path.startswith(layer + "/")), None)


def includes_of(layer: str) -> list[tuple[str, str]]:
    """(file, included path) of every include in the layer."""
    files = sorted(file for pattern in SOURCES for file in (ROOT / layer).rglob(pattern))
    return [
        (str(file.relative_to(ROOT)), included)
        for file in files
        for included in INCLUDE.findall(file.read_text(encoding="utf-8"))
    ]


def violations(layer: str, includes: list[tuple[str, str]]) -> list[str]:
    """One line per include that the picture does not allow."""
    allowed = ALLOWED[layer] | {layer}
    found = []
    for file, included in includes:
        target = layer_of(included)
        if target is not None and target not in allowed:
            found.append(f"{file} includes {included}: {layer} may not depend on {target}")
        if layer in CORE and SERVER_ONLY.match(included):
            found.append(f"{file} includes {included}: the core builds without it")
    return found


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_includes_follow_the_dependency_picture(layer: str) -> None:
    assert violations(layer, includes_of(layer)) == []


def test_every_source_file_belongs_to_a_layer() -> None:
    roots = ("cache_service", "worker", "client")
    files = [file for root in roots for pattern in SOURCES for file in (ROOT / root).rglob(pattern)]
    assert files
    homeless = [str(f.relative_to(ROOT)) for f in files if layer_of(str(f.relative_to(ROOT))) is None]
    assert homeless == []


def test_no_two_classes_of_headers_have_one_name() -> None:
    """Two definitions of one name may be linked together, and one then gets the other's functions."""
    places: dict[str, set[str]] = {}
    headers = [file for root in ("cache_service", "worker", "client", "tests") for file in (ROOT / root).rglob("*.h")]
    for header in headers:
        text = header.read_text(encoding="utf-8")
        space = "::".join(NAMESPACE.findall(text))
        for name in DEFINITION.findall(text):
            places.setdefault(f"{space}::{name}", set()).add(str(header.relative_to(ROOT)))
    assert len(places) > 400
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    ("layer", "included"),
    [
        (BASE, "worker/policy/policy.h"),
        (TIER, "worker/rank/model.h"),
        ("cache_service/server", "worker/rank/model.h"),
        ("worker/server", "cache_service/server/sequence_handlers.h"),
        ("worker/rank", "grpcpp/grpcpp.h"),
        ("worker/policy", "heavywater/v1/common.pb.h"),
        ("client/cpp", "worker/policy/policy.h"),
    ],
)
def test_a_forbidden_include_is_found(layer: str, included: str) -> None:
    assert len(violations(layer, [("file.cc", included)])) >= 1
