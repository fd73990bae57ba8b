"""A rank that stands still without dying ends the group, as one that dies does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, cluster, token_ids
from heavywater.v1 import generation_pb2

# Within which a rank that stands still is noticed, and what a busy machine adds.
NOTICED_S = 5.0
SLACK_S = 3.0
# The group does not form again (test_survival.py has that): its processes end.
ENDS = {"reform_timeout_ms": 0}


class Stopped:
    """A worker under SIGSTOP; it is killed in the end, for it cannot end itself."""

    def __init__(self, group: Cluster, rank: int) -> None:
        self._worker = group.workers[rank]
        os.kill(self._worker.pid, signal.SIGSTOP)
        self.since = time.monotonic()

    def __enter__(self) -> Stopped:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.kill()


def _failure_of(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value


def _expect_the_others_end(group: Cluster, stopped: int) -> None:
    deadline = time.monotonic() + 15
    others = [worker for rank, worker in enumerate(group.workers) if rank != stopped]
    while any(worker.alive() for worker in others):
        assert time.monotonic() < deadline, "a rank goes on without its group"
        time.sleep(0.05)
    assert f"rank {stopped} has not answered" in group.workers[0].tail()


def test_a_rank_that_stops_in_the_middle_of_decode_is_noticed_in_time(folder: Path, long_prompt: list[int]) -> None:
    request = generation_pb2.GenerateRequest(tokens=long_prompt[:64], max_new_tokens=8000, ignore_eos=True)
    with cluster(folder, 3, worker=ENDS) as group:
        stream = group.generation.Generate(request, timeout=300)
        for _ in range(20):
            next(stream)
        with Stopped(group, 1) as stopped:
            error = _failure_of(lambda: list(stream))
            assert time.monotonic() - stopped.since < NOTICED_S + SLACK_S
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            assert "rank 1 has not answered" in error.details(), error.details()
            _expect_the_others_end(group, stopped=1)


def test_a_rank_that_stops_while_nothing_runs_is_noticed_in_time(folder: Path, long_prompt: list[int]) -> None:
    request = {"tokens": long_prompt[:64], "max_new_tokens": 4, "ignore_eos": True}
    with cluster(folder, 3, worker=ENDS) as group:
        assert len(token_ids(group.generate(**request))) == 4
        time.sleep(1.5)
        with Stopped(group, 2) as stopped:
            error = _failure_of(lambda: group.generate(**request))
            assert time.monotonic() - stopped.since < NOTICED_S + SLACK_S
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            _expect_the_others_end(group, stopped=2)


def test_rank_0_that_stops_ends_the_others(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 3, worker=ENDS) as group, Stopped(group, 0) as stopped:
        while any(worker.alive() for worker in group.workers[1:]):
            assert time.monotonic() - stopped.since < 15, "a rank goes on without its group"
            time.sleep(0.05)
        assert "rank 0 has not answered" in group.workers[1].tail() + group.workers[2].tail()
