"""A text with its tokens highlighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from heavywater.model import Model


def token_texts(model: Model, tokens: Sequence[int]) -> list[str]:
    """The text of each token by itself."""
    return [model.decode([token]) for token in tokens]


def highlighted(pieces: Sequence[str], style_of: Callable[[int], str]) -> Text:
    """Each piece in the style of its position; an empty style leaves it as it is."""
    text = Text()
    for position, piece in enumerate(pieces):
        text.append(piece, style=style_of(position))
    return text
