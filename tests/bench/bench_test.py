"""heavywater-bench: what it prints. How fast things are is not tested."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BINARY = Path(os.environ.get("HEAVYWATER_BIN", "")) / "heavywater-bench"
if "HEAVYWATER_BIN" not in os.environ:
    BINARY = Path(shutil.which("heavywater-bench") or "heavywater-bench")

pytestmark = pytest.mark.skipif(
    shutil.which(str(BINARY)) is None,
    reason="heavywater-bench is not on PATH: run through deploy/local/test or deploy/local/run",
)

ROWS = {
    "attention": ["context", "target", "bandwidth_ratio", "roofline_ratio", "score_overhead", "policy_overhead"],
    "recall": ["context", "target", "full_bandwidth_ratio", "scan_vs_full", "step_vs_full"],
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=240, check=False)


def figures_of(row: dict[str, Any]) -> list[Any]:
    return [value for field, value in row.items() if field not in ("context", "target")]


@pytest.mark.parametrize("command", ROWS)
def test_json_is_one_object_with_a_row_for_each_target(command: str) -> None:
    result = bench(command, "--quick", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["target"] for row in report["rows"]] == ["avx2", "avx512"]
    for row in report["rows"]:
        assert list(row) == ROWS[command]
        figures = figures_of(row)
        # A target that the machine lacks has no figures at all.
        assert all(value is None for value in figures) or all(map(math.isfinite, figures)), row
    assert any(figures_of(row)[0] is not None for row in report["rows"])
    if command == "attention":
        assert report["bandwidth_gb_s"] > 0
        assert report["fma_gflops"] > 0


def test_growth_prints_what_a_token_costs_as_more_have_been_seen() -> None:
    result = bench("growth", "--quick", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["policy"], row["seen"]) for row in rows] == [
        ("h2o", 1280),
        ("h2o", 2048),
        ("snapkv_h2o", 1280),
        ("snapkv_h2o", 2048),
    ]
    for row in rows:
        assert list(row) == ["policy", "budget", "seen", "us_per_token", "vs_first"]
        assert row["budget"] == 1024
        assert row["us_per_token"] > 0
        assert row["vs_first"] > 0


def test_tier_prints_a_row_for_each_tier_operation_and_check() -> None:
    result = bench("tier", "--quick", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["tier"], row["op"], row["crc"]) for row in rows] == [
        ("host", "put", False),
        ("host", "get", False),
        ("host", "put", True),
        ("host", "get", True),
        ("disk", "put", True),
        ("disk", "get", True),
        ("stream", "put", True),
        ("stream", "get", True),
    ]
    for row in rows:
        assert list(row) == ["tier", "op", "bytes", "crc", "vs_memcpy", "vs_redis", "vs_peer"]
        assert row["bytes"] == 65536
        if row["tier"] == "host":
            assert row["vs_memcpy"] > 0
            assert (row["vs_redis"] is not None) == (shutil.which("redis-server") is not None)
            assert row["vs_peer"] is None
        else:
            assert row["vs_memcpy"] is row["vs_redis"] is None
        if row["tier"] == "stream":
            assert row["vs_peer"] > 0


needs_model = pytest.mark.skipif("HEAVYWATER_MODEL" not in os.environ, reason="no model: HEAVYWATER_MODEL")
PHASES = {"matrices", "attention", "scores", "plan", "reduce", "report", "other"}


@needs_model
def test_decode_prints_a_row_for_each_policy_with_the_phases_of_a_token() -> None:
    result = bench("decode", "--quick", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    own = [row for row in rows if row["engine"] == "heavywater"]
    assert [row["policy"] for row in own] == ["full", "snapkv_h2o", "recall"]
    for row in rows:
        assert list(row) == [
            "engine",
            "policy",
            "budget",
            "context",
            "tokens_per_s",
            "prompt_tokens_per_s",
            "phases",
        ]
        assert row["context"] == 128
        assert row["tokens_per_s"] > 0
        assert row["prompt_tokens_per_s"] > 0
    for row in own:
        assert set(row["phases"]) == PHASES
        assert row["phases"]["matrices"] > row["phases"]["plan"] > 0
        # Milliseconds of each phase, of all that a token takes.
        assert sum(row["phases"].values()) == pytest.approx(1e3 / row["tokens_per_s"], rel=0.01)
    assert own[0]["budget"] is None
    assert own[1]["budget"] == pytest.approx(0.2, abs=0.01)
    peers = [row for row in rows if row["engine"] != "heavywater"]
    if peers:
        assert [(row["engine"], row["policy"], row["budget"]) for row in peers] == [("llama.cpp", "full", None)]
    else:
        assert "pip install llama-cpp-python" in result.stderr


@needs_model
def test_comm_prints_collectives_and_what_ranks_cost_a_token() -> None:
    result = bench("comm", "--quick", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ranks"] == 3
    assert report["vs_one_rank"] == pytest.approx(report["ranks_ms_per_token"] / report["one_rank_ms_per_token"])
    assert 0 < report["reduce_share"] < 1
    assert len(report["rows"]) == 2 * 2 * 3
    for row in report["rows"]:
        assert list(row) == ["communicator", "model", "collective", "bytes", "us", "us_p90"]
        assert 0 < row["us"] <= row["us_p90"]


@needs_model
def test_rpc_prints_the_server_beside_the_runner() -> None:
    result = bench("rpc", "--quick", "--json")
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert row["sequences"] == 2
    assert row["vs_runner"] == pytest.approx(row["tokens_per_s"] / row["runner_tokens_per_s"])


@pytest.mark.parametrize("command", ["decode", "comm", "rpc"])
def test_without_a_model_they_say_so(command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HEAVYWATER_MODEL"}
    result = subprocess.run([BINARY, command], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert "HEAVYWATER_MODEL" in result.stderr


def test_without_json_it_prints_a_table() -> None:
    result = bench("recall", "--quick")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ROWS["recall"]
    assert [line.split()[1] for line in lines[1:]] == ["avx2", "avx512"]


def test_help_names_the_commands() -> None:
    result = bench("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in [*ROWS, "tier", "decode", "comm", "rpc"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["recall", "--fast"], "unknown option --fast"),
        (["decoding"], "unknown command decoding"),
        (["recall", "--backend", "tpu"], "unknown backend tpu"),
        (["recall", "--backend"], "unknown option --backend"),
        (["step"], "want --backend cuda with step"),
        (["tier", "--backend", "cuda"], "no --backend cuda with tier"),
        (["decode", "--context", "0"], "want a context of 1 token or more, got 0"),
        (["decode", "--model"], "unknown option --model"),
        (["recall", "attention"], "one command is enough, got also attention"),
        ([], "want a command"),
    ],
)
def test_what_it_does_not_know_is_an_error(arguments: list[str], complaint: str) -> None:
    result = bench(*arguments)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
@pytest.mark.parametrize("command", [*ROWS, "step"])
def test_without_a_gpu_its_rows_are_refused_and_said_why(command: str) -> None:
    result = bench(command, "--backend", "cuda", "--json")
    assert result.returncode == 1
    assert "FAILED_PRECONDITION" in result.stderr
    assert result.stdout == ""
