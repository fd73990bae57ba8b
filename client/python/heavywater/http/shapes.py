"""The objects of OpenAI's API that answers are given in."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from heavywater.http.answer import Piece
from heavywater.http.asked import Asked
from heavywater.http.logprobs import Drawn, of_chat, of_completion
from heavywater.model import Model
from heavywater.version import __version__


@dataclass
class Shape:
    """Of one answer to one request: what all its objects have in common."""

    asked: Asked
    served: Model
    model: str  # the name it was asked for by
    created_s: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _offsets: dict[int, int] = field(default_factory=dict)  # by choice: characters whose tokens were given out

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """The answer in one object."""
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        choices = [
            self._whole_choice(index, [piece for piece in pieces if piece.choice == index])
            for index in range(self.asked.num_choices)
        ]
        return {**self._heading(kind), "choices": choices, "usage": self.usage(pieces)}

    def opening(self) -> list[dict[str, object]]:
        """What a chat's stream begins with: the role of each answer."""
        if not self.asked.is_chat:
            return []
        return [
            self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            for index in range(self.asked.num_choices)
        ]

    def chunks(self, piece: Piece) -> list[dict[str, object]]:
        """A piece of a stream."""
        return [self._chunk_of(piece)]

    @property
    def farewell(self) -> str:
        """What a stream ends with that has ended well."""
        return "data: [DONE]\n\n"

    def _chunk_of(self, piece: Piece) -> dict[str, object]:
        choice: dict[str, object] = {"index": piece.choice, "finish_reason": piece.finish_reason}
        if self.asked.is_chat:
            choice["delta"] = {"content": piece.text} if piece.text else {}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(piece.choice, piece.tokens)
        if piece.figures is not None:
            choice["heavywater"] = piece.figures
        # A client that asked for the count finds the field in every chunk, as at OpenAI.
        return self._chunk(choice) | ({"usage": None} if self.asked.include_usage else {})

    def usage_chunk(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """The last of a stream that was asked to count."""
        return {**self._chunk(), "usage": self.usage(pieces)}

    def usage(self, pieces: Sequence[Piece]) -> dict[str, object]:
        """A prompt counts once, however many answers it gets."""
        last = [piece for piece in pieces if piece.finish_reason is not None]
        first = [piece for piece in last if piece.choice % self.asked.n == 0]
        prompt_tokens = sum(piece.prompt_tokens for piece in first)
        new_tokens = sum(piece.new_tokens for piece in last)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(piece.cached_tokens for piece in first)},
        }

    def _heading(self, kind: str) -> dict[str, object]:
        return {
            "id": f"{'chatcmpl' if self.asked.is_chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": f"heavywater-{__version__}",
        }

    def _chunk(self, *choices: dict[str, object]) -> dict[str, object]:
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return {**self._heading(kind), "choices": list(choices)}

    def _whole_choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, object]:
        text = "".join(piece.text for piece in pieces)
        choice: dict[str, object] = {
            "index": index,
            "finish_reason": pieces[-1].finish_reason,
            "logprobs": self._logprobs(index, [token for piece in pieces for token in piece.tokens]),
            "heavywater": pieces[-1].figures,
        }
        if self.asked.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return choice

    def _logprobs(self, choice: int, tokens: Sequence[Drawn]) -> dict[str, object] | None:
        """At temperature 1; in a stream, of this piece's tokens."""
        if not self.asked.logprobs:
            return None
        if self.asked.is_chat:
            return of_chat(tokens, self.served.decode)
        logprobs, self._offsets[choice] = of_completion(tokens, self.served.decode, self._offsets.get(choice, 0))
        return logprobs
