"""`heavywater diff`: where a policy's answer leaves the full cache's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from client_fakes import FakeServers, logits_of
from heavywater.comparison import first_difference, missing_reads, most_likely, probe_of
from heavywater.generation import Token
from heavywater.v1 import common_pb2, generation_pb2


def run(servers: FakeServers, *arguments: str) -> str:
    command = [sys.executable, "-m", "heavywater", "diff", "abc", "-n", "3", "--address", servers.address, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def differing(request: generation_pb2.GenerateRequest) -> str:
    return "xyz" if request.policy.policy == "full" else "xya"


def token(number: int, policy: str = "full") -> Token:
    return Token(0, number, "", 0.0, logits_of(policy, 3), common_pb2.SequenceCounts(), 0, 0)


def test_the_same_answer_is_the_models_own(servers: FakeServers) -> None:
    assert "the model itself: the full cache gives the same 3 tokens" in run(servers)
    assert len(servers.worker.requests) == 2
    figures = json.loads(run(servers, "--json"))
    assert (figures["verdict"], figures["differs_at"], figures["missing"]) == ("the model itself", None, [])


def test_what_the_policy_with_recall_did_not_read_is_named(servers: FakeServers) -> None:
    servers.worker.answer = differing
    figures = json.loads(run(servers, "--json"))
    assert (figures["verdict"], figures["differs_at"]) == ("not recalled", 2)
    assert (figures["policy_text"], figures["full_text"]) == ("xya", "xyz")
    # The probe noticed position 2 six times, the policy read it three times; 0 was read as
    # often. ("ab" is one token: position 2 is the answer's first.)
    assert figures["missing"] == [{"position": 2, "token": "x", "queries": 3}]
    policy, full, probe, replay = servers.worker.requests
    assert full.policy.policy == "full"
    assert policy.return_logits
    assert full.return_logits
    for again in (probe, replay):
        assert again.return_reads
        assert len(again.forced_tokens) == 3
    assert probe.policy.recall
    assert replay.policy == policy.policy


def test_without_recall_it_was_evicted(servers: FakeServers) -> None:
    servers.worker.answer = differing
    said = run(servers, "--policy", "h2o")
    assert said.startswith("xy\n")
    assert "evicted: queries read nothing of what has left the device" in said
    assert "token 2, the first that differs" in said
    _, _, probe = servers.worker.requests
    assert (probe.policy.policy, probe.policy.recall, probe.policy.promote_candidates) == ("h2o", True, 0)


def test_distributions_are_the_likeliest_tokens_in_order() -> None:
    (first, share), (second, less) = most_likely(token(0), 2)
    order = logits_of("full", 3).argsort()
    assert (first, second) == (order[-1], order[-2])
    assert 1 > share > less > 0
    with pytest.raises(ValueError, match="without logits"):
        most_likely(Token(0, 0, "", 0.0, None, common_pb2.SequenceCounts(), 0, 0), 2)


def test_the_first_difference_is_found_and_none_where_there_is_none() -> None:
    one, two = token(1), token(2)
    assert first_difference([one, one], [one, two]) == 1
    assert first_difference([one, two], [one, two]) is None


def test_positions_that_a_full_response_may_have_left_out_do_not_count_as_unread() -> None:
    noticed = [(1000, 9), (1001, 4), (0, 300)]
    full_response = [(position, 260 - position) for position in range(256)]  # down to 5
    assert missing_reads(noticed, full_response) == [(0, 40), (1000, 4)]
    assert missing_reads(noticed, full_response[:10]) == [(0, 40), (1000, 9), (1001, 4)]


def test_the_probe_of_a_policy_leaves_the_policy_as_it_is() -> None:
    policy = common_pb2.PolicyOptions(policy="recall", recall_all=True, promote_candidates=5)
    probe = probe_of(policy, recalls=True)
    assert (policy.recall_all, policy.recall_tokens) == (True, 0)
    assert (probe.recall_all, probe.promote_candidates) == (False, 5)
