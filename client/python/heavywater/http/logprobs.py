"""Log-probabilities as OpenAI's API has them: of each token that was drawn, and of the likeliest in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from heavywater.generation import Token

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Drawn:
    """A token, and what might have come instead: ids and log-probabilities at temperature 1, the likeliest first."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def drawn(token: Token, likeliest: int) -> Drawn:
    """Of a token that came with its logits, where any are wanted; they are not kept."""
    if not likeliest or token.logits is None:
        return Drawn(token.token, token.logprob)
    logits = token.logits.astype(np.float64)
    logprobs = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    top = np.argpartition(-logprobs, min(likeliest, logprobs.size) - 1)[:likeliest]
    ordered = sorted(top.tolist(), key=lambda index: (-logprobs[index], index))
    return Drawn(token.token, token.logprob, tuple((index, float(logprobs[index])) for index in ordered))


def of_chat(tokens: Sequence[Drawn], decode: Decode) -> dict[str, object]:
    """A chat's `logprobs`."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        text = decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.likeliest]}
            for one in tokens
        ]
    }


def of_completion(tokens: Sequence[Drawn], decode: Decode, offset: int) -> tuple[dict[str, object], int]:
    """A completion's `logprobs`, whose first token begins at character `offset`; and where the next one does."""
    texts = [decode([one.token]) for one in tokens]
    offsets = list(accumulate(map(len, texts), initial=offset))
    # Ids whose texts are the same (halves of a character) are one here: the likeliest.
    tops = [{decode([token]): logprob for token, logprob in reversed(one.likeliest)} for one in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets[:-1],
    }, offsets[-1]
