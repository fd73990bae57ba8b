"""Texts with a hidden sentence, and who finds it: `heavywater eval needle`."""

from __future__ import annotations

import re

import numpy as np
import pytest
from client_fakes import PIECES, FakeServers
from heavywater import Client
from heavywater.eval.haystack import CODE_DIGITS, DEPTHS, make_needles, split_sentences
from heavywater.eval.measure import require_all_copies
from heavywater.eval.needle import NeedleEvaluation, NeedleResult
from heavywater.eval.rows import Row, rows_at_equal_bytes
from heavywater.question import split_chat
from heavywater.v1 import generation_pb2

TEXT = " ".join(f"sentence {i} says nothing at all." for i in range(300))
TOKENS = 400
RECALL = Row("snapkv_h2o", "layer", 0.2, recall=64, of_bytes=True)
ORDERED = Row("snapkv_h2o", "layer", 0.2, of_bytes=True)


def decoded(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids).replace("Ġ", " ").replace("Ċ", "\n")


def code_in(request: generation_pb2.GenerateRequest) -> str:
    """What a model that sees all of the text answers."""
    return re.search(rf" is (\d{{{CODE_DIGITS}}})\.", decoded(list(request.tokens))).group(1)


def forgetful(request: generation_pb2.GenerateRequest) -> str:
    """Only the full cache and recall find the code."""
    return code_in(request) if request.policy.policy in ("full", "recall") else "12345"


def run(client: Client, row: Row, question_after: bool = True) -> NeedleResult:
    needles = make_needles(client.get_model(), TEXT, 0, 2, TOKENS)
    return NeedleEvaluation(client, needles, parallel=3).run(row, question_after)


def test_every_depth_has_its_texts_of_about_the_size_asked_for(client: Client) -> None:
    needles = make_needles(client.get_model(), TEXT, 0, 2, TOKENS)
    assert [needle.depth for needle in needles] == list(DEPTHS) * 2
    for needle in needles:
        assert TOKENS - 40 <= len(needle.context) <= TOKENS + 80
        middle = (needle.positions.start + needle.positions.stop) / 2
        assert middle / len(needle.context) == pytest.approx(needle.depth, abs=0.12)


def test_the_positions_are_those_of_the_hidden_sentence(client: Client) -> None:
    for needle in make_needles(client.get_model(), TEXT, 0, 2, TOKENS):
        # The tests' vocabulary has no capital letters.
        hidden = decoded([needle.context[i] for i in needle.positions]).strip()
        assert hidden == f"he secret code of the {needle.name} is {needle.code}."


def test_context_and_question_are_the_chat_format_up_to_the_code(client: Client) -> None:
    model = client.get_model()
    needle = make_needles(model, TEXT, 0, 1, TOKENS)[0]
    assert decoded(needle.context).endswith("\n\n")
    asked = f"hat is the secret code of the {needle.name}?".replace("?", "")
    opening = f"he secret code of the {needle.name} is "
    assert decoded(needle.question) == f"{asked}<|im_end|>\n<|im_start|>assistant\n{opening}"


def test_the_same_seed_makes_the_same_texts_and_another_one_others(client: Client) -> None:
    model = client.get_model()
    first = make_needles(model, TEXT, 3, 1, TOKENS)
    assert make_needles(model, TEXT, 3, 1, TOKENS) == first
    assert [one.code for one in make_needles(model, TEXT, 4, 1, TOKENS)] != [one.code for one in first]


def test_codes_have_all_their_digits(client: Client) -> None:
    for needle in make_needles(client.get_model(), TEXT, 0, 20, TOKENS):
        assert len(needle.code) == CODE_DIGITS
        assert needle.code[0] != "0"


def test_a_text_that_is_too_short_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="want at least 800, twice --tokens"):
        make_needles(client.get_model(), TEXT[:500], 0, 1, TOKENS)


def test_sentences_end_at_stops_and_lines_are_joined() -> None:
    assert split_sentences("One\ntwo. Three? Four!\n\nFive") == ["One two.", "Three?", "Four!", "Five"]


def test_a_question_splits_the_chat_format_before_it(client: Client) -> None:
    model = client.get_model()
    messages = [{"role": "user", "content": "text"}]
    prompt, suffix = split_chat(model, messages, "why")
    assert prompt + suffix == model.chat([{"role": "user", "content": "text\n\nwhy"}])
    assert suffix.startswith("why<|im_end|>")
    assert split_chat(model, messages, "") == (model.chat(messages), "")


