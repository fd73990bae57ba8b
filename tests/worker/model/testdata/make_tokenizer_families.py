"""Writes tokenizer_families.json: small tokenizers of each family, and the ids that their own libraries give.

    python make_tokenizer_families.py tokenizer_families.json

They are trained on the texts of make_tokenizer_cases.py, which are also what is encoded. Families "llama-bpe",
"qwen2", "llama2" and "mistral" are a tokenizer.json each (`tokenizers`); "sentencepiece" is pieces, scores and types
as GGUF has them (`sentencepiece`). Needs both packages, and gguf.
"""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import sentencepiece
from make_tokenizer_cases import TEXTS, random_text
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"
_MORE_TEXTS = [
    "IT'S We'Re THEY'LL I'D i'Ve I'M CAN'T '\u017f 'x' ''s",
    "a\r\nb\r\n\r\n  c \n \n d\t\n",
    "  \n  x\n\n\n",
    "12345678901 a1234b 1 22 333 4444 \u0663\u0664\u0665\u0666",
    "...\n\n?!\r\nx ...\n",
    "\u212b A\u030a \u1e9b\u0323 e\u0301 \ufb01 \uac00 \u1100\u1161",
    "<think>why</think> <think >",
    "[INST] Hi [/INST]</s><s> <s>x</s>y",
    "<0x41> <unk> \u2581x \u2581 y",
]


def texts() -> list[str]:
    source = random.Random(2)
    return TEXTS + _MORE_TEXTS + [random_text(source) for _ in range(80)]


def byte_level(digits: str, special: list[str], plain: list[str], first: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=first is not None))
    tokenizer.normalizer = None if first else normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_PATTERN % digits), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=460, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS + _MORE_TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.decoder = decoders.ByteLevel()
    if first:
        template = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def character_level(metaspace: bool) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    trainer = trainers.BpeTrainer(vocab_size=260, min_frequency=2, limit_alphabet=90, show_progress=False)
    trained.train_from_iterator(TEXTS + _MORE_TEXTS, trainer)
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {name: index for index, name in enumerate(names)}
    for token in sorted(learnt["vocab"], key=learnt["vocab"].get):
        vocabulary.setdefault(token, len(vocabulary))
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = trained.normalizer
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def family(tokenizer: Tokenizer) -> dict[str, Any]:
    cases = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in texts()]
    prompt = tokenizer.encode("A prompt.", add_special_tokens=True).ids
    return {"tokenizer": json.loads(tokenizer.to_str()), "cases": cases, "prompt": prompt}


def sentencepiece_family() -> dict[str, Any]:
    model = io.BytesIO()
    sentences = [line for text in TEXTS + _MORE_TEXTS for line in text.split("\n") if line and "\0" not in line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=True,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = processor.vocab_size()

    def type_of(index: int) -> int:
        if processor.is_unknown(index):
            return 2
        if processor.is_control(index):
            return 3
        return 6 if processor.is_byte(index) else 1

    # A NUL ends a text in this library's interface.
    cases = [{"text": text, "ids": processor.encode(text)} for text in texts() if "\0" not in text]
    return {
        "pieces": [processor.id_to_piece(index) for index in range(size)],
        "scores": [processor.get_score(index) for index in range(size)],
        "types": [type_of(index) for index in range(size)],
        "cases": cases,
    }


def main() -> None:
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    families = {
        "llama-bpe": family(byte_level("{1,3}", specials, [], "<|begin_of_text|>")),
        "qwen2": family(byte_level("", specials[3:], ["<think>", "</think>"], None)),
        "llama2": family(character_level(metaspace=False)),
        "mistral": family(character_level(metaspace=True)),
        "sentencepiece": sentencepiece_family(),
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in families.items())
    Path(sys.argv[1]).write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
