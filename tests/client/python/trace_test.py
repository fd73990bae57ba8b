"""Traces written and read in Python, and `heavywater replay` over one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from heavywater.cli.app import app
from heavywater.crc32c import crc32c, crc32c_of_rows
from heavywater.replay import policy_request
from heavywater.trace import Trace, read_header, read_trace, write_trace
from typer.testing import CliRunner

LAYERS, TOKENS, PROMPT, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 80, 60, 4, 2, 16


def random_trace(dtype: str = "fp32") -> Trace:
    rng = np.random.default_rng(5)

    def rows(heads: int) -> np.ndarray:
        return rng.normal(size=(LAYERS, TOKENS, heads, HEAD_DIM)).astype(np.float16).astype(np.float32)

    return Trace(rows(QUERY_HEADS), rows(KV_HEADS), rows(KV_HEADS), PROMPT, dtype, model="tiny")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    trace = random_trace(dtype)
    write_trace(tmp_path / "a.trace", trace)
    read = read_trace(tmp_path / "a.trace")
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace"]
    assert read.header() == trace.header() == read_header(tmp_path / "a.trace")
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(getattr(read, name), getattr(trace, name))


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.trace"
    write_trace(file, random_trace())
    whole = file.read_bytes()
    for length in (0, 10, 19, 40, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.trace"):
            read_trace(file)
    for at in (0, 9, 25, 400, len(whole) // 2, len(whole) - 2):
        changed = bytearray(whole)
        changed[at] ^= 0x55
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"a\.trace"):
            read_trace(file)


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    good = random_trace()
    for bad, says in (
        (Trace(good.q, good.k[:, 1:], good.v, PROMPT), "do not match"),
        (Trace(good.q[:, :, 1:], good.k, good.v, PROMPT), "3 query heads"),
        (Trace(good.q, good.k, good.v, TOKENS + 1), "prompt_tokens is 81"),
        (Trace(good.q, good.k, good.v, PROMPT, "int8"), "dtype is 'int8'"),
        (Trace(good.q * np.inf, good.k, good.v, PROMPT), "layer 0 holds a number that is not finite"),
    ):
        with pytest.raises(ValueError, match=says):
            write_trace(tmp_path / "a.trace", bad)


def test_checksums_of_rows_are_those_of_each() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (7, 33), dtype=np.uint8)
    assert crc32c_of_rows(rows).tolist() == [crc32c(row.tobytes()) for row in rows]
    assert crc32c(b"123456789") == 0xE3069283


def test_policies_are_asked_for_as_in_the_evaluations(tmp_path: Path) -> None:
    file = tmp_path / "a.trace"
    write_trace(file, random_trace())
    request = policy_request(file, "streaming", "layer", 0.5)
    assert request == {
        "policy": "streaming",
        "scope": "layer",
        "heavy_tokens": 4,
        "recent_tokens": 26,
        "sink_tokens": 4,
        "plan_interval_steps": 1,
        "exposure": 0.0,
    }
    assert policy_request(file, "recall", "kv_head", 0.2)["device_ratio"] == 0.2
    with pytest.raises(ValueError, match="'lru' is not one of"):
        policy_request(file, "lru", "layer", 0.5)


def test_replay_prints_what_each_policy_would_have_kept(tmp_path: Path) -> None:
    if shutil.which("heavywater-replay") is None:
        pytest.skip("heavywater-replay is not on PATH: run through deploy/local/test or deploy/local/run")
    file = tmp_path / "a.trace"
    write_trace(file, random_trace())
    arguments = ["replay", str(file), "--policies", "h2o,oracle", "--budgets", "0.2,0.5", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["policy"], row["budget"]) for row in rows] == [
        ("h2o", 0.2),
        ("oracle", 0.2),
        ("h2o", 0.5),
        ("oracle", 0.5),
    ]
    kept = [row["mass_kept"] for row in rows]
    assert kept[0] < kept[1] < 1
    assert kept[2] < kept[3] < 1
    assert kept[0] < kept[2]
    assert all(row["queries"] == (TOKENS - PROMPT) * LAYERS * QUERY_HEADS for row in rows)
