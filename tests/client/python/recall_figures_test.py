"""What recall must show at equal bytes on the device: details are found, and answers stay near the full cache's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEAVYWATER_ALL"), reason="takes many minutes: deploy/local/test --all"
)

Rows = list[dict[str, object]]


def rows_of(*arguments: str) -> Rows:
    command = [sys.executable, "-m", "heavywater", "eval", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    return json.loads(done.stdout)["rows"]


@pytest.fixture(scope="module")
def needles() -> Rows:
    """Asked after the text is compressed, and before. The command itself fails when the full cache misses one."""
    return rows_of("needle")


def test_recall_finds_nearly_every_needle(needles: Rows) -> None:
    recalling = [row for row in needles if row["recall"]]
    assert sorted((row["question_after"], row["budget"]) for row in recalling) == [
        (False, 0.1),
        (False, 0.2),
        (True, 0.1),
        (True, 0.2),
    ]
    for row in recalling:
        assert row["total"] == 25
        assert row["hits"] >= 23, row


def test_without_recall_hardly_a_needle_is_found_once_the_text_is_compressed(needles: Rows) -> None:
    for row in needles:
        if row["policy"] != "full" and not row["recall"] and row["question_after"]:
            assert row["hits"] <= 3, row


def test_rows_of_a_budget_take_about_the_same_bytes(needles: Rows) -> None:
    for row in needles:
        if row["recall"]:
            assert row["bytes_ratio"] <= row["budget"] * 1.02, row


# Tokens of prompt and continuation, windows, and by budget the most of SnapKV+H2O's divergence.
@pytest.mark.parametrize(
    ("prompt", "targets", "offsets", "most"),
    [
        ("1536", "256", "2000,27000,52000", {0.2: 0.3, 0.1: 0.4}),
        ("4096", "128", "2000,52000", {0.05: 0.55}),
    ],
)
def test_the_divergence_is_a_fraction_of_the_ordered_policys(
    prompt: str, targets: str, offsets: str, most: dict[float, float]
) -> None:
    budgets = ",".join(str(budget) for budget in most)
    sizes = ["--prompt", prompt, "--continue", targets, "--offsets", offsets, "--budgets", budgets]
    rows = rows_of("ppl", "--recall", *sizes)
    for budget, share in most.items():
        ordered, recall = (row for row in rows if row["budget"] == budget)
        assert (ordered["recall"], recall["recall"]) == (False, True)
        assert recall["bytes_ratio"] <= ordered["bytes_ratio"] * 1.02
        assert recall["kl"] <= share * ordered["kl"], (ordered, recall)
