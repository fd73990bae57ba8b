"""The needles of `heavywater eval needle` through Transformers: found with recall, once the text was compressed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from heavywater.book import read_book
from heavywater.cli.app import app
from heavywater.eval import needle_transformers
from heavywater.eval.haystack import make_needles
from heavywater.eval.needle_transformers import TransformersNeedles, attach_arguments
from heavywater.eval.rows import Row, rows_at_equal_bytes
from heavywater.local import LocalOptions, LocalServers
from typer.testing import CliRunner

TOKENS = 240  # of each text


def test_recall_finds_what_the_compressed_text_hides(embedded):
    model, texts = embedded
    needles = make_needles(texts, read_book(), 0, 1, TOKENS)[1:3]
    evaluation = TransformersNeedles(model, texts, needles)
    rows = rows_at_equal_bytes(["layer"], [0.2], [None, 64], untuned=True)
    full, ordered, with_recall, tuned = (evaluation.run(row, True) for row in rows)
    assert [result.hits for result in (full, ordered, with_recall, tuned)] == [2, 0, 2, 2]
    assert full.bytes_ratio > 0.99
    for result in (ordered, with_recall, tuned):
        assert result.bytes_ratio < 0.35, result.row
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


def test_the_texts_are_those_that_a_servers_model_is_asked_about(embedded):
    if shutil.which("heavywater-worker") is None:
        pytest.skip("heavywater-worker is not on PATH: run through deploy/local/test")
    with LocalServers(LocalOptions()) as servers, servers.client() as client:
        served = client.get_model()
    book = read_book()
    assert make_needles(embedded[1], book, 0, 2, 700) == make_needles(served, book, 0, 2, 700)


def test_the_command_prints_rows_of_the_same_form(embedded, monkeypatch):
    monkeypatch.setattr(needle_transformers, "load", lambda path: embedded)  # which takes longest
    options = ["--question-after", "--tokens", "64", "--variants", "1", "--budgets", "0.5", "--no-recall", "--json"]
    done = CliRunner().invoke(app, ["eval", "needle", "--transformers", *options])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["preset"] for row in rows] == ["full", "snapkv_h2o"]
    assert [row["total"] for row in rows] == [5, 5]
    assert rows[0]["hits"] == 5


@pytest.mark.skipif(not os.environ.get("HEAVYWATER_ALL"), reason="takes a minute: deploy/local/test --all")
def test_the_command_runs_as_a_process():
    options = ["--question-after", "--tokens", "64", "--variants", "1", "--budgets", "0.5", "--recall"]
    command = [sys.executable, "-m", "heavywater", "eval", "needle", "--transformers", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "snapkv_h2o + recall 64" in done.stdout
