"""Which demoted tokens an answer has read in place, shown in the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from heavywater.cli.highlight import highlighted, marks_for, stretch, token_texts
from heavywater.generation import Token
from heavywater.model import Model

# Shares of the reads of the most read token: from each on this style.
STYLES = (
    (1 / 2, "white on #9d0208"),
    (1 / 4, "black on #f48c06"),
    (1 / 8, "black on #ffba08"),
    (0.0, "black on #fff3b0"),
)
_MARKS = {
    STYLES[0][1]: ("[[[", "]]]"),
    STYLES[1][1]: ("[[", "]]"),
    STYLES[2][1]: ("[", "]"),
    STYLES[3][1]: ("(", ")"),
}
_TOP = 10


def total_reads(tokens: Iterable[Token]) -> Counter[int]:
    """By position, over all steps: of each step the most read ones, as the server sends them."""
    totals: Counter[int] = Counter()
    for token in tokens:
        totals.update(dict(token.reads))
    return totals


def print_reads(console: Console, model: Model, given: str, suffix: str, reads: Counter[int]) -> None:
    """The prompt and what was appended to it, darker where it was read more often."""
    pieces = token_texts(model, [*model.encode(given), *(model.encode(suffix) if suffix else [])])
    most = max(reads.values(), default=0)
    console.print()
    marks = marks_for(console, _MARKS)
    console.print(highlighted(pieces, lambda position: _style(reads[position], most), marks))
    console.print(_legend(reads, len(pieces), marks))
    if reads:
        console.print(_table(reads, pieces))


def reads_json(reads: Counter[int]) -> list[list[int]]:
    """[position, count] each, the most read first."""
    return [[position, count] for position, count in _most_read(reads)]


def _most_read(reads: Counter[int]) -> list[tuple[int, int]]:
    return sorted(reads.items(), key=lambda one: (-one[1], one[0]))


def _style(count: int, most: int) -> str:
    return next(style for share, style in STYLES if count >= share * most) if count else ""


def _legend(reads: Counter[int], given_tokens: int, marks: Mapping[str, tuple[str, str]] | None) -> Text:
    if not reads:
        return Text("\nnothing was read in place", style="dim")
    legend = Text("\nread in place, of the most read token's reads: ")
    for (share, style), words in zip(STYLES, ("half or more", "a quarter", "an eighth", "less"), strict=True):
        legend.append(stretch(f" {words} ", style, marks))
        legend.append(" " if share else "")
    own = sum(count for position, count in reads.items() if position >= given_tokens)
    own_words = f", {own} of them of the answer itself" if own else ""
    legend.append(f"   ({len(reads)} tokens, {reads.total()} reads{own_words})", style="dim")
    return legend


def _table(reads: Counter[int], pieces: Sequence[str]) -> Table:
    table = Table("position", "token", "reads", title="most read")
    for position, count in _most_read(reads)[:_TOP]:
        piece = repr(pieces[position]) if position < len(pieces) else "(of the answer)"
        table.add_row(str(position), Text(piece), str(count))
    return table
