"""Conversations over HTTP in front of real servers: the endpoint goes on with their sequences, and the answers are
those of an endpoint that computes each anew."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from heavywater.http.options import HttpOptions
from heavywater.http.server import HttpServer
from heavywater.local import LocalServers

STORY = "The miller of Ashdown had three sons, and the youngest of them was called Tom. " * 20
QUESTIONS = (STORY + "Who was the youngest son?", "And whose son was he?", "Say it once more.")
FULL = {"heavywater": {"policy": "full"}}


def converse(api: openai.OpenAI, stream: bool = False, user: str = "one") -> tuple[list[str], list[int]]:
    """Answers, and how many tokens of each conversation were there already."""
    messages: list[dict[str, str]] = []
    answers, continued = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        ask: Any = api.chat.completions.create
        asked = {"model": "smollm", "messages": messages, "temperature": 0, "max_tokens": 12, "user": user}
        reply = ask(**asked, stream=stream, extra_body=FULL)
        if stream:
            chunks = [chunk.choices[0] for chunk in reply]
            answer = "".join(chunk.delta.content or "" for chunk in chunks)
            figures = chunks[-1].heavywater
        else:
            answer, figures = reply.choices[0].message.content, reply.choices[0].heavywater
        answers.append(answer)
        continued.append(figures["continued_tokens"])
        messages.append({"role": "assistant", "content": answer})
    return answers, continued


def connect(server: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120)


@pytest.mark.parametrize("stream", [False, True])
def test_turns_go_on_and_answer_as_if_computed_anew(local_servers: LocalServers, stream: bool) -> None:
    addresses = (local_servers.worker_address, local_servers.cache_address)
    with HttpServer(HttpOptions(*addresses, model_names=("smollm",)), port=0) as server, connect(server) as api:
        want, continued = converse(api, stream)
        assert continued == [0, 0, 0]
    options = HttpOptions(*addresses, model_names=("smollm",), max_turns=4)
    with local_servers.client() as client:
        with HttpServer(options, port=0) as server, connect(server) as api:
            got, continued = converse(api, stream)
            assert got == want
            assert continued[0] == 0
            assert 400 < continued[1] < continued[2]
            again, continued = converse(api, stream, user="another")  # whose conversations are its own
            assert again == want
            assert continued[0] == 0
            assert len(list(client.list())) >= 2
        assert list(client.list()) == []


def test_a_sequence_that_has_gone_is_computed_anew(local_servers: LocalServers) -> None:
    options = HttpOptions(
        local_servers.worker_address, local_servers.cache_address, model_names=("smollm",), max_turns=4
    )
    with HttpServer(options, port=0) as server, connect(server) as api, local_servers.client() as client:
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        first = api.chat.completions.create(
            model="smollm", messages=messages, temperature=0, max_tokens=12, extra_body=FULL
        )
        client.close(first.choices[0].heavywater["sequence_id"])
        messages += [{"role": "assistant", "content": first.choices[0].message.content}]
        messages += [{"role": "user", "content": QUESTIONS[1]}]
        second = api.chat.completions.create(
            model="smollm", messages=messages, temperature=0, max_tokens=12, extra_body=FULL
        )
        assert second.choices[0].message.content
        assert second.choices[0].finish_reason in ("stop", "length")
