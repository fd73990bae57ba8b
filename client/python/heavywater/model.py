"""The served model: its tokenizer and chat template, as the server sends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jinja2
import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from heavywater.v1 import generation_pb2

_CONTROL = 3  # Piece.type, as in GGUF


@dataclass(frozen=True)
class Model:
    """Everything a client needs of the model; no model file."""

    info: generation_pb2.ModelInfo
    pieces: tuple[str, ...]  # by id, in the tokenizer's byte-level alphabet
    piece_types: tuple[int, ...]
    merges: tuple[str, ...]  # "left right", by rank

    @staticmethod
    def from_responses(responses: Iterable[generation_pb2.GetModelResponse]) -> Model:
        info = generation_pb2.ModelInfo()
        pieces: list[str] = []
        types: list[int] = []
        merges: list[str] = []
        for response in responses:
            if response.HasField("model"):
                info.CopyFrom(response.model)
            pieces += [piece.text.decode("utf-8") for piece in response.pieces]
            types += [piece.type for piece in response.pieces]
            merges += response.merges
        if len(pieces) != info.vocab_size:
            raise ValueError(f"the server sent {len(pieces)} pieces of a vocabulary of {info.vocab_size}")
        return Model(info, tuple(pieces), tuple(types), tuple(merges))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE. Raises ValueError for a tokenizer this client cannot build."""
        kind = (self.info.tokenizer_model, self.info.pre_tokenizer)
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind} is not supported, this client builds ('gpt2', 'smollm')")
        merges = [_pair(merge) for merge in self.merges]
        tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(self.pieces)}, merges=merges))
        # "smollm": every digit alone, then GPT-2's pattern over bytes.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = [p for p, kind in zip(self.pieces, self.piece_types, strict=True) if kind == _CONTROL]
        tokenizer.add_special_tokens([AddedToken(p, special=True, normalized=False) for p in control])
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; control tokens in it are recognised."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ([self.info.bos_token] if self.info.add_bos else []) + ids

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
