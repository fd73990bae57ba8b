"""docs/your-model.md: its commands, with a tiny model that the test writes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs/your-model.md").read_text(encoding="utf-8")
FAMILIES = ROOT / "tests/worker/model/testdata/tokenizer_families.json"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen 2 with random weights and a small tokenizer, as Transformers would save it."""
    folder = tmp_path_factory.mktemp("tiny-qwen2")
    tokenizer = json.loads(FAMILIES.read_text())["qwen2"]["tokenizer"]
    vocabulary = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    random = np.random.default_rng(5)

    def drawn(*shape: int) -> np.ndarray:
        return random.normal(scale=0.2, size=shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": drawn(vocabulary, HIDDEN), "model.norm.weight": 1 + drawn(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = drawn(rows * HEAD_DIM, HIDDEN)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = drawn(rows * HEAD_DIM)
        tensors[prefix + "self_attn.o_proj.weight"] = drawn(HIDDEN, HEADS * HEAD_DIM)
        tensors[prefix + "mlp.gate_proj.weight"] = drawn(FFN, HIDDEN)
        tensors[prefix + "mlp.up_proj.weight"] = drawn(FFN, HIDDEN)
        tensors[prefix + "mlp.down_proj.weight"] = drawn(HIDDEN, FFN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + drawn(HIDDEN)
    write_safetensors(folder / "model.safetensors", tensors)
    config = {
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run(command: str, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command.replace("PATH", str(model)))
    assert words[:2] == ["deploy/local/run", "heavywater"]
    return subprocess.run(
        [sys.executable, "-m", "heavywater", *words[2:], *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def programs() -> None:
    for binary in ("heavywater-cache", "heavywater-worker"):
        if shutil.which(binary) is None:
            pytest.skip(f"{binary} is not on PATH: run through deploy/local/test or deploy/local/run")


def test_two_commands_lead_to_an_answer() -> None:
    assert commands()[0] == "deploy/local/setup"
    assert (ROOT / commands()[0]).exists()
    assert commands()[1].startswith("deploy/local/run heavywater generate --model PATH --chat")


def test_the_second_command_answers(programs: None, model: Path) -> None:
    done = run(commands()[1], model, "-n", "8", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert 1 <= figures["new_tokens"] <= 8


def test_sampling_is_the_same_for_a_seed_and_for_any_number_of_ranks(programs: None, model: Path) -> None:
    command = commands()[3]
    texts = set()
    for ranks in ("1", "4"):  # two KV heads: with four ranks two hold each
        done = run(
            command, model, "--model", str(model), "--ranks", ranks, "-n", "12", "--json", "--policy", "snapkv_h2o"
        )
        assert done.returncode == 0, done.stderr
        texts.add(json.loads(done.stdout)["text"])
    assert len(texts) == 1


def test_limits_that_cannot_work_are_refused_naming_them(programs: None, model: Path) -> None:
    done = run("deploy/local/run heavywater generate x --model PATH --temperature 1 --top-p 1.5", model)
    assert done.returncode != 0
    assert "sampling.top_p is 1.5, want a number from 0 (all tokens) to 1" in done.stderr


def test_what_is_not_supported_is_named_at_the_start(programs: None, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    done = run(commands()[1], folder)
    assert done.returncode != 0
    assert "'model_type' is 'gemma', want one of llama, mistral, qwen2, qwen3" in done.stderr.replace("\n", " ")
