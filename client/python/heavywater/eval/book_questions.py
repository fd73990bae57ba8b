"""Questions about long texts, made from a novel: which name stands at this place?

A document is some 1500 tokens of whole sentences in order. A question asks to continue a
sentence of it, which is given up to a name; the answer is the name, which the document
alone can tell. Made by rule, so that anybody gets the same set:

1. Split the text into sentences; cut documents one after the other, so that no two share a
   sentence.
2. A name is a capitalised word of three letters or more that never occurs in lower case in
   the whole text, and does not begin a sentence; and not one that is more than `COMMON` of
   all names in it: the heroine's can be guessed.
3. A question is a sentence with a name after its eighth word whose words before the name
   occur once in the document. Not from the last `TAIL` tokens: those a policy keeps
   as recent, whatever it does.
4. Of a document's questions, the ones nearest to equal distances in it; at most
   `per_document`, no two with the same answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from heavywater.eval.haystack import split_sentences
from heavywater.model import Model
from heavywater.question import split_chat

TAIL = 200  # tokens
COMMON = 0.15
_MIN_WORDS = 8  # of a quotation
_QUOTED_WORDS = 14  # its last ones, at most
# The quotation stands in the answer alone: after one in the question a model would copy
# what follows it there.
_WORDING = "Continue this sentence of the text, word for word."
_NAME = re.compile(r"[A-Z][a-z]{2,}")
_TITLES = ("Mr", "Mrs", "Miss")


@dataclass(frozen=True)
class Question:
    """One question about one document. Token ids."""

    document: int
    depth: float  # of the document's text that lies before the answer
    context: list[int]  # the conversation up to the question
    question: list[int]  # the question, and the quotation as the answer's beginning
    answer: str  # the name
    answer_tokens: int


def make_questions(model: Model, text: str, documents: int, per_document: int, tokens: int) -> list[Question]:
    """Raises ValueError when the text does not have as many documents."""
    sentences = split_sentences(text)
    names = _names(sentences)
    questions: list[Question] = []
    cut = _documents(model, sentences, tokens)
    for index in range(documents):
        document = next(cut, None)
        if document is None:
            raise ValueError(f"the text has {index} documents of {tokens} tokens, want {documents}")
        found = _places(model, document, names)
        for place in _spread(found, per_document):
            questions.append(_question(model, index, document, place))
    return questions


@dataclass(frozen=True)
class _Place:
    """A name in a document, and the words before it."""

    depth: float
    quotation: str
    name: str


def _names(sentences: Sequence[str]) -> frozenset[str]:
    lower = {word for sentence in sentences for word in re.findall(r"[a-z]+", sentence)}
    capitalised = {
        word for sentence in sentences for word in _NAME.findall(sentence.partition(" ")[2]) if word not in _TITLES
    }
    counts = Counter(
        word
        for sentence in sentences
        for word in _NAME.findall(sentence)
        if word in capitalised and word.lower() not in lower
    )
    return frozenset(name for name, count in counts.items() if count <= COMMON * counts.total())


def _documents(model: Model, sentences: Sequence[str], tokens: int) -> Iterator[list[str]]:
    document: list[str] = []
    size = 0
    for sentence in sentences:
        length = len(model.encode(sentence))
        if size + length > tokens and document:
            yield document
            document, size = [], 0
        document.append(sentence)
        size += length


def _places(model: Model, document: Sequence[str], names: frozenset[str]) -> list[_Place]:
    text = " ".join(document)
    end = len(text) - len(model.decode(model.encode(text)[-TAIL:]))
    places: list[_Place] = []
    begin = 0
    for sentence in document:
        words = sentence.split(" ")
        for index in range(_MIN_WORDS, len(words)):
            match = _NAME.match(words[index])
            quotation = " ".join(words[max(0, index - _QUOTED_WORDS) : index])
            at = begin + len(" ".join(words[:index]))
            if match and match.group() in names and text.count(quotation) == 1 and at < end:
                places.append(_Place(at / len(text), quotation, match.group()))
        begin += len(sentence) + 1
    return places


def _spread(places: Sequence[_Place], count: int) -> list[_Place]:
    """At most `count`, near to equal distances, no two with the same answer."""
    left = list(places)
    chosen: list[_Place] = []
    for index in range(count):
        if not left:
            break
        wanted = (index + 0.5) / count
        best = min(left, key=lambda place: abs(place.depth - wanted))
        chosen.append(best)
        left = [place for place in left if place.name != best.name]
    return chosen


def _question(model: Model, index: int, document: Sequence[str], place: _Place) -> Question:
    context, suffix = split_chat(model, [{"role": "user", "content": " ".join(document)}], _WORDING)
    answer = model.tokenizer.encode(" " + place.name, add_special_tokens=False).ids
    return Question(
        document=index,
        depth=place.depth,
        context=model.encode(context),
        question=model.tokenizer.encode(suffix + place.quotation, add_special_tokens=False).ids,
        answer=place.name,
        answer_tokens=len(answer),
    )
