"""Rows, resumption and plots of `heavywater eval sweep`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from client_fakes import FakeServers
from heavywater.cli.app import app
from heavywater.cli.eval_sweep import sweep_rows
from heavywater.eval.plots import kept_map, mass_plot, mean_columns, quality_plot
from heavywater.eval.results_file import ResultsFile
from heavywater.eval.rows import Row
from typer.testing import CliRunner

PNG = b"\x89PNG\r\n"


def test_rows_come_budget_by_budget_after_the_full_caches() -> None:
    rows = sweep_rows(["h2o", "recall"], ["kv_head"], [0.2, 0.1])
    assert [row.name for row in rows] == [
        "full",
        "h2o-kv_head-0.1",
        "snapkv_h2o-kv_head-0.1-recall-64",
        "h2o-kv_head-0.2",
        "snapkv_h2o-kv_head-0.2-recall-64",
    ]


def test_scissorhands_is_asked_for_as_published_and_pyramidkv_like_its_relatives() -> None:
    options = Row("scissorhands", "kv_head", 0.2).options(1000)
    assert (options.heavy_tokens, options.recent_tokens, options.plan_interval_steps) == (190, 10, 16)
    options = Row("pyramidkv", "layer", 0.2, exposure=0.5).options(1000)
    assert (options.heavy_tokens, options.recent_tokens, options.exposure) == (100, 100, 0.5)


def test_the_oracle_is_asked_for_its_true_top_and_only_by_head() -> None:
    options = Row("oracle", "kv_head", 0.2).options(1000)
    assert (options.heavy_tokens, options.recent_tokens, options.sink_tokens) == (199, 1, 0)
    assert [row.name for row in sweep_rows(["oracle"], ["kv_head"], [0.1])] == ["full", "oracle-kv_head-0.1"]
    with pytest.raises(ValueError, match="'oracle' chooses by head"):
        sweep_rows(["oracle"], ["layer"], [0.1])


def test_adaptive_rows_are_those_of_policies_that_score_the_prompt_by_head() -> None:
    rows = sweep_rows(["streaming", "h2o"], ["kv_head", "layer"], [0.2], ["even", "adaptive"])
    assert [row.name for row in rows] == [
        "full",
        "streaming-kv_head-0.2",
        "h2o-kv_head-0.2",
        "h2o-kv_head-0.2-adaptive",
        "streaming-layer-0.2",
        "h2o-layer-0.2",
    ]
    assert rows[3].options(1000).head_budgets == "adaptive"
    for policies, scopes in ((["streaming"], ["kv_head"]), (["h2o"], ["layer"])):
        with pytest.raises(ValueError, match="'adaptive' divides a layer's slots by scores"):
            sweep_rows(policies, scopes, [0.2], ["even", "adaptive"])
    with pytest.raises(ValueError, match="'ada' is not one of even, adaptive"):
        sweep_rows(["h2o"], ["kv_head"], [0.2], ["ada"])


def test_results_survive_and_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "state.jsonl"
    first = ResultsFile(file, {"prompt": 8})
    first.add("a", {"ppl": 1.5})
    first.add("b", {"ppl": 2.5})
    file.write_text(file.read_text()[:-9])
    again = ResultsFile(file, {"prompt": 8})
    assert "a" in again and "b" not in again
    again.add("b", {"ppl": 3.0})
    assert ResultsFile(file, {"prompt": 8})["b"] == {"ppl": 3.0}


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    ResultsFile(tmp_path / "state", {"prompt": 8}).add("a", 1)
    with pytest.raises(ValueError, match="other settings"):
        ResultsFile(tmp_path / "state", {"prompt": 9})


def sweep(servers: FakeServers, tmp_path: Path, policies: str) -> list[dict[str, object]]:
    text = tmp_path / "text"
    text.write_text("abcd efgh ijkl " * 40)
    arguments = ["eval", "sweep", "--text", str(text), "--offsets", "0", "--prompt", "64", "--continue", "4"]
    arguments += ["--policies", policies, "--budgets", "0.25", "--state", str(tmp_path / "state")]
    done = CliRunner().invoke(app, [*arguments, "--address", servers.address, "--json"])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, object]] = json.loads(done.stdout)["rows"]
    return rows


def test_a_second_run_measures_only_what_is_missing(servers: FakeServers, tmp_path: Path) -> None:
    first = sweep(servers, tmp_path, "h2o")
    requests = len(servers.worker.requests)
    assert sweep(servers, tmp_path, "h2o") == first
    assert len(servers.worker.requests) == requests
    both = sweep(servers, tmp_path, "h2o,snapkv_h2o")
    assert [row["policy"] for row in both] == ["full", "h2o", "snapkv_h2o"]
    # Once more the full cache, whose logits the new row is compared with.
    assert [one.policy.policy for one in servers.worker.requests[requests:]] == ["full", "snapkv_h2o"]


def test_columns_of_a_map_are_means_of_the_positions_that_exist() -> None:
    shares = np.array([[1.0, 0.0, 1.0, np.nan, np.nan], [0.0, 0.0, 1.0, 1.0, 0.5]])
    expected = [[0.5, 1.0, np.nan], [0.0, 1.0, 0.5]]
    np.testing.assert_array_equal(mean_columns(shares, 2), expected)
    np.testing.assert_array_equal(mean_columns(shares, 1), shares)


def test_plots_are_written(tmp_path: Path) -> None:
    figures = {"scope": "kv_head", "recall": False, "ppl": 31.0, "kl": 0.1}
    rows = [{"policy": "full", "budget": None, "bytes_ratio": 1.0, **figures, "scope": None}]
    for budget in (0.1, 0.2):
        for head_budgets in ("even", "adaptive"):
            row = {"policy": "h2o", "budget": budget, "bytes_ratio": budget, "head_budgets": head_budgets}
            rows.append(row | figures)
    quality_plot(rows, tmp_path / "a" / "quality.png", "title")
    mass_plot(
        np.linspace(0, 1, 50).reshape(1, 50).repeat(3, axis=0), tuple(np.linspace(0.02, 1, 50)), tmp_path / "m.png", ""
    )
    kept_map({"h2o": np.full((2, 12), 0.5)}, [0, 4], 8, tmp_path / "k.png")
    for name in ("a/quality.png", "m.png", "k.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
