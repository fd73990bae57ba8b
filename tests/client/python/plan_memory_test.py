"""`heavywater plan-memory`: a table or JSON from the worker's own arithmetic."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heavywater.memory_plan import BINARY, model_of_config, parse_bytes, parse_tokens

ROOT = Path(__file__).resolve().parents[3]
LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}

needs_binary = pytest.mark.skipif(
    shutil.which(BINARY) is None,
    reason=f"{BINARY} is not on PATH: run through deploy/local/test or deploy/local/run",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heavywater", "plan-memory", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["rows"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1", 1), ("32768", 32768), ("32k", 32768), ("1m", 1 << 20), (" 2K", 2048)],
)
def test_tokens_may_be_in_k_and_m(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 << 30), ("141GB", 141 * 10**9), ("1.5KiB", 1536), ("7", 7)],
)
def test_memory_has_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5k", "-1", "32 tokens"])
def test_what_is_no_number_of_tokens_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="no number of tokens"):
        parse_tokens(text)


@pytest.mark.parametrize("text", ["", "80G", "GiB", "-1GiB"])
def test_what_is_no_amount_of_memory_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        parse_bytes(text)


def test_a_transformers_folder_has_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    expected = {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_query_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_size": 14336,
        "vocab_size": 128256,
        "tied_embeddings": False,
        "name": tmp_path.name,
    }
    assert model_of_config(tmp_path) == expected
    assert model_of_config(tmp_path / "config.json") == expected


@pytest.mark.parametrize("field", sorted(set(LLAMA) - {"num_key_value_heads"}))
def test_a_missing_or_wrong_field_of_a_config_is_named(tmp_path: Path, field: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: value for name, value in LLAMA.items() if name != field}))
    with pytest.raises(ValueError, match=f"field '{field}' is missing"):
        model_of_config(file)
    file.write_text(json.dumps({**LLAMA, field: "many"}))
    with pytest.raises(ValueError, match=f"field '{field}' is 'many'"):
        model_of_config(file)


def test_without_kv_heads_every_query_head_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}))
    assert model_of_config(file)["num_kv_heads"] == 32


@needs_binary
def test_the_preset_and_the_same_shape_from_a_config_need_the_same(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert rows_of("--config", str(tmp_path)) == rows_of("--model", "llama-3-8b")


@needs_binary
def test_the_table_has_a_row_for_each_number_of_gpus_context_and_policy() -> None:
    done = run(
        "--model",
        "llama-3-8b",
        "--tp",
        "1,2",
        "--context",
        "32k,128k",
        "--policy",
        "full,recall",
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^ +(\d+) +(\d+k) +(\w+) ", done.stdout, re.MULTILINE)
    assert found == [
        (gpus, context, policy) for gpus in ("1", "2") for context in ("32k", "128k") for policy in ("full", "recall")
    ]
    assert " ms " not in done.stdout


@needs_binary
def test_memory_and_bandwidth_add_what_fits_and_the_steps_time() -> None:
    (row,) = rows_of(
        "--model",
        "llama-3-8b",
        "--policy",
        "full",
        "--device-memory",
        "24GiB",
        "--bandwidth-gb-s",
        "1000",
    )
    assert row["fits"] is True
    assert 32 * 1024 < row["longest_context"] < 128 * 1024
    assert row["step_ms"] == pytest.approx(row["step_read"]["device_bytes"] / 1e9)
    done = run("--model", "llama-3-8b", "--device-memory", "24GiB", "--bandwidth-gb-s", "1000")
    assert "longest" in done.stdout
    assert "ms" in done.stdout


@needs_binary
def test_recall_needs_a_fifth_of_the_full_caches_bytes() -> None:
    full, recall = rows_of("--model", "llama-3-8b", "--context", "128k", "--policy", "full,recall")
    assert recall["kv_ratio"] < 0.2
    assert recall["kv_bytes"] < full["kv_bytes"] / 5
    assert recall["host_bytes"] == full["host_bytes"]


@needs_binary
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "want one of --model, --config and --gguf, got 0"),
        (
            ["--model", "llama-3-8b", "--gguf", __file__],
            "want one of --model, --config and --gguf, got 2",
        ),
        (["--model", "gpt-2"], "model is 'gpt-2', want one of: llama-3-8b"),
        (
            ["--model", "llama-3-8b", "--tp", "3"],
            "the group has 3 ranks, want a divisor",
        ),
        (["--model", "llama-3-8b", "--tp", "two"], "--tp 'two', want whole numbers"),
        (
            ["--model", "llama-3-8b", "--context", "long"],
            "'long' is no number of tokens",
        ),
        (
            ["--model", "llama-3-8b", "--context", "1k"],
            "context_tokens is 1024, want 1025",
        ),
        (["--model", "llama-3-8b", "--policy", "lru"], '"lru", want one of'),
        (["--model", "llama-3-8b", "--kv-dtype", "int3"], 'kv_dtype is "int3"'),
        (
            ["--model", "llama-3-8b", "--device-memory", "80G"],
            "'80G' is no amount of memory",
        ),
        (["--gguf", __file__], "plan_memory_test.py"),
    ],
)
def test_bad_input_is_one_message_that_names_the_field(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@needs_binary
def test_the_tables_of_the_gpu_page_are_what_the_command_prints() -> None:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"^```sh\ndeploy/local/run heavywater plan-memory (.*?--markdown)\n```\n+((?:\|.*\n)+)",
        page,
        re.M,
    )
    assert len(shown) >= 2
    for arguments, table in shown:
        done = run(*shlex.split(arguments))
        assert done.returncode == 0, done.stderr
        assert done.stdout == table, f"heavywater plan-memory {arguments}: run it and replace the table"
