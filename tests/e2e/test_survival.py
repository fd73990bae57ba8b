"""A rank dies or stands still: the group forms again, and clients get every token exactly once."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, cluster, token_ids
from heavywater import Client
from heavywater.v1 import common_pb2, generation_pb2

NOTICED_S = 5.0
SLACK_S = 3.0
TOKENS = 48
# Committed states come often, so that short texts have several.
OFTEN = {"snapshot_interval_tokens": 12}
# Plans evict and (with recall) promote well before the first kill.
BOUNDED = common_pb2.PolicyOptions(policy="snapkv_h2o", heavy_tokens=48, recent_tokens=16)
RECALL = common_pb2.PolicyOptions(policy="recall", heavy_tokens=48, recent_tokens=16)
FULL = common_pb2.PolicyOptions(policy="full")


def _ranks_that_are_ready(group: Cluster) -> list[bool]:
    return [group.is_ready(rank) for rank in range(len(group.workers)) if group.workers[rank].alive()]


def _wait_until(what: str, condition: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def _wait_all_ready(group: Cluster) -> None:
    for address in group.worker_addresses:
        group.wait_ready(address)


def _generate(
    group: Cluster,
    prompt: list[int],
    policy: common_pb2.PolicyOptions,
    kill: dict[int, int] | None = None,
    **more: object,
) -> list[int]:
    """Token ids; `kill`: after so many tokens the rank is killed, and started again a second later."""
    tokens = []
    with Client(worker=group.worker_address) as client:
        fields = {"max_new_tokens": TOKENS, "ignore_eos": True, "policy": policy, **more}
        for token in client.generate(prompt, **fields):  # type: ignore[arg-type]
            assert token.index == len(tokens)
            tokens.append(token.token)
            rank = (kill or {}).get(len(tokens))
            if rank is not None:
                group.workers[rank].kill()
                threading.Timer(1.0, group.restart_worker, (rank,)).start()
    return tokens


def _restored(group: Cluster) -> list[int]:
    """With how many tokens rank 0 restored sequences from their pages."""
    found = re.findall(r'sequence admitted.*restored_tokens="(\d+)"', group.workers[0].log.read_text())
    return [int(tokens) for tokens in found if int(tokens)]


@pytest.mark.parametrize("rank", [1, 0])
def test_the_group_of_a_dead_rank_says_so_and_forms_again(folder: Path, long_prompt: list[int], rank: int) -> None:
    request = generation_pb2.GenerateRequest(tokens=long_prompt[:64], max_new_tokens=4000, ignore_eos=True)
    short = {"tokens": long_prompt[:64], "max_new_tokens": 8, "ignore_eos": True}
    with cluster(folder, 3) as group:
        undisturbed = token_ids(group.generate(**short))
        pids = [worker.pid for worker in group.workers]
        stream = group.generation.Generate(request, timeout=300)
        for _ in range(20):
            next(stream)
        group.workers[rank].kill()
        killed = time.monotonic()
        with pytest.raises(grpc.RpcError) as failed:
            list(stream)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - killed < NOTICED_S + SLACK_S
        _wait_until("a rank stays ready without its group", lambda: not any(_ranks_that_are_ready(group)), 5)
        if rank != 0:
            time.sleep(1.5)
            with pytest.raises(grpc.RpcError) as refused:
                group.generate(**short)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            assert 'group "e2e"' in refused.value.details()
            assert f"missing ranks {rank} of 3" in refused.value.details()
        group.restart_worker(rank)
        _wait_all_ready(group)
        assert token_ids(group.generate(**short)) == undisturbed
        # The others are the processes that they were.
        assert [w.pid for r, w in enumerate(group.workers) if r != rank] == [p for r, p in enumerate(pids) if r != rank]


@pytest.mark.parametrize("policy", [BOUNDED, RECALL, FULL], ids=["bounded", "recall", "full"])
def test_a_generation_survives_the_death_of_any_rank(
    folder: Path, long_prompt: list[int], policy: common_pb2.PolicyOptions
) -> None:
    with cluster(folder, 3, worker=OFTEN) as group:
        undisturbed = _generate(group, long_prompt[:120], policy)
        # Each at another distance from the last committed state.
        disturbed = _generate(group, long_prompt[:120], policy, kill={15: 1, 28: 0, 42: 2})
        assert disturbed == undisturbed
        assert len(_restored(group)) == 3, "it was computed again, not restored"


def test_a_generation_survives_a_death_within_its_prompt(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 3) as group:
        undisturbed = _generate(group, long_prompt, BOUNDED, max_new_tokens=4)
        with Client(worker=group.worker_address) as client:
            generation = client.generate(long_prompt, max_new_tokens=4, ignore_eos=True, policy=BOUNDED)

            def kill() -> None:
                group.workers[2].kill()
                group.restart_worker(2)

            threading.Timer(0.3, kill).start()
            assert [token.token for token in generation] == undisturbed


def test_ranks_that_are_told_to_stop_while_the_group_forms_again_end_in_order(folder: Path) -> None:
    with cluster(folder, 3) as group:
        group.workers[1].kill()
        _wait_until(
            "a rank does not notice",
            lambda: all("it forms again" in group.workers[rank].log.read_text() for rank in (0, 2)),
        )
        time.sleep(0.5)
        for rank in (0, 2):
            assert group.workers[rank].terminate() == 0, group.workers[rank].tail()


def test_a_rank_that_stands_still_is_replaced(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 3, worker=OFTEN) as group:
        undisturbed = _generate(group, long_prompt[:100], BOUNDED)
        stopped = group.workers[1]

        def replace() -> None:
            os.kill(stopped.pid, signal.SIGSTOP)
            time.sleep(6)
            stopped.kill()
            group.restart_worker(1)

        tokens: list[int] = []
        replacing = threading.Thread(target=replace)
        with Client(worker=group.worker_address) as client:
            for token in client.generate(long_prompt[:100], max_new_tokens=TOKENS, ignore_eos=True, policy=BOUNDED):
                tokens.append(token.token)
                if len(tokens) == 20:
                    replacing.start()
        replacing.join()
        assert tokens == undisturbed


def test_a_sampled_sequence_goes_on_with_the_same_tokens(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 3, worker=OFTEN) as group:
        sampled = {"temperature": 0.8, "seed": 7}
        undisturbed = _generate(group, long_prompt[:80], BOUNDED, **sampled)
        assert _generate(group, long_prompt[:80], BOUNDED, kill={30: 0}, **sampled) == undisturbed


def test_what_the_pages_do_not_hold_is_computed_again(folder: Path, long_prompt: list[int]) -> None:
    # Streamed pages are not read back.
    with cluster(folder, 3, worker={"disable_slab": True}) as group:
        undisturbed = _generate(group, long_prompt[:80], RECALL, max_new_tokens=32)
        assert _generate(group, long_prompt[:80], RECALL, max_new_tokens=32, kill={20: 1}) == undisturbed
        assert "computed again" in group.workers[0].log.read_text()
