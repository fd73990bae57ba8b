"""`heavywater http` as a user runs it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from client_fakes import FakeServers
from heavywater import Client


def test_the_command_says_where_it_listens_serves_and_ends_when_told(servers: FakeServers) -> None:
    arguments = ["http", "--port", "0", "--name", "one", "--address", servers.address, "--cache", servers.address]
    command = [sys.executable, "-m", "heavywater", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip().removeprefix("export OPENAI_BASE_URL=")
            answer = httpx.post(
                f"{url}/completions", json={"model": "one", "prompt": "abc", "max_tokens": 4}, timeout=20
            )
            assert answer.json()["choices"][0]["text"] == "bcde"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors


def test_a_worker_that_is_not_there_is_one_message() -> None:
    command = [sys.executable, "-m", "heavywater", "http", "--port", "0", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: UNAVAILABLE")


def test_a_server_of_the_other_kind_is_named_as_such() -> None:
    server = grpc.server(ThreadPoolExecutor(1))  # that has none of the calls
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    command = [sys.executable, "-m", "heavywater", "http", "--port", "0", "--address", f"127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    server.stop(None)
    assert done.returncode == 1
    assert "is it the worker's address" in done.stderr


def test_serve_starts_servers_and_endpoint_at_once() -> None:
    if shutil.which("heavywater-worker") is None:
        pytest.skip("heavywater-worker is not on PATH: run through deploy/local/test or deploy/local/run")
    command = [sys.executable, "-m", "heavywater", "serve", "--http", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            exports = dict(process.stdout.readline().split()[1].split("=", 1) for _ in range(4))
            url = exports["OPENAI_BASE_URL"].removesuffix("/v1")
            assert httpx.get(f"{url}/health", timeout=20).json() == {"status": "ok"}
            assert exports["HEAVYWATER_METRICS"].startswith("127.0.0.1:")
            with Client(cache=exports["HEAVYWATER_CACHE"]) as client:
                assert client.stats().ranks == 1
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 128 + signal.SIGINT
