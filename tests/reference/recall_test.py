"""The reference itself, against cases that can be worked out by hand and the bounds that 4 bits allow."""

import numpy as np
import pytest
from llama_numpy import softmax
from recall import (
    QUERIES,
    Demoted,
    attend,
    choose_channels,
    default_channels,
    encode_page,
    estimate_logits,
    log_sum_exp,
    pick,
)

SIZE, GROUP, PAGE = 64, 3, 32
SCALE = 1 / np.sqrt(SIZE)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def demoted_of(keys: np.ndarray, positions: list[int], chosen: np.ndarray) -> Demoted:
    pages = [encode_page(keys[at : at + PAGE], chosen) for at in range(0, len(keys), PAGE)]
    return Demoted(keys, normal(7, *keys.shape), pages, np.array(positions, np.int64))


@pytest.mark.parametrize(("size", "channels"), [(32, 8), (64, 24), (80, 24), (96, 24), (128, 32), (256, 64)])
def test_the_default_is_a_quarter_of_the_channels_but_at_least_24_of_64(size, channels):
    assert default_channels(size) == channels


def test_channels_are_chosen_by_query_energy_times_key_variance():
    queries, keys = np.ones((4, 1, 4), np.float32), np.zeros((6, 4), np.float32)
    keys[:, 0] = [1, -1, 1, -1, 1, -1]
    keys[:, 1] = 100  # loud, but tells nothing
    keys[:, 2] = keys[:, 3] = keys[:, 0] * 2
    queries[:, :, 0] = 10
    queries[:, :, 3] = 0  # nobody asks
    assert choose_channels(queries, keys, 2).tolist() == [0, 2]
    queries[:, :, 3] = 1
    assert choose_channels(queries, keys, 2).tolist() == [0, 2]  # a tie goes to the lower


def test_only_the_last_queries_choose():
    queries, keys = np.zeros((QUERIES + 5, 1, 4), np.float32), normal(1, 8, 4)
    queries[:5, :, 3] = 1e6
    queries[5:, :, 1] = 1
    assert choose_channels(queries, keys, 1).tolist() == [1]


def test_a_code_is_at_most_half_a_step_off():
    keys = normal(2, PAGE, SIZE)
    page = encode_page(keys, np.arange(0, SIZE, 4))
    error = np.abs(page.keys()[:, page.chosen] - keys[:, page.chosen])
    # What 16 bits cost: the minimum, and the step fifteen times over.
    rounding = 2.0**-11 * (np.abs(page.minima) + 15 * page.steps)
    assert (error <= page.steps / 2 + 2 * rounding).all()
    assert page.codes.min() == 0
    assert page.codes.max() == 15
    np.testing.assert_allclose(page.keys()[0, page.others], keys[:, page.others].mean(axis=0), atol=1e-3)


def test_a_constant_channel_is_exact_and_an_outlier_spoils_only_its_own():
    keys = normal(3, PAGE, SIZE)
    keys[:, 0] = 0.5
    keys[:, 1] = 0
    keys[5, 2] = 3e4
    page = encode_page(keys, np.arange(8))
    assert (page.keys()[:, 0] == 0.5).all()
    assert (page.keys()[:, 1] == 0).all()
    assert np.isfinite(page.keys()).all()
    assert np.abs(page.keys()[:, 3:8] - keys[:, 3:8]).max() < 0.5


@pytest.mark.parametrize("positions", [1, 15, PAGE])
def test_a_page_that_is_not_full_has_a_code_for_each_position(positions):
    page = encode_page(normal(4, positions, SIZE), np.arange(16))
    assert page.codes.shape == (positions, 16)
    assert np.isfinite(page.keys()).all()


def test_estimates_are_the_logits_of_the_sketched_keys_up_to_the_weights_rounding():
    query, page = normal(5, SIZE), encode_page(normal(6, PAGE, SIZE), np.arange(0, SIZE, 4))
    exact = SCALE * page.keys() @ query
    unit = SCALE * np.abs(query[page.chosen] * page.steps).max() / 127
    assert np.abs(estimate_logits(query, page, SCALE) - exact).max() <= unit / 2 * 15 * len(page.chosen)
    assert np.corrcoef(estimate_logits(query, page, SCALE), exact)[0, 1] > 0.999


