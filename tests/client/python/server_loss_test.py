"""A server that goes away between two calls."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from heavywater import Client, HeavywaterError

SERVER = """
import signal, sys, time
def leave(number, frame):
    raise SystemExit  # stops the server in order: it says goodbye to its clients
signal.signal(signal.SIGTERM, leave)
sys.path.insert(0, sys.argv[1])
from client_fakes import fake_servers
with fake_servers() as servers:
    print(servers.address, flush=True)
    time.sleep(60)
"""


def code_of_a_call(client: Client) -> str:
    try:
        client.generate("abc", max_new_tokens=2).text()
    except HeavywaterError as error:
        return error.code
    return "OK"


@pytest.mark.parametrize("attempt", range(4))  # gRPC's own retries made this hang every other time
def test_a_call_after_the_server_has_gone_is_unavailable_at_once(attempt: int) -> None:
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        client = Client(worker=server.stdout.readline().strip())
        assert client.generate("abc", max_new_tokens=2).text()
        server.terminate()
        server.wait()
    time.sleep(0.5)
    codes: list[str] = []
    call = threading.Thread(target=lambda: codes.append(code_of_a_call(client)), daemon=True)
    call.start()
    call.join(timeout=10)  # a call that hangs does not even end when cancelled
    assert codes == ["UNAVAILABLE"]
