"""The endpoint in front of real servers and the real model, asked with the package `openai`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from heavywater.http.options import HttpOptions
from heavywater.http.server import HttpServer
from heavywater.load.leaks import Holdings, holdings, settled
from heavywater.local import LocalServers

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time there was a miller. " * 60  # some 600 tokens


@pytest.fixture(scope="module")
def url(local_servers: LocalServers) -> Iterator[str]:
    options = HttpOptions(local_servers.worker_address, local_servers.cache_address, model_names=("smollm",))
    with HttpServer(options, port=0) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def nothing_left(local_servers: LocalServers) -> Iterator[None]:
    """Sequences, pages and device memory are afterwards what they were before."""
    with local_servers.client() as client:

        def now() -> Holdings:
            return holdings(client, [worker.metrics_address() for worker in local_servers.workers])

        before = now()
        yield
        after = settled(before, now)
        assert after.more_than(before) == []
        assert {"sequences", "host.used_bytes"} <= after.counts.keys()


def test_an_answer_is_what_the_client_gets(api: openai.OpenAI, local_servers: LocalServers, nothing_left: None) -> None:
    answer = api.chat.completions.create(model="smollm", messages=QUESTION, temperature=0, max_tokens=16)
    with local_servers.client() as client:
        generation = client.generate(client.get_model().chat(QUESTION), max_new_tokens=16)
        assert answer.choices[0].message.content == generation.text()
        client.close(generation.sequence_id)
    assert "Paris" in answer.choices[0].message.content
    assert (answer.choices[0].finish_reason, generation.summary.finish_reason) == ("stop", "eos")
    usage = answer.usage
    assert usage.prompt_tokens == generation.summary.prompt_tokens
    assert usage.completion_tokens == generation.summary.new_tokens


def test_a_stream_is_the_same_text_and_a_seed_repeats_it(api: openai.OpenAI, nothing_left: None) -> None:
    ask = {"model": "smollm", "prompt": "The miller said", "max_tokens": 12, "temperature": 0.9, "seed": 11}
    whole = api.completions.create(**ask)
    chunks = list(api.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    others = {api.completions.create(**{**ask, "seed": seed}).choices[0].text for seed in (12, 13, 14)}
    assert len(others | {whole.choices[0].text}) > 1


def test_a_stop_string_cuts_the_text(api: openai.OpenAI, nothing_left: None) -> None:
    ask = {"model": "smollm", "messages": QUESTION, "temperature": 0}
    whole = api.chat.completions.create(**ask, max_tokens=16).choices[0].message.content
    cut = api.chat.completions.create(**ask, max_tokens=500, stop=["Paris", "London"]).choices[0]
    assert cut.message.content == whole[: whole.index("Paris")]
    assert cut.finish_reason == "stop"


def test_a_policy_bounds_the_cache_and_says_so(api: openai.OpenAI, nothing_left: None) -> None:
    policy = {"policy": "recall", "device_ratio": 0.2, "min_budget_tokens": 64}
    answer = api.completions.create(model="smollm", prompt=STORY, max_tokens=4, extra_body={"heavywater": policy})
    figures = answer.choices[0].heavywater
    assert figures["resident_tokens"] < 0.3 * figures["tokens_seen"]
    assert figures["device_bytes_peak"] < 0.3 * figures["full_cache_bytes"]
    assert figures["recall"]["reads_max"] > 0
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="smollm", prompt="a", extra_body={"heavywater": {"heavy_ratio": 3}})
    assert caught.value.param == "heavywater.heavy_ratio"


def test_a_prompt_beyond_the_context_is_refused_with_its_code(api: openai.OpenAI, nothing_left: None) -> None:
    with pytest.raises(openai.BadRequestError, match="context of 8192") as caught:
        api.completions.create(model="smollm", prompt=[1] * 9000)
    assert caught.value.code == "context_length_exceeded"


def test_a_chat_beyond_the_context_is_refused_with_the_servers_count(api: openai.OpenAI, nothing_left: None) -> None:
    messages = [{"role": "user", "content": STORY * 15}]
    with pytest.raises(openai.BadRequestError, match=r"prompt of (9|10|11)\d\d\d tokens") as caught:
        api.chat.completions.create(model="smollm", messages=messages)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("moment", ["in the prompt", "between tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_leaves_nothing_behind(url: str, nothing_left: None, moment: str, stream: bool) -> None:
    prompt = STORY * 9 if moment == "in the prompt" else "Once"
    ask = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    wait = httpx.Timeout(30, read=0.7)
    with pytest.raises(httpx.ReadTimeout), httpx.stream("POST", f"{url}/completions", json=ask, timeout=wait) as answer:
        for number, _ in enumerate(answer.iter_bytes()):
            if number == 2:
                raise httpx.ReadTimeout("left on purpose")


def test_a_hundred_requests_at_once_are_all_answered(url: str, nothing_left: None) -> None:
    async def ask(api: openai.AsyncOpenAI, number: int) -> str:
        stream = number % 2 == 0
        question = {"model": "smollm", "prompt": f"{number % 5} and {number % 5} are", "max_tokens": 2}
        answer = await api.completions.create(**question, temperature=0, stream=stream)
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=120) as api:
            return await asyncio.gather(*(ask(api, number) for number in range(100)))

    texts = asyncio.run(ask_all())
    assert all(texts)
    for number in range(5):
        assert len(set(texts[number::5])) == 1  # greedy: whatever ran beside it