def test_a_query_of_zeros_estimates_zero():
    page = encode_page(normal(6, PAGE, SIZE), np.arange(16))
    assert (estimate_logits(np.zeros(SIZE, np.float32), page, SCALE) == 0).all()


def test_the_best_are_picked_above_the_least_share_ties_to_the_lower():
    positions = np.array([2, 3, 5, 8, 9])
    estimates = np.log(np.array([[0.2, 0.4, 0.2, 0.05, 0.2], [0.2, 0.4, 0.2, 0.05, 0.2]]))
    lse = np.zeros(2)
    assert pick(positions, estimates, lse, 3, 1e-4).tolist() == [2, 3, 5]
    assert pick(positions, estimates, lse, 64, 0.1).tolist() == [2, 3, 5, 9]
    assert pick(positions, estimates, lse, 64, 0.0).tolist() == [2, 3, 5, 8, 9]
    assert pick(positions, estimates, lse + 10, 64, 0.1).tolist() == []


def test_a_value_is_the_mean_over_the_groups_heads():
    estimates = np.log(np.array([[0.30, 0.16], [0.02, 0.18]]))
    assert pick(np.array([4, 6]), estimates, np.zeros(2), 1, 0.0).tolist() == [6]


def test_without_slots_nothing_is_picked():
    assert log_sum_exp(np.empty(0)) == -np.inf
    assert pick(np.array([1]), np.zeros((1, 1)), np.array([-np.inf]), 64, 0.0).tolist() == []


def test_reading_everything_equals_attention_over_all_keys():
    keys, queries = normal(8, 3 * PAGE, SIZE), normal(9, GROUP, SIZE)
    slots = [0, 5, *range(80, 96)]
    demoted = demoted_of(keys, [p for p in range(96) if p not in slots], np.arange(16))
    got = attend(queries, keys[slots], demoted.values[slots], demoted, scale=SCALE, everything=True)
    want = softmax((queries @ keys.T * SCALE).astype(np.float64)) @ demoted.values
    np.testing.assert_allclose(got.out, want, atol=1e-6)
    assert got.missing == 0


def test_a_needle_is_read_in_place_and_what_is_not_is_counted_as_missing():
    keys, queries = normal(10, 3 * PAGE, SIZE), normal(11, GROUP, SIZE)
    keys[37] = 2 * queries.mean(axis=0)
    slots = [0, *range(90, 96)]
    chosen = choose_channels(queries[None], keys, 16)
    demoted = demoted_of(keys, list(range(1, 90)), chosen)
    got = attend(queries, keys[slots], demoted.values[slots], demoted, scale=SCALE, max_picks=4)
    assert 37 in got.picks
    assert len(got.picks) == 4
    sums = got.slot_probabilities.sum(axis=1) + got.pick_probabilities.sum(axis=1)
    np.testing.assert_allclose(sums, 1)
    more = attend(queries, keys[slots], demoted.values[slots], demoted, scale=SCALE, max_picks=16)
    assert 0 < more.missing < got.missing < 1


def test_the_sketch_finds_most_of_the_mass_of_the_best():
    keys, queries = normal(12, 512, SIZE), normal(13, GROUP, SIZE)
    # As in a model, few channels carry most of the logits' variance.
    loud = np.arange(3, SIZE, 5)
    keys[:, loud] *= 4
    demoted = demoted_of(keys, list(range(512)), choose_channels(queries[None], keys, 16))
    exact = np.exp(SCALE * queries.astype(np.float64) @ keys.T).sum(axis=0)
    estimates = demoted.estimates(queries, SCALE)
    picks = pick(demoted.positions, estimates, np.array([log_sum_exp(row) for row in estimates]), 64, 0.0)
    assert exact[picks].sum() > 0.85 * np.sort(exact)[-64:].sum()
