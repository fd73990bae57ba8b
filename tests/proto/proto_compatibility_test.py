"""No change of the protos breaks whoever was built against an earlier version."""

from __future__ import annotations

import pytest
from proto_fields import breaks, current, read_list

BEFORE = {
    "p.M.a": "1 int64",
    "p.M.b": "2 repeated string",
    "p.E.ONE": "1 value",
    "p.S.Call": "rpc (p.M) returns (p.M)",
}


def test_nothing_that_was_recorded_has_changed() -> None:
    assert breaks(read_list(), current()) == []


def test_everything_is_recorded() -> None:
    missing = sorted(set(current()) - set(read_list()))
    assert missing == [], "new in the protos: run python tests/proto/proto_fields.py"


def test_the_list_holds_fields_enum_values_and_calls() -> None:
    recorded = read_list()
    assert recorded["heavywater.v1.CacheConfig.host_bytes"] == "3 int64"
    assert recorded["heavywater.v1.GenerationService.Generate"].endswith(
        "returns (stream heavywater.v1.GenerateResponse)"
    )
    assert len(recorded) > 300


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p.M.a": None}, "p.M.a (1 int64) has gone"),
        ({"p.M.a": "3 int64"}, "p.M.a was 1 int64 and is 3 int64"),
        ({"p.M.a": "1 int32"}, "p.M.a was 1 int64 and is 1 int32"),
        ({"p.M.b": "2 string"}, "p.M.b was 2 repeated string and is 2 string"),
        ({"p.M.a": None, "p.M.c": "1 bytes"}, "p.M.c takes the number 1 of p.M.a"),
        ({"p.E.ONE": "2 value"}, "p.E.ONE was 1 value and is 2 value"),
        ({"p.S.Call": "rpc (p.M) returns (stream p.M)"}, "p.S.Call was rpc (p.M) returns (p.M)"),
    ],
)
def test_a_breaking_change_is_named(change: dict[str, str | None], words: str) -> None:
    now = {name: text for name, text in (BEFORE | change).items() if text is not None}
    assert any(words in line for line in breaks(BEFORE, now))


def test_additions_break_nothing() -> None:
    added = {"p.M.c": "3 string", "p.N.a": "1 string", "p.E.TWO": "2 value", "p.S.More": "rpc (p.M) returns (p.N)"}
    assert breaks(BEFORE, BEFORE | added) == []
