"""What a load run asks for, and the figures that come of it."""

from __future__ import annotations

from statistics import mean, pstdev

import pytest
from heavywater.load.figures import CANCELLED, FAILED, REFUSED, Outcome, figures_of, percentile, quantiles_ms
from heavywater.load.requests import LoadPlan, make_requests

PLAN = LoadPlan(sequences=2000, prompt_tokens=(3, 9), new_tokens=(2, 5), cancel_share=0.25, seed=7)


def plan(**changes: object) -> LoadPlan:
    return LoadPlan(**{**vars(PLAN), **changes})  # type: ignore[arg-type]


def test_the_same_seed_asks_the_same() -> None:
    vocabulary = range(1000)
    first, again = make_requests(PLAN), make_requests(PLAN)
    assert first == again
    assert [r.prompt(vocabulary) for r in first[:50]] == [r.prompt(vocabulary) for r in again[:50]]
    other = make_requests(plan(seed=8))
    assert [r.prompt_tokens for r in first] != [r.prompt_tokens for r in other]
    assert first[0].prompt(vocabulary) != other[0].prompt(vocabulary)
    assert first[0].prompt(vocabulary) != first[1].prompt(vocabulary)


def test_lengths_are_ragged_and_reach_both_ends() -> None:
    requests = make_requests(PLAN)
    assert {r.prompt_tokens for r in requests} == set(range(3, 10))
    assert {r.new_tokens for r in requests} == set(range(2, 6))
    assert all(len(r.prompt([5, 6])) == r.prompt_tokens for r in requests)


def test_the_share_that_is_asked_for_leaves_at_every_moment_before_the_end() -> None:
    leaving = [r for r in make_requests(PLAN) if r.cancel_after is not None]
    assert len(leaving) == pytest.approx(500, abs=80)  # four standard deviations
    assert {(r.new_tokens, r.cancel_after) for r in leaving} == {(n, k) for n in range(2, 6) for k in range(n)}
    assert not [r for r in make_requests(plan(cancel_share=0.0)) if r.cancel_after is not None]
    assert not [r for r in make_requests(plan(cancel_share=1.0)) if r.cancel_after is None]


def test_another_share_of_cancels_changes_nothing_else() -> None:
    lengths = [[(r.prompt_tokens, r.new_tokens) for r in make_requests(plan(cancel_share=s))] for s in (0.0, 0.5)]
    assert lengths[0] == lengths[1]


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = [r.arrival_s for r in make_requests(plan(sequences=20_000, rate=50.0))]
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) > 0
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert pstdev(gaps) == pytest.approx(1 / 50, rel=0.05)  # of an exponential: its mean


def test_a_closed_loop_is_there_at_once() -> None:
    assert {r.arrival_s for r in make_requests(PLAN)} == {0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": 0}, "sequences is 0"),
        ({"sequences": 100_001}, "sequences is 100001, want 1 to 100000"),
        ({"prompt_tokens": (9, 3)}, "prompt_tokens is 9,3"),
        ({"new_tokens": (0, 3)}, "new_tokens is 0,3"),
        ({"cancel_share": 1.5}, "cancel_share is 1.5"),
        ({"rate": 0.0}, "rate is 0 "),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_requests(plan(**change))


def test_percentiles_are_values_that_occurred() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert [percentile(hundred, p) for p in (0, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert [percentile([1.0, 2.0, 3.0], p) for p in (33, 34, 50, 67, 99)] == [1, 2, 2, 3, 3]
    assert percentile([4.0], 50) == 4
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_quantiles_do_not_depend_on_the_order() -> None:
    assert quantiles_ms([0.003, 0.001, 0.002]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert quantiles_ms([]) is None


def test_figures_count_tokens_of_all_and_errors_by_code() -> None:
    figures = figures_of(
        [
            Outcome(asked_s=10.0, token_times_s=[10.5, 10.6, 10.8], ended_s=11.0),
            Outcome(asked_s=10.25, kind=CANCELLED, token_times_s=[11.25], ended_s=11.5, late_s=0.125),
            Outcome(asked_s=10.5, kind=REFUSED, code="UNAVAILABLE", ended_s=14.0),
            Outcome(asked_s=10.5, kind=FAILED, code="INTERNAL", ended_s=10.5),
            Outcome(asked_s=10.5, kind=FAILED, code="INTERNAL", ended_s=10.5),
        ]
    )
    assert (figures.sequences, figures.completed, figures.cancelled) == (5, 1, 1)
    assert (figures.refused, figures.errors) == ({"UNAVAILABLE": 1}, {"INTERNAL": 2})
    assert (figures.tokens, figures.duration_s, figures.tokens_per_s) == (4, 4.0, 1.0)
    assert figures.time_to_first_token_ms == {"p50": 500.0, "p95": 1000.0, "p99": 1000.0}
    assert figures.time_per_token_ms == pytest.approx({"p50": 100.0, "p95": 200.0, "p99": 200.0})
    assert figures.late_ms == 125.0
