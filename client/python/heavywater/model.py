"""The served model: its tokenizer and chat template, as the server sends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from heavywater.tokenizer_builder import build_tokenizer
from heavywater.v1 import generation_pb2


@dataclass(frozen=True)
class Model:
    """Everything a client needs of the model; no model file."""

    info: generation_pb2.ModelInfo
    pieces: tuple[str, ...]  # by id, in the tokenizer's alphabet
    piece_types: tuple[int, ...]
    merges: tuple[str, ...]  # "left right", by rank
    piece_scores: tuple[float, ...] = ()  # of a SentencePiece model

    @staticmethod
    def from_responses(responses: Iterable[generation_pb2.GetModelResponse]) -> Model:
        info = generation_pb2.ModelInfo()
        pieces: list[str] = []
        types: list[int] = []
        scores: list[float] = []
        merges: list[str] = []
        for response in responses:
            if response.HasField("model"):
                info.CopyFrom(response.model)
            pieces += [piece.text.decode("utf-8") for piece in response.pieces]
            types += [piece.type for piece in response.pieces]
            scores += [piece.score for piece in response.pieces]
            merges += response.merges
        if len(pieces) != info.vocab_size:
            raise ValueError(f"the server sent {len(pieces)} pieces of a vocabulary of {info.vocab_size}")
        return Model(info, tuple(pieces), tuple(types), tuple(merges), tuple(scores))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The server's tokenizer. Raises ValueError for one this client cannot build."""
        merges = [_pair(merge) for merge in self.merges]
        return build_tokenizer(self.info, self.pieces, self.piece_types, self.piece_scores, merges)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; control tokens in it are recognised."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        begins = self.info.add_bos and ids[:1] != [self.info.bos_token]
        return ([self.info.bos_token] if begins else []) + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for a conversation ({"role", "content"} each), ready for the answer."""
        if not self.info.chat_template:
            raise ValueError(f"model {self.info.name} has no chat template")
        # The template is the server's: rendered in a sandbox.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        return environment.from_string(self.info.chat_template).render(
            messages=list(messages),
            add_generation_prompt=True,
            bos_token=self._piece(self.info.bos_token),
            eos_token=self._piece(self.info.eos_token),
        )

    def _piece(self, token: int) -> str:
        return self.pieces[token] if 0 <= token < len(self.pieces) else ""


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ValueError(f"merge {merge!r} is not 'left right'")
    return left, right


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
