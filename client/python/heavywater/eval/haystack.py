"""Questions about one sentence that is hidden in a long text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from heavywater.model import Model
from heavywater.question import split_chat

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CODE_DIGITS = 5
_ATTEMPTS = 1000
_NAMES = (
    "library garden harbour castle bakery museum orchard theatre station chapel lighthouse brewery "
    "vineyard windmill stable foundry monastery observatory fountain tavern bridge market tower mill"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Needle:
    """One text with one hidden sentence, and the question about it. Token ids."""

    seed: int
    name: str
    code: str  # the digits that are asked for
    depth: float  # of the text that lies before the sentence
    context: list[int]  # the conversation up to the question
    question: list[int]  # the question, and how the answer begins
    positions: range  # of the hidden sentence, within context

    @property
    def label(self) -> str:
        return f"seed {self.seed}, {self.name} at {self.depth:.0%}"


def split_sentences(text: str) -> list[str]:
    """The text's sentences, each on one line."""
    return [" ".join(sentence.split()) for sentence in _SENTENCE_END.split(text) if sentence.strip()]


def make_needles(model: Model, text: str, seed: int, variants: int, tokens: int) -> list[Needle]:
    """`variants` at each depth, in about `tokens` tokens of the text. Raises ValueError when it is too short."""
    sentences = split_sentences(text)
    sizes = [len(model.encode(sentence)) for sentence in sentences]
    if sum(sizes) < 2 * tokens:
        raise ValueError(f"the text has {sum(sizes)} tokens, want at least {2 * tokens}, twice --tokens")
    rng = random.Random(seed)
    needles = []
    for variant in range(variants * len(DEPTHS)):
        filler = _excerpt(rng, sentences, sizes, tokens)
        name = rng.choice(_NAMES.split())
        code = str(rng.randrange(10 ** (CODE_DIGITS - 1), 10**CODE_DIGITS))
        needles.append(_make_needle(model, filler, seed, name, code, DEPTHS[variant % len(DEPTHS)]))
    return needles


def _excerpt(rng: random.Random, sentences: Sequence[str], sizes: Sequence[int], tokens: int) -> list[str]:
    """Whole sentences in order, from a random one on; at most `tokens` tokens."""
    if min(sizes) > tokens:
        raise ValueError(f"no sentence of the text has {tokens} tokens or fewer: it needs stops, or a larger --tokens")
    for _ in range(_ATTEMPTS):
        first = end = rng.randrange(len(sentences))
        total = 0
        while end < len(sentences) and total + sizes[end] <= tokens:
            total += sizes[end]
            end += 1
        if end < len(sentences) and end > first:
            return list(sentences[first:end])
    raise ValueError(f"found no {tokens} tokens of whole sentences in the text in {_ATTEMPTS} attempts")


def _make_needle(model: Model, filler: list[str], seed: int, name: str, code: str, depth: float) -> Needle:
    opening = f"The secret code of the {name} is "
    sentence = f"{opening}{code}."
    at = _sentence_at(filler, depth)
    document = " ".join([*filler[:at], sentence, *filler[at:]])
    question = f"What is the secret code of the {name}?"
    context, suffix = split_chat(model, [{"role": "user", "content": document}], question)
    encoded = model.tokenizer.encode(context, add_special_tokens=False)
    begin = context.index(sentence)
    inside = [i for i, (a, b) in enumerate(encoded.offsets) if a < begin + len(sentence) and b > begin]
    bos = len(model.encode(""))
    return Needle(
        seed=seed,
        name=name,
        code=code,
        depth=depth,
        context=model.encode(context),
        question=model.tokenizer.encode(suffix + opening, add_special_tokens=False).ids,
        positions=range(bos + inside[0], bos + inside[-1] + 1),
    )


def _sentence_at(filler: list[str], depth: float) -> int:
    """Before which sentence `depth` of the text's characters have passed."""
    wanted, passed = depth * sum(map(len, filler)), 0
    for index, sentence in enumerate(filler):
        if passed + len(sentence) / 2 >= wanted:
            return index
        passed += len(sentence)
    return len(filler)
