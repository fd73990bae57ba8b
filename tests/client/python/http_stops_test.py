"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import random

import pytest
from heavywater.http.stops import StopMatcher


def fed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What comes out, piece by piece and at the end, and whether a stop string did it."""
    matcher = StopMatcher(stops)
    out = [matcher.feed(piece) for piece in pieces]
    return [*out, matcher.rest()], matcher.stopped


def test_text_without_stop_strings_passes_at_once() -> None:
    assert fed([], ["a", "bc"]) == (["a", "bc", ""], False)


def test_a_stop_string_over_several_pieces_ends_the_text_before_it() -> None:
    assert fed(["END"], ["abE", "N", "D and more", "x"]) == (["ab", "", "", "", ""], True)


def test_what_only_began_like_a_stop_string_comes_out_late() -> None:
    assert fed(["END"], ["abE", "N", "x"]) == (["ab", "", "ENx", ""], False)


def test_what_is_held_back_at_the_end_comes_out() -> None:
    assert fed(["END"], ["abEN"]) == (["ab", "EN"], False)


def test_the_first_of_several_stop_strings_counts() -> None:
    assert fed(["z", "bc"], ["abcz"]) == (["a", ""], True)


def test_a_beginning_within_a_beginning_is_not_missed() -> None:
    assert fed(["aab"], ["a", "a", "a", "b", "c"]) == (["", "", "a", "", "", ""], True)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_size_give_the_text_before_the_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(200))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(6, 9))) for _ in range(2)]
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    found = [text.find(stop) for stop in stops if stop in text]
    out, stopped = fed(stops, pieces)
    assert "".join(out) == (text[: min(found)] if found else text)
    assert stopped == bool(found)
