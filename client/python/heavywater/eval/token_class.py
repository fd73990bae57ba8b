"""What kind of token a piece of text is."""

from __future__ import annotations

from collections.abc import Sequence

CLASSES = ("first", "punctuation", "line break", "function word", "content word", "word part", "number")
_FIRST = 4
_WORDS = """
a about after all also am an and any are as at be because been before being but by can could did do
does down each for from had has have having he her here hers him his how i if in into is it its just
may me might more most must my no nor not now of off on once only or other our out over own said
same shall she should so some such than that the their them then there these they this those through
to too under until up upon us very was we were what when where which while who whom whose why will
with would yet you your yours
"""
_FUNCTION_WORDS = frozenset(_WORDS.split())


def token_classes(texts: Sequence[str]) -> list[str]:
    """The class of each token, from its text (with its leading space) and its place: the first four are `first`."""
    return ["first" if index < _FIRST else _class_of(text) for index, text in enumerate(texts)]


def _class_of(text: str) -> str:
    word = text.strip()
    if not word:
        return "line break" if "\n" in text else "punctuation"
    if word.isdigit():
        return "number"
    if not any(character.isalpha() for character in word):
        return "punctuation"
    if word.lower() in _FUNCTION_WORDS:
        return "function word"
    return "content word" if text[:1].isspace() else "word part"
