"""The byte-level BPE tokenizer of a GGUF file, through the `tokenizers` library.

Pre-tokenizer "smollm": every digit alone, then GPT-2's byte-level pattern. No
beginning-of-sequence token is added. Control tokens are recognised in text.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type


def load_tokenizer(gguf_path: Path) -> Tokenizer:
    """Builds the tokenizer; `encode(text).ids` and `decode(ids)` are its interface."""
    fields = GGUFReader(gguf_path).fields

    def field(name: str):
        return fields[f"tokenizer.ggml.{name}"].contents()

    kind = (field("model"), field("pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer is {kind}, want ('gpt2', 'smollm')")
    tokens = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, field("token_type"), strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, nothing added."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def chat_prompt(user: str) -> str:
    """The model's chat template for one user message, ready for the answer."""
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )
