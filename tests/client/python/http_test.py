"""The OpenAI-compatible endpoint in front of servers that answer as the gRPC API says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import grpc
import httpx
import numpy as np
import openai
import pytest
from client_fakes import FakeServers, fake_servers, logits_of
from heavywater.http.options import HttpOptions
from heavywater.http.server import HttpServer
from heavywater.model import Model

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "abc", "max_tokens": 4}


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeServers, httpx.Client]]:
    with fake_servers() as servers:
        options = HttpOptions(servers.address, servers.address, max_choices=4, default_max_tokens=6)
        with HttpServer(options, port=0) as server, httpx.Client(base_url=server.url, timeout=20) as client:
            yield servers, client


@pytest.fixture
def servers(running: tuple[FakeServers, httpx.Client]) -> FakeServers:
    """As if they had just been started."""
    servers = running[0]
    servers.worker.__init__()  # type: ignore[misc]
    servers.cache.__init__()  # type: ignore[misc]
    return servers


@pytest.fixture
def endpoint(running: tuple[FakeServers, httpx.Client], servers: FakeServers) -> httpx.Client:
    return running[1]


@pytest.fixture
def api(endpoint: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def events(body: str) -> list[dict[str, object] | str]:
    """The data of a stream's events; "[DONE]" as it stands."""
    data = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def test_models_are_listed_and_found_by_name(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").owned_by == "heavywater"
    with pytest.raises(openai.NotFoundError, match="'other' is not served, want 'tiny'"):
        api.models.retrieve("other")


def test_a_completion_has_text_reason_usage_and_figures(api: openai.OpenAI, servers: FakeServers) -> None:
    policy = {"policy": "h2o", "heavy_tokens": 5, "recent_tokens": 3, "recall": False, "decay": 1}
    answer = api.completions.create(**TEXT, seed=9, temperature=0.5, top_p=0.75, extra_body={"heavywater": policy})
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("bcde", "length")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert choice.heavywater["policy"] == "h2o"
    assert (choice.heavywater["seed"], choice.heavywater["tokens_seen"]) == (9, 6)
    (request,) = servers.worker.requests
    assert (request.text, request.max_new_tokens) == ("abc", 4)
    assert (request.sampling.seed, request.sampling.temperature, request.sampling.top_p) == (9, 0.5, 0.75)
    assert (request.policy.heavy_tokens, request.policy.recall, request.policy.decay) == (5, False, 1.0)
    assert request.policy.HasField("recall")


def test_prompts_are_token_ids_too_and_several_get_n_answers_each(api: openai.OpenAI, servers: FakeServers) -> None:
    answer = api.completions.create(model="tiny", prompt=[[2, 3], [4]], n=2, max_tokens=2, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "<|im_end|>a", "<|im_end|>a"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    asked = sorted((list(request.tokens), request.sampling.seed) for request in servers.worker.requests)
    assert asked == [([2, 3], 5), ([2, 3], 6), ([4], 5), ([4], 6)]
    api.completions.create(model="tiny", prompt=[7, 8, 9], max_tokens=1)
    assert list(servers.worker.requests[-1].tokens) == [7, 8, 9]


def test_a_chat_is_asked_in_the_models_template(api: openai.OpenAI, servers: FakeServers) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    answer = api.chat.completions.create(model="tiny", messages=messages, user="me")
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content) >= 6
    (request,) = servers.worker.requests
    assert request.text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (request.max_new_tokens, request.tenant) == (6, "me")  # the server's default number
    assert request.sampling.temperature == 1.0  # as OpenAI's


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_without_a_number_gets_what_the_context_has_room_for(
    endpoint: httpx.Client, servers: FakeServers, stream: bool
) -> None:
    servers.worker.context_tokens = 4096  # as the model says
    chat = {"messages": [{"role": "user", "content": "a" * 4043}], "stream": stream, "n": 2}  # 4093 with the template
    assert endpoint.post("/v1/chat/completions", json=chat).status_code == 200
    assert [request.max_new_tokens for request in servers.worker.requests] == [6, 6, 3, 3]
    assert servers.cache.closed == [42, 42]
    refused = endpoint.post("/v1/chat/completions", json={**chat, "max_tokens": 6})  # asked for
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    chat["messages"][0]["content"] += "a" * 4
    assert endpoint.post("/v1/chat/completions", json=chat).status_code == 400


def test_a_long_chat_is_not_tokenized_here(
    endpoint: httpx.Client, servers: FakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take seconds, and keep all others waiting: the tokenizer holds Python's lock."""
    monkeypatch.setattr(Model, "encode", lambda model, text: pytest.fail("the endpoint tokenizes"))
    for content in ("hi", "word " * 500_000):
        chat = {"messages": [{"role": "user", "content": content}]}
        assert endpoint.post("/v1/chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x" * 4_200_000}),
        ("completions", {"prompt": [49_000] * 840_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 4_200_000}]}),
    ],
)
def test_a_prompt_that_no_message_holds_is_too_large(
    endpoint: httpx.Client, servers: FakeServers, path: str, body: dict[str, object]
) -> None:
    response = endpoint.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert servers.worker.requests == []


