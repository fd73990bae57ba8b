"""Questions that are made from a text, and who answers them: `heavywater eval qa`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from heavywater.eval.book_questions import TAIL, make_questions
from heavywater.eval.qa import QaEvaluation
from heavywater.eval.rows import Row

NAMES = ("Anna", "Boris", "Clara", "Dmitri", "Edith", "Fedor", "Greta", "Henry")


class WordModel:
    """Every word is a token; what the questions need of a Model."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(ids=self.encode(text)))
        self.info = SimpleNamespace(name="words")

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        words = list(self._ids)
        return " ".join(words[i] for i in ids)

    def chat(self, messages: list[dict[str, str]]) -> str:
        return f"user {messages[-1]['content']} assistant "


def story() -> str:
    """Sentences of twelve words, each with a name in the tenth place."""
    return " ".join(
        f"Then w{i} came by the old grey mill where nobody{i} met {NAMES[i % len(NAMES)]} again." for i in range(200)
    )


def questions(per_document: int = 4) -> tuple[WordModel, list[Any]]:
    model = WordModel()
    return model, make_questions(model, story(), 2, per_document, 600)  # type: ignore[arg-type]


def test_the_answer_is_the_name_that_follows_the_quotation_in_the_text() -> None:
    model, made = questions()
    assert len(made) == 8
    for one in made:
        context, asked = model.decode(one.context), model.decode(one.question)
        quotation = asked.split("assistant ")[1]
        assert context.count(quotation) == 1
        assert context.split(quotation)[1].split()[0] == one.answer
        assert one.answer in NAMES
        assert one.answer_tokens == 1


def test_no_two_answers_of_a_document_are_alike_and_none_lies_in_its_last_tokens() -> None:
    model, made = questions()
    for document in (0, 1):
        of_document = [one for one in made if one.document == document]
        assert len({one.answer for one in of_document}) == 4
        for one in of_document:
            quotation = model.decode(one.question).split("assistant ")[1]
            after = model.decode(one.context).split(quotation)[1]
            assert len(after.split()) >= TAIL - 20


def test_documents_share_no_sentence_and_the_set_is_the_same_every_time() -> None:
    _, made = questions()
    first, second = ({tuple(one.context) for one in made if one.document == d} for d in (0, 1))
    assert len(first) == len(second) == 1 and first != second
    assert [one.answer for one in questions()[1]] == [one.answer for one in made]


def test_a_name_that_can_be_guessed_is_not_asked_for() -> None:
    heroine = story().replace("Edith", "Anna").replace("Fedor", "Anna")
    made = make_questions(WordModel(), heroine, 2, 4, 600)  # type: ignore[arg-type]
    assert made
    assert all(one.answer != "Anna" for one in made)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the text has \d documents of 600 tokens, want 9"):
        make_questions(WordModel(), story(), 9, 1, 600)  # type: ignore[arg-type]


class FakeGeneration:
    def __init__(self, text: str, device_bytes: int) -> None:
        self._text = text
        self.sequence_id = 1
        self.summary = SimpleNamespace(
            device_bytes_peak=device_bytes, full_cache_bytes=100, HasField=lambda name: False, counts=None
        )

    def __enter__(self) -> FakeGeneration:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def text(self) -> str:
        return self._text


class FakeClient:
    """Knows the answers under `full` only; remembers what it was asked."""

    has_cache = False

    def __init__(self, made: list[Any]) -> None:
        self._answers = {tuple(one.question): one.answer for one in made}
        self.prompts: list[tuple[list[int], tuple[int, ...]]] = []

    def generate(self, prompt: list[int], *, suffix: tuple[int, ...], policy: Any, **_: Any) -> FakeGeneration:
        self.prompts.append((prompt, tuple(suffix)))
        asked = tuple(suffix) or next(key for key in self._answers if tuple(prompt[-len(key) :]) == key)
        full = policy.policy == "full"
        return FakeGeneration(" " + (self._answers[asked] if full else "Nobody"), 100 if full else 20)


@pytest.mark.parametrize("after", [False, True])
def test_a_score_is_the_share_of_right_names_and_bytes_are_measured(after: bool) -> None:
    _, made = questions()
    client = FakeClient(made)
    evaluation = QaEvaluation(client, made, question_after=after, parallel=2)  # type: ignore[arg-type]
    full = evaluation.run(Row("full"))
    assert (full.right, full.total, full.score, full.bytes_ratio) == (8, 8, 1.0, 1.0)
    other = evaluation.run(Row("h2o", "kv_head", 0.2))
    assert (other.right, other.bytes_ratio) == (0, 0.2)
    assert all(bool(suffix) == after for _, suffix in client.prompts)
