"""Text as it streams, and the line of figures below it."""

from __future__ import annotations

import io

import pytest
from heavywater import Token
from heavywater.cli.live import Figures, LiveText
from heavywater.v1 import common_pb2
from rich.console import Console


def make_token(text: str, *, seen: int = 100, device_bytes: int = 0) -> Token:
    counts = common_pb2.SequenceCounts(tokens_seen=seen, tokens_resident=20)
    return Token(0, 0, text, 0.0, None, counts, device_bytes, host_bytes=3 << 20)


def stream(pieces: list[str], *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=20, color_system=None)
    with LiveText(console) as live:
        for piece in pieces:
            live.show(make_token(piece))
    return console.file.getvalue()


def test_elsewhere_than_on_a_terminal_the_text_is_written_as_it_is() -> None:
    text = "one [bold]two\nthree " + "x" * 50
    assert stream([text[:7], text[7:]], terminal=False) == text + "\n"


def test_on_a_terminal_words_are_kept_whole_in_long_paragraphs() -> None:
    shown = stream(["seven words ", "that are wider ", "than a row"], terminal=True)
    for row in ("seven words that are", "wider than a row"):
        assert row in shown


def test_the_line_tells_speed_residents_and_bytes() -> None:
    figures = Figures(started_s=0.0, full_bytes_per_token=1 << 20)
    figures.update(make_token("a", seen=100, device_bytes=20 << 20))
    line = figures.line()
    for part in ("resident 20 of 100 seen", "20.0 MiB of the full cache's 100.0 MiB (20%)", "host 3.0 MiB"):
        assert part in line


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_the_line_is_one_line_however_narrow_the_screen(width: int) -> None:
    figures = Figures(started_s=0.0, sequence_id=1883251548346496, full_bytes_per_token=1 << 20)
    figures.update(make_token("a", seen=12345, device_bytes=2000 << 20))
    line = figures.line(width)
    assert len(line) <= width
    assert "resident 20 of 12345" in line
    assert ("sequence" in line) == (width >= 160)


def test_before_the_first_token_the_line_says_that_the_prompt_is_read() -> None:
    assert Figures(started_s=0.0).line().startswith("reading the prompt")


@pytest.mark.parametrize("tokens", [0, 1])
def test_speed_needs_two_tokens(tokens: int) -> None:
    figures = Figures(started_s=0.0)
    for _ in range(tokens):
        figures.update(make_token("a"))
    assert figures.tokens_per_s == 0
