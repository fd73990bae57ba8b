"""Figures, rows and dumps of `heavywater eval ppl`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from client_fakes import PIECES, FakeServers, logits_of
from heavywater import Client
from heavywater.eval.dump import dump_path, totals_of_dumps
from heavywater.eval.figures import Totals
from heavywater.eval.measure import make_windows
from heavywater.eval.ppl import PplEvaluation, RowResult
from heavywater.eval.rows import Row, make_rows, published_rows

OFFSETS, PROMPT, CONTINUE = [0, 30], 20, 6
IDS = [(7 * i + 2) % len(PIECES) for i in range(80)]
ROWS = [Row("full"), Row("h2o", "kv_head", 0.5), Row("snapkv_h2o", "layer", 0.25)]


def evaluate(client: Client, dump: Path | None = None) -> list[RowResult]:
    windows = make_windows(IDS, OFFSETS, PROMPT, CONTINUE)
    evaluation = PplEvaluation(client, len(PIECES), windows, parallel=4, dump=dump)
    return evaluation.run(ROWS, on_row=lambda _: None)


def expected(policy: str) -> tuple[float, float, float]:
    """(ppl, KL, agreement) straight from the definitions."""
    nll, kl, agreed = [], [], []
    for offset in OFFSETS:
        for i in range(CONTINUE):
            p, full = (np.exp(np.float64(logits_of(name, PROMPT + i))) for name in (policy, "full"))
            p, full = p / p.sum(), full / full.sum()
            nll.append(-math.log(p[IDS[offset + PROMPT + i]]))
            kl.append(float((full * np.log(full / p)).sum()))
            agreed.append(p.argmax() == full.argmax())
    return math.exp(np.mean(nll)), float(np.mean(kl)), float(np.mean(agreed))


def test_a_rows_figures_are_those_of_the_definitions(client: Client) -> None:
    for result in evaluate(client):
        figures = (result.totals.ppl, result.totals.mean_kl, result.totals.agree)
        assert figures == pytest.approx(expected(result.row.policy), rel=1e-9, abs=1e-12)


def test_the_full_caches_own_row_has_no_divergence(client: Client) -> None:
    full = evaluate(client)[0]
    assert full.totals.mean_kl == 0
    assert full.totals.agree == 1
    assert full.bytes_ratio == 1


def test_bytes_ratio_is_measured_bytes_over_the_full_caches(client: Client) -> None:
    assert [result.bytes_ratio for result in evaluate(client)] == [1, 0.5, 0.25]


def test_each_row_sends_its_own_tokens_and_policy(client: Client, servers: FakeServers) -> None:
    evaluate(client)
    requests = servers.worker.requests
    assert len(requests) == len(ROWS) * len(OFFSETS)
    assert [request.policy.policy for request in requests[:2]] == ["full", "full"]
    for request in requests:
        start = IDS.index(request.tokens[0])
        assert list(request.tokens) == IDS[start : start + PROMPT]
        assert list(request.forced_tokens) == IDS[start + PROMPT : start + PROMPT + CONTINUE]


def test_sequences_are_closed_so_that_their_pages_are_free(client: Client, servers: FakeServers) -> None:
    evaluate(client)
    assert servers.cache.closed == [42] * (len(ROWS) * len(OFFSETS))


def test_the_figures_can_be_computed_again_from_the_dump(client: Client, tmp_path: Path) -> None:
    for result in evaluate(client, tmp_path):
        again = totals_of_dumps(tmp_path, result.row.name, OFFSETS)
        assert (again.ppl, again.mean_kl) == pytest.approx((result.totals.ppl, result.totals.mean_kl), rel=1e-12)
        assert again.agreed == result.totals.agreed


def test_the_dump_holds_ids_logits_and_kept_positions_with_scores(client: Client, tmp_path: Path) -> None:
    evaluate(client, tmp_path)
    with np.load(dump_path(tmp_path, ROWS[1].name, 30)) as dump:
        assert dump["ids"].tolist() == IDS[30 : 30 + PROMPT + CONTINUE]
        assert dump["prompt"] == PROMPT
        np.testing.assert_array_equal(dump["logits"][2], logits_of("h2o", PROMPT + 2))
        first, last = dump["set_begin"][1:3]
        assert dump["set_layer"].tolist() == [0, 1]
        assert dump["kept_positions"][first:last].tolist() == [0, 3, 6, 18, 19]
        assert dump["kept_scores"][first:last].tolist() == [9.0, 4.0, 3.0, 1.0, 0.5]
    assert not list(tmp_path.glob(".logits-*"))


def test_a_failing_window_ends_the_evaluation(client: Client, servers: FakeServers) -> None:
    servers.cache.unavailable = 1
    with pytest.raises(Exception, match="draining"):
        evaluate(client)


def test_totals_weigh_every_position_alike() -> None:
    one, other = Totals(nll=2.0, kl=1.0, agreed=1, positions=1), Totals(nll=0.0, kl=0.0, agreed=3, positions=3)
    one += other
    assert one.ppl == pytest.approx(math.exp(0.5))
    assert (one.mean_kl, one.agree) == (0.25, 1.0)


def test_a_window_beyond_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="offset 60: the window ends at token 86, the text has 80"):
        make_windows(IDS, [0, 60], PROMPT, CONTINUE)


@pytest.mark.parametrize(
    ("row", "heavy", "recent", "sinks"),
    [
        (Row("h2o", "kv_head", 0.2), 154, 153, 0),
        (Row("snapkv_h2o", "layer", 0.1), 77, 76, 0),
        (Row("streaming", "kv_head", 0.4), 4, 610, 4),
    ],
)
def test_budgets_follow_the_design(row: Row, heavy: int, recent: int, sinks: int) -> None:
    options = row.options(1536)
    assert (options.heavy_tokens, options.recent_tokens, options.sink_tokens) == (heavy, recent, sinks)
    assert heavy + recent == int(row.budget * 1536)
    assert (options.scope, options.plan_interval_steps, options.decay) == (row.scope, 1, 1.0)


def test_the_default_rows_are_the_published_table() -> None:
    names = [row.name for row in published_rows([0.1, 0.2, 0.4])]
    assert len(names) == 12
    assert names[0] == "full"
    assert names[-2:] == ["h2o-layer-0.2", "snapkv_h2o-layer-0.2"]


def test_unknown_names_and_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="'h20' is not one of"):
        make_rows(["h20"], ["layer"], [0.1])
    with pytest.raises(ValueError, match=r"budget 1\.5"):
        make_rows(["h2o"], ["layer"], [1.5])
