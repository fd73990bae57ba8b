"""The figures of `heavywater eval hypothesis`, on attention that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from heavywater.eval.hypothesis import class_shares, heavy_sets, mass_of_top, mean_figures, overlap, persistence
from heavywater.eval.token_class import token_classes


def sums(*values: float) -> np.ndarray:
    """One layer, one KV head."""
    return np.array(values, np.float64).reshape(1, 1, -1)


def test_the_mass_of_the_top_is_what_the_heaviest_positions_hold() -> None:
    assert mass_of_top(sums(1, 5, 1, 3, 0, 0, 0, 0, 0, 0), 0.2)[0, 0] == pytest.approx(0.8)
    assert mass_of_top(sums(1, 1, 1, 1, 1), 0.2)[0, 0] == pytest.approx(0.2)


def test_heavy_positions_are_those_of_their_own_set_and_ties_go_to_the_lower_one() -> None:
    both = np.stack([sums(0, 9, 1, 1, 1)[0, 0], sums(2, 2, 2, 2, 2)[0, 0]])[None]
    assert heavy_sets(both).tolist() == [[[False, True, False, False, False], [True, False, False, False, False]]]


def test_overlap_looks_at_the_same_positions_only() -> None:
    before = sums(9, 8, 0, 0, 0, 0, 0, 0, 0, 0)
    after = sums(9, 0, 0, 0, 0, 0, 0, 0, 0, 1, 99, 99)  # two positions that came later
    assert overlap(before, after) == 0.5
    assert overlap(before, before) == 1


def test_persistence_is_of_what_is_pivotal_now() -> None:
    persists, at_random = persistence(sums(1, 0, 2, 0), sums(3, 3, 0, 0, 7))
    assert persists == 0.5  # of positions 0 and 1; the fifth did not exist
    assert at_random == 0.5


def test_classes_are_told_by_text_and_place() -> None:
    texts = ["The", " cat", ",", " sat", " on", " mat", "tress", " 12", ".", "\n", '"']
    assert token_classes(texts)[4:] == [
        "function word",
        "content word",
        "word part",
        "number",
        "punctuation",
        "line break",
        "punctuation",
    ]
    assert token_classes(texts)[:4] == ["first"] * 4


def test_a_class_is_compared_with_its_share_of_the_text() -> None:
    classes = ["punctuation", "content word", "content word", "content word", "content word"]
    shares = class_shares(sums(6, 1, 1, 1, 1), classes)
    assert shares["punctuation"] == {"of_heavy": 1.0, "of_text": 0.2, "of_mass": 0.6}
    assert shares["content word"]["of_heavy"] == 0


def test_figures_of_passages_are_averaged_number_by_number() -> None:
    passages = [{"mass": {"0.2": 0.5}, "curve": [[0.0, 1.0]]}, {"mass": {"0.2": 0.7}, "curve": [[1.0, 1.0]]}]
    assert mean_figures(passages) == {"mass": {"0.2": pytest.approx(0.6)}, "curve": [[0.5, 1.0]]}
