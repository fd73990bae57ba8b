"""Which conversations the endpoint goes on with: the table, with a client that remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from heavywater.errors import HeavywaterError
from heavywater.http.asked import Asked, asked_chat
from heavywater.http.options import HttpOptions
from heavywater.http.turns import Turns
from heavywater.v1 import common_pb2


class FakeClient:
    """Sequences of 40 tokens, 30 of them the prompt's."""

    has_cache = True

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.suspended: list[tuple[int, float]] = []
        self.refuses_suspend = False
        self.reports_after = 0

    async def get(self, sequence_id: int) -> Any:
        self.reports_after -= 1
        return SimpleNamespace(tokens=list(range(40)), finished=self.reports_after < 0, prompt_tokens=30)

    async def suspend(self, sequence_id: int, ttl_s: float) -> None:
        if self.refuses_suspend:
            raise HeavywaterError("FAILED_PRECONDITION", "it has no committed state yet")
        self.suspended.append((sequence_id, ttl_s))

    async def close(self, sequence_id: int) -> None:
        self.closed.append(sequence_id)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def asked(**changes: Any) -> Asked:
    values = {"messages": [{"role": "user", "content": "?"}]}
    return replace(asked_chat(values, HttpOptions("worker:1")), **changes)


def answered(sequence_id: int, reason: str = "eos") -> Any:
    summary = SimpleNamespace(finish_reason=reason, counts=SimpleNamespace(tokens_seen=40.0))
    return SimpleNamespace(sequence_id=sequence_id, summary=summary)


LAST: Any = SimpleNamespace(token=99)
Test = Callable[[FakeClient, Turns, Clock], Awaitable[None]]


def run(test: Test, limit: int = 2) -> FakeClient:
    client, clock = FakeClient(), Clock()

    async def running() -> None:
        turns = Turns(client, lambda text: [0] * len(text), limit, 600.0, clock)  # type: ignore[arg-type]
        await test(client, turns, clock)
        await turns.finish()

    asyncio.run(running())
    return client


def test_the_next_question_goes_on_once() -> None:
    async def test(client: FakeClient, turns: Turns, clock: Clock) -> None:
        turns.keep(asked(), "q a", answered(7), LAST)
        turn = await turns.take(asked(), "q a more")
        assert turn is not None
        assert (turn.held.sequence_id, turn.rest, turn.held.tokens) == (7, " more", list(range(40)))
        assert client.suspended == [(7, 600.0)]
        assert await turns.take(asked(), "q a more") is None

    assert run(test).closed == []  # whoever took it closes it


def test_an_answer_that_did_not_end_itself_has_its_last_token_still_to_come() -> None:
    async def test(client: FakeClient, turns: Turns, clock: Clock) -> None:
        turns.keep(asked(), "q a", answered(7, "length"), LAST)
        turn = await turns.take(asked(), "q a more")
        assert turn is not None
        assert turn.held.tokens == [*range(40), 99]

    run(test)


@pytest.mark.parametrize(
    "other",
    [
        asked(tenant="another"),
        asked(policy=common_pb2.PolicyOptions(policy="h2o")),
        asked(n=2),
        asked(keep=True),
        asked(messages=(), prompts=("q a more",)),
    ],
)
def test_what_is_not_its_own_stays(other: Asked) -> None:
    async def test(client: FakeClient, turns: Turns, clock: Clock) -> None:
        turns.keep(asked(tenant="one"), "q a", answered(7), LAST)
        assert await turns.take(other, "q a more") is None
        assert await turns.take(asked(tenant="one"), "other text") is None
        assert turns.count == 1

    assert run(test).closed == [7]


def test_the_longest_conversation_is_gone_on_with() -> None:
    async def test(client: FakeClient, turns: Turns, clock: Clock) -> None:
        turns.keep(asked(), "q a", answered(7), LAST)
        turns.keep(asked(), "q a q2 a2", answered(8), LAST)
        turn = await turns.take(asked(), "q a q2 a2 q3")
        assert turn is not None
        assert turn.held.sequence_id == 8

    assert run(test).closed == [7]


def test_much_new_text_is_computed_anew() -> None:
    async def test(client: FakeClient, turns: Turns, clock: Clock) -> None:
        turns.keep(asked(), "q a", answered(7), LAST)
        assert await turns.take(asked(), "q a" + 11 * "x") is None

    assert run(test).closed == [7]


def test_the_table_is_bounded_in_number_and_time() -> None:
    async def test(client: FakeClient, turns: Turns, clock: Clock) -> None:
        for sequence in (1, 2, 3):
            turns.keep(asked(), f"q{sequence}", answered(sequence), LAST)
        assert turns.count == 2
        clock.now_s = 599.0
        turns.keep(asked(), "late", answered(4), LAST)
        clock.now_s = 601.0
        assert await turns.take(asked(), "q3 more") is None
        assert turns.count == 1

    assert sorted(run(test).closed) == [1, 2, 3, 4]


@pytest.mark.parametrize("broken", [{"refuses_suspend": True}, {"reports_after": 10**6}])
def test_a_sequence_that_cannot_go_on_is_closed(broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heavywater.http.turns._REPORT_S", -1.0)

    async def test(client: FakeClient, turns: Turns, clock: Clock) -> None:
        vars(client).update(broken)
        turns.keep(asked(), "q a", answered(7), LAST)
        assert await turns.take(asked(), "q a more") is None

    assert run(test).closed == [7]
