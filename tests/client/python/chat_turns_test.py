"""A chat goes on with the sequence of its last answer, where that is worth it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from client_fakes import PIECES, FakeServers
from heavywater import Client, PolicyOptions
from heavywater.chat_session import ChatSession
from heavywater.v1 import generation_pb2

LONG = "a" * 400
NEW = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def session(servers: FakeServers) -> Iterator[ChatSession]:
    servers.worker.answer = lambda request: "abc"
    with Client(worker=servers.address, cache=servers.address) as client:
        yield ChatSession(client, client.get_model(), PolicyOptions(policy="h2o"), 3)


def ask(session: ChatSession, servers: FakeServers, question: str) -> generation_pb2.GenerateRequest:
    """The request that it takes; the fake counts letters as tokens, and has seen all but the last."""
    asked = [*session.conversation.messages, {"role": "user", "content": question}]
    servers.cache.num_tokens = len(session.model.chat(asked)) + 2
    assert session.ask(question, lambda token: None)
    return servers.worker.requests[-1]


def test_a_short_question_brings_the_tokens_and_is_their_suffix(session: ChatSession, servers: FakeServers) -> None:
    first = ask(session, servers, LONG)
    assert first.text
    assert not first.continue_sequence_id
    assert servers.cache.suspended == {42: 600_000}
    second = ask(session, servers, "b")
    assert second.continue_sequence_id == 42
    assert len(second.tokens) == len(first.text) + 3
    assert PIECES[second.tokens[-1]] == "c", "the last one of the answer was not taken in"
    assert second.suffix_text == NEW.format("b")
    assert second.policy.policy == "h2o"
    assert servers.cache.closed == [], "it goes on"


def test_a_long_question_or_another_text_is_asked_as_a_whole(session: ChatSession, servers: FakeServers) -> None:
    ask(session, servers, LONG)
    assert ask(session, servers, "c" * 300).text
    ask(session, servers, "b")
    session.conversation.take_back()
    again = ask(session, servers, "d")
    assert again.text.endswith("user\nd<|im_end|>\n<|im_start|>assistant\n")
    assert servers.cache.closed == [42, 42]


def test_a_text_that_has_outgrown_its_first_prompt_gets_a_new_one(session: ChatSession, servers: FakeServers) -> None:
    ask(session, servers, LONG)
    held = session.held
    assert held is not None
    assert held.rest_of(held.text + "b", session.model.encode) == "b"
    grown = type(held)(held.sequence_id, held.text, held.tokens, len(held.tokens) // 2)
    assert grown.rest_of(held.text + "b", session.model.encode) == ""


def test_a_sequence_that_cannot_go_on_is_left_and_all_is_asked(session: ChatSession, servers: FakeServers) -> None:
    ask(session, servers, LONG)

    def answer(request: generation_pb2.GenerateRequest) -> str:
        servers.worker.refusal = (
            (grpc.StatusCode.FAILED_PRECONDITION, "tenant is another") if request.continue_sequence_id else None
        )
        return "abc"

    servers.worker.answer = answer
    assert ask(session, servers, "b").text
    assert servers.worker.requests[-2].continue_sequence_id == 42
    assert servers.cache.closed == [42]


def test_what_the_cache_service_does_not_know_in_full_is_not_held(session: ChatSession, servers: FakeServers) -> None:
    servers.cache.num_tokens = 5
    assert session.ask(LONG, lambda token: None)
    assert session.held is None
    assert servers.cache.suspended == {}
