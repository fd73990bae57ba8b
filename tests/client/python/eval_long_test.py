"""`heavywater eval long`: what is asked for, and the figures."""

from __future__ import annotations

import math

import pytest
from client_fakes import FakeServers
from heavywater import Client
from heavywater.eval.long import LongResult, make_long_rows, make_marks, measure_long


def test_tokens_are_asked_for_at_places_in_a_cache_of_the_given_slots() -> None:
    streaming, h2o = make_long_rows(["streaming", "h2o"], "layer", 1000, 4)
    options = streaming.options()
    assert (options.policy, options.scope, options.positions) == ("streaming", "layer", "cache_relative")
    assert (options.heavy_tokens + options.recent_tokens, options.sink_tokens) == (1000, 4)
    assert (h2o.options().heavy_tokens, h2o.options().recent_tokens, h2o.options().sink_tokens) == (500, 500, 4)


@pytest.mark.parametrize(
    ("policies", "scope", "sinks", "says"),
    [
        (["snapkv"], "layer", 4, "'snapkv' is not one of"),
        (["full"], "layer", 4, "'full' is not one of"),
        (["h2o"], "head", 4, "'head' is not one of"),
        (["h2o"], "layer", 8, "8 sinks of 16 slots"),
    ],
)
def test_what_cannot_run_past_the_context_is_refused(policies: list[str], scope: str, sinks: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_long_rows(policies, scope, 16, sinks)


def test_marks_are_told_after_the_prompt_and_at_the_end() -> None:
    assert make_marks(4000, 1024, 20000) == [4000, 8000, 12000, 16000, 20000]
    assert make_marks(4000, 4000, 9000) == [8000, 9000]
    with pytest.raises(ValueError, match="nothing is left to score"):
        make_marks(10, 20, 20)


def test_perplexity_is_of_all_tokens_so_far_and_of_those_since_the_last_mark() -> None:
    result = LongResult(make_long_rows(["h2o"], "layer", 16, 0)[0], 2, nll=[1.0, 2.0, 3.0, 6.0])
    figures = result.as_json([4, 6])
    assert figures["ppl"] == pytest.approx([math.exp(1.5), math.exp(3.0)])
    assert figures["ppl_since"] == pytest.approx([math.exp(1.5), math.exp(4.5)])


def test_a_text_is_fed_behind_its_first_tokens_and_each_is_scored(client: Client, servers: FakeServers) -> None:
    row = make_long_rows(["streaming"], "layer", 16, 4)[0]
    ids = [2 + i % 20 for i in range(50)]
    told = []
    result = measure_long(client, row, ids, 10, lambda: told.append(1))
    assert (len(result.nll), len(told), result.device_bytes) == (40, 40, 16)
    request = servers.worker.requests[-1]
    assert list(request.tokens) == ids[:10]
    assert list(request.forced_tokens) == ids[10:]
    assert not request.return_logits