def test_hits_are_answers_that_are_the_code(client: Client, servers: FakeServers) -> None:
    servers.worker.answer = forgetful
    for row, hits in ((Row("full"), 10), (RECALL, 10), (ORDERED, 0)):
        result = run(client, row)
        assert (result.hits, len(result.answers)) == (hits, 10)
    assert all(f"want {miss.needle.code}, got '12345'" in miss.describe() for miss in result.misses)


def test_asked_after_the_question_is_a_suffix_and_before_it_ends_the_prompt(
    client: Client, servers: FakeServers
) -> None:
    servers.worker.answer = forgetful
    for after in (True, False):
        servers.worker.requests.clear()
        run(client, RECALL, after)
        for request in servers.worker.requests:
            assert bool(request.suffix_tokens) == after
            assert decoded([*request.tokens, *request.suffix_tokens]).endswith(" is ")
            assert (request.max_new_tokens, request.ignore_eos) == (CODE_DIGITS, True)


def test_a_result_counts_measured_bytes_and_what_queries_read(client: Client, servers: FakeServers) -> None:
    servers.worker.answer = forgetful
    result = run(client, RECALL)
    assert (result.reads_mean, result.reads_max) == (2.5, 7)
    assert run(client, ORDERED).reads_mean == 0
    full = run(client, Row("full"), question_after=False)
    assert full.bytes_ratio == pytest.approx(1.0)
    assert result.as_json() == {
        "policy": "snapkv_h2o",
        "preset": "recall",
        "budget": 0.2,
        "recall": True,
        "recall_tokens": 64,
        "question_after": True,
        "bytes_ratio": result.bytes_ratio,
        "hits": 10,
        "total": 10,
    }


def test_a_miss_tells_how_much_of_the_sentence_was_resident(client: Client, servers: FakeServers) -> None:
    servers.worker.answer = forgetful
    result = run(client, ORDERED)
    # The service's sets hold 0, 3, 5 + layer, 18 and 19 of 20 positions, in two layers.
    for miss in result.misses:
        wanted = np.array(miss.needle.positions)
        inside = [np.isin(wanted, [0, 3, 5 + layer, 18, 19]).sum() for layer in range(2)]
        assert miss.resident == np.mean(inside)
        assert f"of its {len(wanted)} tokens {miss.resident:.1f} resident" in miss.describe()
    assert run(client, RECALL).answers[0].resident is None


def test_sequences_are_closed_so_that_their_pages_are_free(client: Client, servers: FakeServers) -> None:
    servers.worker.answer = forgetful
    run(client, ORDERED)
    assert servers.cache.closed == [42] * 10


def test_rows_at_equal_bytes_ask_for_a_share_of_the_bytes() -> None:
    full, ordered, recall, everything = rows_at_equal_bytes(["layer"], [0.1], [None, 64, "all"])
    assert full == Row("full")
    options = ordered.options(1500)
    assert (options.policy, options.device_ratio, options.heavy_tokens, options.recent_tokens) == (
        ("snapkv_h2o", 0.1, 0, 75)
    )
    assert (options.plan_interval_steps, options.decay, options.min_budget_tokens) == (1, 1.0, 1)
    options = recall.options(1500)
    assert (options.policy, options.device_ratio, options.recall_tokens) == ("recall", 0.1, 64)
    assert (options.min_budget_tokens, options.recall_all) == (1, False)
    assert everything.options(1500).recall_all
    names = [row.name for row in (ordered, recall, everything)]
    assert names == [f"snapkv_h2o-layer-0.1-{ending}" for ending in ("bytes", "recall-64", "recall-all")]


def test_the_ordered_policy_with_recall_is_not_the_tuned_preset() -> None:
    rows = rows_at_equal_bytes(["layer"], [0.1], [None, 64], untuned=True)
    assert [row.preset for row in rows] == ["full", "snapkv_h2o", "snapkv_h2o", "recall"]
    options = rows[2].options(1500)
    assert (options.policy, options.recall, options.recall_tokens, options.device_ratio) == (
        ("snapkv_h2o", True, 64, 0.1)
    )
    assert rows[2].name == "snapkv_h2o-layer-0.1-and-recall-64"


def test_figures_of_recall_without_all_copies_are_refused() -> None:
    summary = generation_pb2.GenerateSummary()
    summary.counts.tokens_dropped = 3
    require_all_copies("no recall", summary)  # changes nothing there
    summary.recall.reads = 1
    with pytest.raises(RuntimeError, match="with recall: 3 tokens were dropped"):
        require_all_copies("with recall", summary)
    summary.counts.tokens_dropped = 0
    require_all_copies("with recall", summary)
