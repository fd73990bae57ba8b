"""How reads look in the text."""

from __future__ import annotations

import io
from collections import Counter

from heavywater.cli.reads import STYLES, print_reads, reads_json, total_reads
from heavywater.client import Client
from heavywater.generation import Token
from heavywater.v1 import common_pb2
from rich.color import Color
from rich.console import Console


def token(*reads: tuple[int, int]) -> Token:
    return Token(0, 0, "", 0.0, None, common_pb2.SequenceCounts(), 0, 0, reads)


def printed(client: Client, text: str, suffix: str, reads: dict[int, int]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=200)
    print_reads(console, client.get_model(), text, suffix, Counter(reads))
    return out.getvalue()


def ansi_background(style: str) -> str:
    return ";".join(Color.parse(style.split()[-1]).get_ansi_codes(foreground=False))


def test_reads_of_all_steps_are_added_up() -> None:
    totals = total_reads([token(), token((7, 3), (2, 1)), token((2, 2), (9, 4))])
    assert reads_json(totals) == [[9, 4], [2, 3], [7, 3]]


def test_tokens_that_were_read_more_often_are_darker_and_others_plain(client: Client) -> None:
    shown = printed(client, "cdefg", "xy", {0: 16, 1: 8, 2: 7, 3: 3, 4: 1, 6: 16}).split("\n")[1]
    half, quarter, eighth, less = (ansi_background(style) for _, style in STYLES)
    pieces = [piece for piece in shown.split("\x1b[") if "m" in piece]
    colours = {piece.split("m")[1]: piece for piece in pieces if piece.split("m")[1]}
    for letter, background in zip("cdefgy", (half, half, quarter, eighth, less, half), strict=True):
        assert background in colours[letter], letter
    assert "\x1b[0mx" in shown


def test_without_colours_there_are_marks(client: Client) -> None:
    out = io.StringIO()
    reads = Counter({0: 16, 1: 8, 2: 7, 3: 3, 4: 1, 6: 16})
    print_reads(Console(file=out, width=200), client.get_model(), "cdefg", "xy", reads)
    lines = out.getvalue().splitlines()
    assert lines[1] == "[[[cd]]][[e]][f](g)x[[[y]]]"
    assert "[[[ half or more ]]]" in lines[3]


def test_reads_of_the_answer_itself_are_counted_apart(client: Client) -> None:
    said = " ".join(printed(client, "cd", "", {0: 5, 2: 3}).split())
    assert "2 tokens, 8 reads, 3 of them of the answer itself" in said
    assert "(of the answer)" in said


def test_that_nothing_was_read_is_said(client: Client) -> None:
    assert "nothing was read in place" in printed(client, "cd", "", {})