def test_a_stream_has_the_same_text_in_pieces_and_ends_with_done(endpoint: httpx.Client) -> None:
    whole = endpoint.post("/v1/completions", json=TEXT).json()
    response = endpoint.post("/v1/completions", json={**TEXT, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["b", "c", "d", "e", ""]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert choices[-1]["heavywater"]["sequence_id"] == 42


def test_a_chats_stream_names_the_role_and_counts_when_asked(api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(**CHAT, max_tokens=3, n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert len("".join(choice.delta.content or "" for choice in mine)) >= 3
        assert mine[-1].finish_reason == "length"
    assert (last.choices, last.usage.completion_tokens) == ([], 6)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[2:])


def test_a_stop_string_ends_the_answer_and_the_generation(api: openai.OpenAI, servers: FakeServers) -> None:
    answer = api.completions.create(model="tiny", prompt="abc", max_tokens=100_000, stop=["ef", "nothing"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcd", "stop")
    assert servers.worker.cancelled.wait(5)
    assert answer.usage.completion_tokens == 5
    # An answer before this one may still have been closing its sequences, which have the same id.
    assert set(servers.cache.closed) == {42}


def test_logprobs_are_those_of_the_tokens_drawn(api: openai.OpenAI) -> None:
    completion = api.completions.create(**TEXT, logprobs=0)
    assert completion.choices[0].logprobs.tokens == ["b", "c", "d", "e"]
    assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    chat = api.chat.completions.create(**CHAT, max_tokens=2, logprobs=True)
    assert len(chat.choices[0].logprobs.content) == 2
    assert api.completions.create(**TEXT).choices[0].logprobs is None
    assert api.completions.create(**TEXT, logprobs=False).choices[0].logprobs is None
    chunks = list(api.completions.create(**TEXT, logprobs=0, n=2, stream=True))
    for index in (0, 1):  # offsets count on from chunk to chunk
        mine = [chunk.choices[0].logprobs.text_offset for chunk in chunks if chunk.choices[0].index == index]
        assert [offset for offsets in mine for offset in offsets] == [0, 1, 2, 3]


def test_the_likeliest_tokens_come_with_their_logprobs(api: openai.OpenAI, servers: FakeServers) -> None:
    content = (
        api.chat.completions.create(**CHAT, max_tokens=2, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    )
    for one in content:
        found = [other.logprob for other in one.top_logprobs]
        assert len(found) == 3
        assert found == sorted(found, reverse=True)
        assert sum(map(math.exp, found)) <= 1
    request = servers.worker.requests[-1]
    wanted = logits_of(request.policy.policy, len(request.text)).astype(float)
    assert content[0].top_logprobs[0].logprob == pytest.approx(wanted.max() - math.log(np.exp(wanted).sum()))
    tops = api.completions.create(**TEXT, logprobs=2).choices[0].logprobs.top_logprobs
    assert [len(top) for top in tops] == [2] * 4
    assert api.completions.create(**TEXT, logprobs=0).choices[0].logprobs.top_logprobs is None
    assert not servers.worker.requests[-1].return_logits  # many bytes, for nothing


def test_as_many_as_the_best_of_are_all_of_them(api: openai.OpenAI) -> None:
    assert len(api.completions.create(**TEXT, n=2, best_of=2).choices) == 2


@pytest.mark.parametrize("field", ["top_p", "temperature"])
@pytest.mark.parametrize("value", [0, 1e-46, 1e-300])
def test_what_is_too_small_for_the_servers_leaves_the_likeliest_token(
    endpoint: httpx.Client, servers: FakeServers, field: str, value: float
) -> None:
    endpoint.post("/v1/completions", json={**TEXT, "temperature": 2, field: value})
    assert servers.worker.requests[0].sampling.temperature == 0


def test_sequences_are_closed_unless_they_are_to_be_kept(endpoint: httpx.Client, servers: FakeServers) -> None:
    endpoint.post("/v1/completions", json={**TEXT, "heavywater": {"keep": True}})
    assert servers.cache.closed == []
    endpoint.post("/v1/completions", json={**TEXT, "n": 2})
    assert servers.cache.closed == [42, 42]


def test_an_answer_goes_on_after_a_worker_has_died(api: openai.OpenAI, servers: FakeServers) -> None:
    servers.worker.breaks = [2, 3]
    assert api.completions.create(**TEXT).choices[0].text == "bcde"


@pytest.mark.parametrize(
    ("path", "changed", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, "a"]}, "prompt[0]"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": "\ud800"}, "prompt"),
        ("completions", {"prompt": ["a"] * 5}, "prompt"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 1.5}, "max_tokens"),
        ("completions", {"max_tokens": 10**400}, "max_tokens"),
        ("completions", {"temperature": -0.1}, "temperature"),
        ("completions", {"temperature": True}, "temperature"),
        ("completions", {"top_p": 10**400}, "top_p"),
        ("completions", {"seed": 2**64}, "seed"),
        ("completions", {"n": 5}, "n"),
        ("completions", {"stop": ""}, "stop"),
        ("completions", {"stop": ["a"] * 17}, "stop"),
        ("completions", {"stop": [1]}, "stop"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"logprobs": 6}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"stream": "yes"}, "stream"),
        ("completions", {"stream_options": {"other": 1}}, "stream_options.other"),
        ("completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("completions", {"unheard_of": 1}, "unheard_of"),
        ("completions", {"user": "x" * 129}, "user"),
        ("completions", {"user": {}, "heavywater": {"tenant": "t"}}, "user"),
        ("completions", {"heavywater": {"tenant": "x" * 129}}, "heavywater.tenant"),
        ("completions", {"logprobs": 0.5}, "logprobs"),
        ("completions", {"heavywater": []}, "heavywater"),
        ("completions", {"heavywater": {"polcy": "h2o"}}, "heavywater.polcy"),
        ("completions", {"heavywater": {"heavy_tokens": 2**63}}, "heavywater.heavy_tokens"),
        ("completions", {"heavywater": {"recall": 1}}, "heavywater.recall"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_is_wrong_is_refused_by_the_fields_name(
    endpoint: httpx.Client, servers: FakeServers, path: str, changed: dict[str, object], param: str
) -> None:
    body = json.dumps({**(CHAT if path.startswith("chat") else TEXT), **changed})
    response = endpoint.post(f"/v1/{path}", content=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert servers.worker.requests == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b"1" * 5000]
)
def test_what_is_no_json_object_is_refused(endpoint: httpx.Client, body: bytes) -> None:
    response = endpoint.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "the body is" in response.json()["error"]["message"]


@pytest.mark.parametrize("where", [{}, {"heavywater": {}}, {"stream_options": {}}])
def test_a_field_whose_name_is_no_unicode_is_refused(endpoint: httpx.Client, where: dict[str, dict[str, int]]) -> None:
    body = {**TEXT, "\ud800": 1} if not where else {**TEXT, **{name: {"\ud800" * 2000: 1} for name in where}}
    response = endpoint.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == 400
    assert "\\ud800" in response.json()["error"]["param"]
    assert len(response.text) < 20_000


def test_garbage_of_any_kind_is_the_clients_fault(endpoint: httpx.Client) -> None:
    rng = random.Random(7)
    whole = {**TEXT, **CHAT, "stop": ["x"], "heavywater": {"policy": "h2o"}, "stream_options": {}, "n": 1, "seed": 1}
    values = [None, True, -1, 2**70, 1e300, "", "x", [], [[]], {}, {"a": []}, [None], [{"role": "user"}]]
    seen = set()
    for _ in range(100):
        body = {key: rng.choice(values) if rng.random() < 0.2 else value for key, value in whole.items()}
        path = rng.choice(["completions", "chat/completions"])
        body.pop("messages" if path == "completions" else "prompt")
        seen.add(endpoint.post(f"/v1/{path}", content=json.dumps(body)).status_code)
    assert seen <= {200, 400, 404}
    assert 400 in seen


@pytest.mark.parametrize(
    ("code", "words", "status", "param"),
    [
        ("INVALID_ARGUMENT", "policy.scope: scope is 'x', want layer", 400, "heavywater.scope"),
        ("INVALID_ARGUMENT", "heavy_ratio is 3, want less", 400, "heavywater.heavy_ratio"),
        ("INVALID_ARGUMENT", "sampling.top_p is 7", 400, "top_p"),
        ("OUT_OF_RANGE", "prompt of 9000 tokens", 400, None),
        ("RESOURCE_EXHAUSTED", "256 requests wait", 429, None),
        ("UNAVAILABLE", "the worker drains", 503, None),
        ("DEADLINE_EXCEEDED", "late", 504, None),
        ("INTERNAL", "broken", 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_servers_refusal_has_its_status(
    endpoint: httpx.Client, servers: FakeServers, code: str, words: str, status: int, param: str | None, stream: bool
) -> None:
    servers.worker.refusal = (grpc.StatusCode[code], words)
    response = endpoint.post("/v1/completions", json={**TEXT, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == words
    assert response.json()["error"]["param"] == param
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_an_error_within_a_stream_is_its_last_event(endpoint: httpx.Client, servers: FakeServers) -> None:
    servers.worker.answer = lambda request: "ab"  # shorter than max_tokens: the fake fails after two
    *chunks, last = events(endpoint.post("/v1/completions", json={**TEXT, "stream": True}).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
    assert last["error"]["type"] == "server_error"


def test_what_is_not_there_is_said_in_the_same_shape(endpoint: httpx.Client) -> None:
    missing = endpoint.get("/v1/embeddings")
    message = missing.json()["error"]["message"]
    assert (missing.status_code, "/v1/embeddings" in message, "/v1/chat/completions" in message) == (404, True, True)
    assert endpoint.get("/v1/completions").status_code == 405
    wrong = endpoint.post("/v1/completions", json={**TEXT, "model": "gpt-9"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
