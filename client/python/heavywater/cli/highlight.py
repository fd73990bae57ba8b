"""A text with its tokens highlighted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from heavywater.model import Model


def token_texts(model: Model, tokens: Sequence[int]) -> list[str]:
    """The text of each token by itself."""
    return [model.decode([token]) for token in tokens]


def highlighted(
    pieces: Sequence[str], style_of: Callable[[int], str], marks: Mapping[str, tuple[str, str]] | None = None
) -> Text:
    """Each piece in the style of its position; an empty style leaves it as it is. `marks`: by style, what stands
    before and after a stretch of it, for those who see no colours."""
    text = Text()
    before = ""
    for position, piece in enumerate(pieces):
        style = style_of(position)
        if marks and style != before:
            text.append(_between(before, style, marks))
            before = style
        text.append(piece, style=style)
    if marks:
        text.append(_between(before, "", marks))
    return text


def stretch(words: str, style: str, marks: Mapping[str, tuple[str, str]] | None) -> Text:
    """Words in one style, marked as the text's, for a legend."""
    return highlighted([words], lambda _: style, marks)


def marks_for(console: Console, marks: Mapping[str, tuple[str, str]]) -> Mapping[str, tuple[str, str]] | None:
    """`marks` where the console has no colours."""
    return marks if console.no_color or console.color_system is None else None


def _between(before: str, style: str, marks: Mapping[str, tuple[str, str]]) -> str:
    return marks.get(before, ("", ""))[1] + marks.get(style, ("", ""))[0]
