"""Workers that end or stand still are started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from heavywater.server_process import ServerError, ServerProcess
from heavywater.supervisor import Supervised, Supervisor

NOBODY = "127.0.0.1:1"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _supervise(folder: Path, life_s: float, silent_s: float) -> Supervisor:
    def start() -> ServerProcess:
        return ServerProcess("sleep", [str(life_s)], folder / "log", append=True)

    now_s = time.monotonic()
    return Supervisor([Supervised(start(), NOBODY, start, now_s, now_s)], poll_s=0.02, silent_s=silent_s)


def test_a_worker_that_was_killed_is_started_again(tmp_path: Path) -> None:
    supervisor = _supervise(tmp_path, life_s=100, silent_s=100)
    try:
        (first,) = supervisor.processes()
        first.kill()
        _until(lambda: supervisor.restarts == 1)
        (second,) = supervisor.processes()
        assert second.pid != first.pid
        assert second.alive()
        supervisor.pause()
        second.kill()
        time.sleep(0.2)
        assert supervisor.restarts == 1
    finally:
        supervisor.stop()


def test_a_worker_that_stands_still_is_killed_and_started_again(tmp_path: Path) -> None:
    supervisor = _supervise(tmp_path, life_s=100, silent_s=0.3)
    try:
        _until(lambda: supervisor.restarts >= 1)
    finally:
        supervisor.pause()
        for process in supervisor.processes():
            process.kill()
        supervisor.stop()


def test_a_worker_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    supervisor = _supervise(tmp_path, life_s=0, silent_s=100)
    try:
        with pytest.raises(ServerError, match="sleep ended"):
            while True:
                supervisor.check()
                time.sleep(0.02)
        assert supervisor.restarts <= 6
    finally:
        supervisor.stop()
