"""Prompts that begin with stored pages of others: the same answer, and only the rest computed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import Cluster, cluster, takes_long
from heavywater import Client, HeavywaterError
from heavywater.generation import Generation
from heavywater.v1 import admin_pb2, common_pb2, generation_pb2, sequence_pb2

PAGE = 64
WORKER = {"page_tokens": PAGE, "snapshot_interval_tokens": 16}
BOUNDED = common_pb2.PolicyOptions(policy="snapkv_h2o", heavy_tokens=96, recent_tokens=32)
RECALL = common_pb2.PolicyOptions(policy="recall", heavy_tokens=96, recent_tokens=32)
STREAMING = common_pb2.PolicyOptions(policy="streaming", heavy_tokens=96, recent_tokens=32)
FULL = common_pb2.PolicyOptions(policy="full")
NEW_TOKENS = 24
NOTHING_ALIKE = "no stored prompt begins alike"


class Asked:
    """One whole answer."""

    def __init__(self, group: Cluster, prompt: list[int], policy: common_pb2.PolicyOptions, **options: object) -> None:
        options = {"prefix_reuse": True, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **options}
        with Client(worker=group.worker_address) as client:
            generation: Generation = client.generate(prompt, policy=policy, **options)  # type: ignore[arg-type]
            self.tokens = [token.token for token in generation]
            self.sequence = generation.sequence_id
            self.summary: generation_pb2.GenerateSummary = generation.summary

    @property
    def reused(self) -> int:
        return self.summary.prefix_tokens_reused

    @property
    def why_none(self) -> str:
        return self.summary.prefix_not_reused


def wait_finished(group: Cluster, *answers: Asked) -> None:
    """Their last reports have arrived."""
    deadline = time.monotonic() + 20
    with _cache(group) as client:
        while not all(client.get(answer.sequence).finished for answer in answers):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _cache(group: Cluster) -> Client:
    return Client(cache=group.cache_address)


def _host(group: Cluster) -> admin_pb2.TierStats:
    return next(tier for tier in group.admin.Stats(admin_pb2.StatsRequest()).tiers if tier.tier == "host")


def _expect_empty(group: Cluster, sequences: list[int]) -> None:
    """Nothing is left, nothing was freed twice."""
    with _cache(group) as client:
        for sequence in sequences:
            client.close(sequence)
    # What a rank that died might still write to is kept until its lease has ended.
    deadline = time.monotonic() + 90
    while (host := _host(group)).used_bytes:
        assert host.used_bytes + host.free_bytes == host.total_bytes
        assert time.monotonic() < deadline, host
        time.sleep(0.1)
    assert host.free_bytes == host.total_bytes


@pytest.mark.parametrize(
    ("ranks", "policy", "reused"),
    [
        (3, BOUNDED, 640),
        (3, RECALL, 640),
        pytest.param(1, RECALL, 640, marks=takes_long),
        pytest.param(1, STREAMING, 704, marks=takes_long),
        (1, FULL, 704),
    ],
    ids=["bounded", "recall", "one-rank", "streaming", "full"],
)
def test_a_prompt_that_begins_as_a_stored_one_gets_the_same_answer(
    folder: Path, long_prompt: list[int], ranks: int, policy: common_pb2.PolicyOptions, reused: int
) -> None:
    prompt = long_prompt[:705]
    with cluster(folder, ranks, worker=WORKER) as group:
        first = Asked(group, prompt, policy)
        assert (first.reused, first.why_none) == (0, NOTHING_ALIKE)
        again = Asked(group, prompt, policy)
        assert (again.reused, again.why_none) == (reused, "")
        assert again.tokens == first.tokens
        assert again.summary.counts.tokens_resident == first.summary.counts.tokens_resident
        assert again.summary.counts.tokens_demoted == first.summary.counts.tokens_demoted
        # Another end, at a place that is no page's: the common whole pages.
        other = [*prompt[:500], *long_prompt[900:1000]]
        whole = Asked(group, other, policy, prefix_reuse=False)
        assert (whole.reused, whole.why_none) == (0, "prefix_reuse is off")
        begun = Asked(group, other, policy)
        assert begun.reused == 448
        assert begun.tokens == whole.tokens
        # A conversation: the prompt before is the prefix of what follows it.
        longer = [*other, *begun.tokens, *long_prompt[1000:1040]]
        assert Asked(group, longer, policy).reused == 576
        assert group.cache is not None
        assert group.cache.alive()


def test_what_is_shared_counts_once_and_stays_for_those_who_hold_it(folder: Path, long_prompt: list[int]) -> None:
    prompt = long_prompt[:705]
    with cluster(folder, 3, worker={**WORKER, "reserve_ahead_tokens": 0}) as group:
        first = Asked(group, prompt, RECALL)
        wait_finished(group, first)
        alone = _host(group).used_bytes
        second = Asked(group, prompt, RECALL)
        assert second.reused == 640
        wait_finished(group, second)
        both = _host(group).used_bytes
        # Two pages of its own of the twelve: positions from 640 on.
        assert both - alone < alone / 4
        with _cache(group) as client:
            client.close(first.sequence)
        # The first one's are gone, but for what the second holds, which still can be begun with.
        third = Asked(group, prompt, RECALL)
        assert third.reused == 640
        assert third.tokens == first.tokens
        with _cache(group) as client:
            client.suspend(second.sequence)
            client.close(third.sequence)
        fourth = Asked(group, prompt, RECALL)
        assert (fourth.reused, fourth.tokens) == (640, first.tokens)
        _expect_empty(group, [second.sequence, fourth.sequence])
        last = Asked(group, prompt, RECALL)
        assert (last.reused, last.tokens) == (0, first.tokens)


def test_others_prompts_and_other_models_pages_are_never_used(folder: Path, long_prompt: list[int]) -> None:
    prompt = long_prompt[:300]
    with cluster(folder, 1, worker={**WORKER, "prefix_reuse": True}) as group:
        mine = Asked(group, prompt, BOUNDED, tenant="mine", prefix_reuse=None)
        theirs = Asked(group, prompt, BOUNDED, tenant="theirs", prefix_reuse=None)
        assert (theirs.reused, theirs.why_none) == (0, NOTHING_ALIKE)
        assert Asked(group, prompt, BOUNDED, tenant="mine", prefix_reuse=None).reused == 256
        # K lies there unrotated: another fingerprint.
        relative = common_pb2.PolicyOptions(
            policy="snapkv_h2o", heavy_tokens=96, recent_tokens=32, positions="cache_relative"
        )
        assert Asked(group, prompt, relative, tenant="mine").reused == 0
        again = Asked(group, prompt, relative, tenant="mine")
        assert again.reused == 256
        # Pages do not depend on the policy: a prompt is computed whole before anything goes.
        assert Asked(group, prompt, FULL, tenant="mine").reused == 256
        # One token differs, within the first page.
        assert Asked(group, [prompt[0] + 1, *prompt[1:]], BOUNDED, tenant="mine").reused == 0
        for policy in ["h2o", "scissorhands"]:
            options = common_pb2.PolicyOptions(policy=policy, heavy_tokens=96, recent_tokens=32)
            counted = Asked(group, prompt, options, tenant="mine")
            assert (counted.reused, counted.why_none) == (0, "the policy counts the attention of every prompt query")
        short = Asked(group, prompt[: PAGE + 31], BOUNDED, tenant="mine")
        assert (short.reused, short.why_none) == (0, "the prompt is not longer than a page and its last queries")
        # What was not offered is not found.
        Asked(group, long_prompt[300:600], BOUNDED, tenant="mine", prefix_reuse=False)
        assert Asked(group, long_prompt[300:600], BOUNDED, tenant="mine").reused == 0
        assert mine.tokens == theirs.tokens


def test_ranks_that_stream_say_so_and_compute(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 3, worker=WORKER, per_rank={1: {"disable_slab": True}}) as group:
        answers = [Asked(group, long_prompt[:200], BOUNDED) for _ in range(2)]
        assert answers[0].tokens == answers[1].tokens
        for answer in answers:
            assert (answer.reused, answer.why_none) == (0, "a rank streams its pages, and cannot read them back")


def test_a_group_of_another_size_begins_with_the_same_pages(folder: Path, long_prompt: list[int]) -> None:
    prompt = long_prompt[:705]
    with cluster(folder, 1, worker=WORKER) as group:
        first = Asked(group, prompt, RECALL)
        wait_finished(group, first)
        others = {**WORKER, "cache_address": group.cache_address, "group": "others"}
        with cluster(folder / "others", 3, cache=None, worker=others) as three:
            whole = Asked(three, prompt, RECALL, prefix_reuse=False)
            begun = Asked(three, prompt, RECALL)
            assert begun.reused == 640
            assert begun.tokens == whole.tokens
            # And goes on where it lost everything, from pages of both.
            three.workers[1].kill()
            three.restart_worker(1)
        assert first.tokens == whole.tokens


@takes_long
def test_a_rank_that_dies_and_a_cache_service_that_restarts_leave_shared_pages_whole(
    folder: Path, long_prompt: list[int]
) -> None:
    prompt = long_prompt[:705]
    with cluster(folder, 3, cache={"state_dir": folder / "state", "sequence_lease_ms": 15000}, worker=WORKER) as group:
        first = Asked(group, prompt, RECALL, max_new_tokens=60)
        wait_finished(group, first)
        with Client(worker=group.worker_address, cache=group.cache_address) as client:
            broken = client.generate(prompt, policy=RECALL, max_new_tokens=60, ignore_eos=True, prefix_reuse=True)
            tokens = []
            for token in broken:
                tokens.append(token.token)
                if len(tokens) == 30:
                    group.workers[1].kill()
                    group.restart_worker(1, wait=False)
                if len(tokens) == 45:
                    assert group.cache is not None
                    group.cache.kill()
                    group.restart_cache()
            assert tokens == first.tokens
        group.wait_ready(group.worker_addresses[1])
        third = Asked(group, prompt, RECALL, max_new_tokens=60)
        assert (third.reused, third.tokens) == (640, first.tokens)
        _expect_empty(group, [first.sequence, broken.sequence_id, third.sequence])


def test_pages_on_disk_come_up_for_a_prompt_that_begins_with_them(folder: Path, long_prompt: list[int]) -> None:
    # Room in host memory for one prompt and a half.
    disk = {"disk_path": folder / "disk", "disk_bytes": 1 << 30}
    cache = {"host_bytes": 28 << 20, "sequence_lease_ms": 600_000, **disk}
    prompt, other = long_prompt[:705], long_prompt[500:1205]
    with cluster(folder, 1, cache=cache, worker={**WORKER, "reserve_ahead_tokens": 64}) as group:
        first = Asked(group, prompt, RECALL)
        wait_finished(group, first)
        away = Asked(group, other, RECALL)
        wait_finished(group, away)
        assert away.reused == 0
        below = [tier for tier in group.admin.Stats(admin_pb2.StatsRequest()).tiers if tier.tier == "disk"]
        assert below[0].used_bytes > 0
        again = Asked(group, prompt, RECALL)
        assert (again.reused, again.tokens) == (640, first.tokens)
        _expect_empty(group, [first.sequence, again.sequence, away.sequence])


def test_requests_that_cannot_work_are_refused_by_name(folder: Path, long_prompt: list[int]) -> None:
    with cluster(folder, 1, worker=WORKER) as group, _cache(group) as client:
        first = Asked(group, long_prompt[:200], BOUNDED)
        opened = client.get(first.sequence)
        request = sequence_pb2.OpenSequenceRequest(
            group=opened.group,
            epoch=opened.epoch,
            fingerprint=opened.fingerprint,
            policy=opened.policy,
            budget=opened.budget,
            prompt_tokens=4,
            max_tokens=8,
            prefix=sequence_pb2.PrefixRequest(tokens=[1, 2, 3, 4], max_tokens=5),
        )
        with pytest.raises(HeavywaterError, match=r"prefix\.max_tokens is 5, want 0 to 4"):
            client.open(request)
