"""Tokenizers built from what a server sends give the ids of the tokenizers they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from heavywater import Model
from heavywater.v1 import generation_pb2

_FAMILIES = Path(__file__).resolve().parents[2] / "worker/model/testdata/tokenizer_families.json"


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    families: dict[str, Any] = json.loads(_FAMILIES.read_text())
    return families


def from_tokenizer_json(family: dict[str, Any], **info: Any) -> Model:
    """As the server reads it: byte pieces and added tokens by their types."""
    tokenizer = family["tokenizer"]
    ids = dict(tokenizer["model"]["vocab"])
    types = {token: 6 if token.startswith("<0x") else 1 for token in ids}
    for added in tokenizer["added_tokens"]:
        ids[added["content"]] = added["id"]
        types[added["content"]] = 3 if added["special"] else 4
    pieces = sorted(ids, key=lambda token: int(ids[token]))
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"])
    return Model(
        generation_pb2.ModelInfo(**{"unknown_token": -1} | info),
        tuple(pieces),
        tuple(types[piece] for piece in pieces),
        merges,
    )


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("llama-bpe", {"tokenizer_model": "gpt2", "pre_tokenizer": "llama-bpe"}),
        ("qwen2", {"tokenizer_model": "gpt2", "pre_tokenizer": "qwen2"}),
        ("llama2", {"tokenizer_model": "llama", "space_prefix": "every_segment", "unknown_token": 0}),
        ("mistral", {"tokenizer_model": "llama", "space_prefix": "start_but_spaces", "unknown_token": 0}),
    ],
)
def test_ids_are_those_of_the_family(families: dict[str, Any], name: str, info: dict[str, Any]) -> None:
    model = from_tokenizer_json(families[name], **info)
    for case in families[name]["cases"]:
        assert model.encode(case["text"]) == case["ids"], case["text"]


def test_scores_of_sentencepiece_stand_for_merges(families: dict[str, Any]) -> None:
    family = families["sentencepiece"]
    info = generation_pb2.ModelInfo(tokenizer_model="llama", space_prefix="every_segment", unknown_token=0)
    # Control pieces are not recognised in text there.
    types = tuple(1 if kind == 3 else kind for kind in family["types"])
    model = Model(info, tuple(family["pieces"]), types, (), tuple(family["scores"]))
    for case in family["cases"]:
        if not any(token in case["text"] for token in ("<s>", "</s>", "<unk>", "<0x")):
            assert model.encode(case["text"]) == case["ids"], case["text"]
    assert model.decode(model.encode("a \u4f60\nb")) == " a \u4f60\nb"


def test_a_text_that_has_the_first_token_does_not_get_it_twice(families: dict[str, Any]) -> None:
    info = {"tokenizer_model": "gpt2", "pre_tokenizer": "llama-bpe", "add_bos": True}
    model = from_tokenizer_json(families["llama-bpe"], **info)
    model.info.bos_token = model.pieces.index("<|begin_of_text|>")
    assert model.encode("x") == [model.info.bos_token, *model.encode("<|begin_of_text|>x")[1:]]
