"""The needles of `heavywater eval needle` through Transformers: found with recall, once the text was compressed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from heavywater.book import read_book
from heavywater.eval.haystack import make_needles
from heavywater.eval.needle_transformers import TransformersNeedles, attach_arguments, load
from heavywater.eval.rows import Row, rows_at_equal_bytes
from heavywater.local import LocalOptions, LocalServers, find_model

TOKENS = 300  # of each text


@pytest.fixture(scope="module")
def loaded():
    if "HEAVYWATER_MODEL" not in os.environ:
        pytest.skip("HEAVYWATER_MODEL is not set: run through deploy/local/test")
    return load(find_model())


def test_recall_finds_what_the_compressed_text_hides(loaded):
    model, texts = loaded
    needles = make_needles(texts, read_book(), 0, 1, TOKENS)[1:3]
    torch.set_num_threads(2)
    try:
        evaluation = TransformersNeedles(model, texts, needles)
        full, ordered, with_recall, tuned = (
            evaluation.run(row, True) for row in rows_at_equal_bytes(["layer"], [0.2], [None, 64], untuned=True)
        )
    finally:
        torch.set_num_threads(1)
    assert [result.hits for result in (full, ordered, with_recall, tuned)] == [2, 0, 2, 2]
    assert full.bytes_ratio > 0.99
    for result in (ordered, with_recall, tuned):
        assert result.bytes_ratio < 0.3, result.row
    for miss in ordered.misses:
        assert miss.resident < len(miss.needle.positions)  # it has really left
    for result in (with_recall, tuned):
        assert 0 < result.reads_mean <= result.reads_max <= 64
    assert ordered.reads_mean == 0


def test_what_is_asked_of_a_server_is_asked_of_attach():
    ordered = Row("snapkv_h2o", "layer", 0.2, of_bytes=True)
    assert attach_arguments(ordered.options(1000)) == {
        "policy": "snapkv_h2o",
        "scope": "layer",
        "recent_tokens": 100,
        "sink_tokens": 0,
        "min_budget_tokens": 1,
        "plan_interval_steps": 1,
        "decay": 1.0,
        "device_ratio": 0.2,
        "head_budgets": "even",
    }
    everything = Row("snapkv_h2o", "layer", 0.2, recall="all", of_bytes=True)
    assert attach_arguments(everything.options(1000))["recall"] == "all"


def test_the_texts_are_those_that_a_servers_model_is_asked_about(loaded):
    if shutil.which("heavywater-worker") is None:
        pytest.skip("heavywater-worker is not on PATH: run through deploy/local/test")
    with LocalServers(LocalOptions()) as servers, servers.client() as client:
        served = client.get_model()
    book = read_book()
    assert make_needles(loaded[1], book, 0, 2, 700) == make_needles(served, book, 0, 2, 700)


def test_the_command_prints_rows_of_the_same_form():
    if "HEAVYWATER_MODEL" not in os.environ:
        pytest.skip("HEAVYWATER_MODEL is not set: run through deploy/local/test")
    options = ["--question-after", "--tokens", "100", "--variants", "1", "--budgets", "0.5", "--recall", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "heavywater", "eval", "needle", "--transformers", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["preset"] for row in rows] == ["full", "snapkv_h2o", "recall"]
    assert [row["total"] for row in rows] == [5, 5, 5]
    assert rows[0]["hits"] == 5
