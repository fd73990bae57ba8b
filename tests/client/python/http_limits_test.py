"""The endpoint's limits: who may ask, how much, how long; and what becomes of it when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from client_fakes import FakeServers, fake_servers
from heavywater import aio
from heavywater.errors import HeavywaterError
from heavywater.http.answer import Answer, Background
from heavywater.http.asked import asked_completion
from heavywater.http.options import HttpOptions
from heavywater.http.respond import AnswerResponse, Running
from heavywater.http.server import HttpServer
from heavywater.http.shapes import Shape

TEXT = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
ENDLESS = {**TEXT, "max_tokens": 10_000_000}


@contextmanager
def endpoint(servers: FakeServers, **options: object) -> Iterator[httpx.Client]:
    with (
        HttpServer(HttpOptions(servers.address, servers.address, **options), port=0) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        yield client


def wait_until(condition: object, seconds: float = 5) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert condition()


def test_health_says_whether_the_worker_takes_requests(servers: FakeServers) -> None:
    with endpoint(servers) as client:
        assert client.get("/health").json() == {"status": "ok"}
        servers.health.ready = False
        assert (client.get("/health").status_code, client.get("/health").json()["status"]) == (503, "unavailable")


def test_health_is_unavailable_once_the_worker_is_gone() -> None:
    with fake_servers() as servers:
        server = HttpServer(HttpOptions(servers.address), port=0).__enter__()
    try:
        response = httpx.get(f"{server.url}/health", timeout=20)
        assert (response.status_code, "does not answer" in response.json()["reason"]) == (503, True)
        assert httpx.post(f"{server.url}/v1/completions", json=TEXT, timeout=20).status_code == 503
    finally:
        server.__exit__(None, None, None)


def test_an_endpoint_without_a_worker_does_not_start() -> None:
    with pytest.raises(HeavywaterError, match="UNAVAILABLE"), HttpServer(HttpOptions("127.0.0.1:1"), port=0):
        pass


def test_a_port_that_is_taken_is_named(servers: FakeServers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"),
            HttpServer(HttpOptions(servers.address), port=port),
        ):
            pass


def test_a_key_is_wanted_of_all_but_health(servers: FakeServers) -> None:
    with endpoint(servers, api_key="s3cret") as client:
        for headers in ({}, {"authorization": "Bearer other"}):
            refused = client.post("/v1/completions", json=TEXT, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.post("/v1/completions", json=TEXT, headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert client.get("/health").status_code == 200


def test_a_model_goes_by_the_names_it_is_given(servers: FakeServers) -> None:
    with endpoint(servers, model_names=("one", "two")) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert client.post("/v1/completions", json={**TEXT, "model": "two"}).json()["model"] == "two"
        assert client.post("/v1/completions", json=TEXT).status_code == 404
        nameless = {key: value for key, value in TEXT.items() if key != "model"}
        assert client.post("/v1/completions", json=nameless).json()["model"] == "one"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_refused(servers: FakeServers, declared: bool) -> None:
    with endpoint(servers, max_body_bytes=1000) as client:
        parts = [b"x" * 700, b"y" * 700]
        content = b"".join(parts) if declared else iter(parts)
        response = client.post("/v1/completions", content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert client.post("/v1/completions", json=TEXT).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(servers: FakeServers) -> None:
    with (
        endpoint(servers, body_timeout_s=0.2) as client,
        socket.create_connection((client.base_url.host, client.base_url.port)) as connection,
    ):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        connection.settimeout(10)
        assert b" 408 " in connection.recv(4096).split(b"\r\n")[0]


def test_headers_that_do_not_come_whole_are_not_waited_for(servers: FakeServers) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with endpoint(servers, headers_timeout_s=0.3) as client:
        for sent in (b"", whole[:20], whole + whole[:20]):
            with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
                connection.settimeout(4)  # uvicorn's keep-alive is longer
                if sent:
                    connection.sendall(sent[: len(whole)])
                if len(sent) > len(whole):
                    answer = b""
                    while not answer.endswith(b'{"status":"ok"}'):  # head and body may come one by one
                        part = connection.recv(4096)
                        assert part, f"the connection ended after {answer!r}"
                        answer += part
                    assert answer.startswith(b"HTTP/1.1 200")
                    connection.sendall(sent[len(whole) :])
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(4096) == b""
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"request_timeout_s": float("nan")}, "time limit"),
        ({"request_timeout_s": 0.0}, "time limit"),
        ({"api_key": "naïve"}, "printable ASCII"),
        ({"model_names": ("a", "")}, "is empty"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        HttpOptions("worker:1", **options)
    with pytest.raises(ValueError, match="host is empty"):
        HttpServer(HttpOptions("worker:1"), host="")


def test_more_answers_than_may_run_are_refused_and_the_room_comes_back(servers: FakeServers) -> None:
    with endpoint(servers, max_running=2) as client:
        with client.stream("POST", "/v1/completions", json={**ENDLESS, "n": 2, "stream": True}) as running:
            next(running.iter_bytes())
            refused = client.post("/v1/completions", json=TEXT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        wait_until(lambda: client.post("/v1/completions", json=TEXT).status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(servers: FakeServers, stream: bool) -> None:
    with endpoint(servers, request_timeout_s=0.5) as client:
        response = client.post("/v1/completions", json={**ENDLESS, "stream": stream})
        assert "no whole answer in 0.5 s" in response.text
        assert response.status_code == (200 if stream else 504)
        assert "[DONE]" not in response.text
        assert servers.worker.cancelled.wait(5)
        wait_until(lambda: servers.cache.closed == [42])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_generation(servers: FakeServers, stream: bool) -> None:
    with endpoint(servers) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=ENDLESS, timeout=httpx.Timeout(5, read=0.5))
        assert servers.worker.cancelled.wait(5)
        wait_until(lambda: servers.cache.closed == [42])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_keeps_no_room(servers: FakeServers, stream: bool) -> None:
    """It is there, and what is sent to it never goes."""

    async def never(*arguments: object) -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def main() -> int:
        options, running = HttpOptions(servers.address, request_timeout_s=0.3), Running(1)
        asked = asked_completion({**(ENDLESS if stream else TEXT), "stream": stream}, options)
        async with aio.Client(worker=servers.address) as client:
            shape = Shape(asked, await client.get_model(), "tiny")
            answer = Answer(client, asked, asked.prompts, asked.max_tokens, 4096, Background())
            await asyncio.wait_for(AnswerResponse(answer, shape, options, running)({"type": "http"}, never, never), 10)
        return running.count

    assert asyncio.run(main()) == 0
    assert servers.worker.cancelled.wait(5)


def test_a_client_that_goes_before_its_request_is_accepted_leaves_no_sequence(servers: FakeServers) -> None:
    accept = threading.Event()
    servers.worker.before_accepting = accept.wait
    with endpoint(servers) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=ENDLESS, timeout=httpx.Timeout(5, read=0.3))
        accept.set()
        assert servers.worker.cancelled.wait(5)
        wait_until(lambda: servers.cache.closed == [42])


def test_a_silent_stream_carries_comments(servers: FakeServers) -> None:
    go_on = threading.Event()
    servers.worker.after_accepting = go_on.wait
    with (
        endpoint(servers, keepalive_s=0.1) as client,
        client.stream("POST", "/v1/completions", json={**TEXT, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == ": waiting"
        go_on.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_requests_at_once_do_not_mix_their_answers(servers: FakeServers) -> None:
    with endpoint(servers) as client, ThreadPoolExecutor(8) as pool:
        prompts = ["a" * length for length in range(1, 31)]
        asked = [pool.submit(client.post, "/v1/completions", json={**TEXT, "prompt": prompt}) for prompt in prompts]
        alone = [client.post("/v1/completions", json={**TEXT, "prompt": prompt}).json() for prompt in prompts]
        answers = [one.result().json() for one in asked]
    assert [one["choices"][0]["text"] for one in answers] == [one["choices"][0]["text"] for one in alone]
