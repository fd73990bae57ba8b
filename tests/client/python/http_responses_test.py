"""/v1/responses in front of servers that answer as the gRPC API says, through the package openai."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from client_fakes import FakeServers, fake_servers
from heavywater.http.options import HttpOptions
from heavywater.http.server import HttpServer

ASK = {"model": "tiny", "input": "hi", "max_output_tokens": 4}


@pytest.fixture
def servers() -> Iterator[FakeServers]:
    with fake_servers() as running:
        yield running


@pytest.fixture
def api(servers: FakeServers) -> Iterator[openai.OpenAI]:
    options = HttpOptions(servers.address, servers.address, default_max_tokens=6)
    with (
        HttpServer(options, port=0) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def test_a_text_is_answered_with_its_usage_and_figures(api: openai.OpenAI, servers: FakeServers) -> None:
    answer = api.responses.create(
        **ASK, instructions="be kind", temperature=0.5, extra_body={"heavywater": {"policy": "h2o"}}
    )
    assert len(answer.output_text) >= 4
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens) == (4, 0)
    assert answer.heavywater["policy"] == "h2o"
    (request,) = servers.worker.requests
    assert request.text.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert (request.max_new_tokens, request.sampling.temperature) == (4, 0.5)


def test_a_conversation_goes_on_with_the_items_of_an_answer(api: openai.OpenAI, servers: FakeServers) -> None:
    first = api.responses.create(**ASK)
    asked = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "more"},
    ]
    api.responses.create(model="tiny", input=asked)
    request = servers.worker.requests[-1]
    text = request.text or request.suffix_text
    assert "more<|im_end|>" in text
    assert request.max_new_tokens == 6  # the server's default


def test_a_stream_has_the_events_in_their_order_and_the_same_text(api: openai.OpenAI) -> None:
    events = list(api.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event.delta for event in events[4:-4])
    assert events[-4].text == text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 4
    with api.responses.stream(**ASK) as stream:  # the package's own reader of events
        assert stream.until_done() is not None


def test_what_ends_by_itself_is_complete(api: openai.OpenAI) -> None:
    answer = api.responses.create(**{**ASK, "max_output_tokens": 100}, extra_body={"stop": "c"})
    assert (answer.status, answer.incomplete_details) == ("completed", None)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_is_not_served_is_refused_by_the_fields_name(
    api: openai.OpenAI, servers: FakeServers, changed: dict[str, object], param: str
) -> None:
    response = httpx.post(f"{api.base_url}responses", json={**ASK, **changed})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert servers.worker.requests == []
