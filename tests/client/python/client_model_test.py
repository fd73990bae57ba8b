"""The tokenizer and chat template that are built from what the server sends."""

from __future__ import annotations

import pytest
from client_fakes import PIECES, FakeServers
from heavywater import Client, Model


@pytest.fixture
def model(client: Client) -> Model:
    return client.get_model()


def test_the_parts_of_the_stream_are_joined_in_order(model: Model) -> None:
    assert model.pieces == PIECES
    assert model.info.name == "tiny"


def test_get_model_waits_for_a_server_that_starts(client: Client, servers: FakeServers) -> None:
    servers.worker.unavailable = 1
    assert client.get_model().info.vocab_size == len(PIECES)


def test_text_is_merged_by_rank(model: Model) -> None:
    assert model.encode("ab abc") == [PIECES.index("ab"), PIECES.index("Ġab"), PIECES.index("c")]


def test_digits_are_tokens_of_their_own(model: Model) -> None:
    assert model.encode("a12") == [PIECES.index(piece) for piece in ("a", "1", "2")]


def test_control_tokens_are_recognised_in_text(model: Model) -> None:
    ids = model.encode("<|im_start|>ab<|im_end|>")
    assert ids == [PIECES.index(piece) for piece in ("<|im_start|>", "ab", "<|im_end|>")]


def test_decode_gives_the_text_back_with_control_tokens(model: Model) -> None:
    text = "<|im_start|>ab 12\nabc.<|im_end|>"
    assert model.decode(model.encode(text)) == text


def test_chat_renders_the_servers_template(model: Model) -> None:
    prompt = model.chat([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_an_unknown_pre_tokenizer_is_refused_by_name(model: Model) -> None:
    model.info.pre_tokenizer = "falcon"
    with pytest.raises(ValueError, match=r"'falcon'.*'llama-bpe'"):
        model.encode("ab")


def test_a_vocabulary_that_is_incomplete_is_refused(model: Model) -> None:
    from heavywater.v1 import generation_pb2

    info = generation_pb2.ModelInfo(vocab_size=3)
    with pytest.raises(ValueError, match="0 pieces of a vocabulary of 3"):
        Model.from_responses([generation_pb2.GetModelResponse(model=info)])
