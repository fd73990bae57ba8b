"""`heavywater top`: what it takes from the servers, the rates it makes of it, and what a person sees."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from client_fakes import FakeServers
from heavywater import Client
from heavywater.local import LocalServers
from heavywater.top.rates import rates_between
from heavywater.top.report import as_json
from heavywater.top.sample import RankSample, Sample, take_sample
from heavywater.top.view import View
from heavywater.v1 import admin_pb2, common_pb2, sequence_pb2
from rich.console import Console

METRICS = """# HELP heavywater_tokens_generated_total New tokens given out
heavywater_tokens_generated_total 37
heavywater_recall_reads_total 1000
heavywater_sequences{state="running"} 2
heavywater_sequences{state="queued"} 1
heavywater_positions{state="demoted"} 30
heavywater_positions{state="resident"} 12
heavywater_device_bytes{kind="slots"} 100
heavywater_device_bytes{kind="tables"} 28
heavywater_device_limit_bytes 256
heavywater_attention_mass_missing_ratio 0.125
heavywater_cache_service_up 0
heavywater_step_seconds_count{phase="decode"} 4
heavywater_step_seconds_sum{phase="decode"} 0.5
heavywater_step_seconds_count{phase="prompt"} 90
"""


def sequence(number: int, seen: int, *, finished: bool = False, policy: str = "h2o") -> sequence_pb2.Sequence:
    return sequence_pb2.Sequence(
        sequence_id=number,
        tenant="somebody",
        budget=common_pb2.ResolvedBudget(policy=policy, scope="layer", recall=policy == "snapkv_h2o"),
        prompt_tokens=50,
        counts=common_pb2.SequenceCounts(tokens_seen=seen, tokens_resident=seen / 4, tokens_demoted=3 * seen / 4),
        finished=finished,
        lease_remaining_ms=59_000,
    )


def rank(tokens: float, steps: float, seconds: float, *, up: bool = True) -> RankSample:
    counters = {"tokens": tokens, "recall_reads": 10 * tokens}
    return RankSample("a:1", counters=counters, decode_steps=steps, decode_seconds=seconds, cache_up=up)


def sample(at_s: float, sequences: list[sequence_pb2.Sequence], *ranks: RankSample) -> Sample:
    tiers = [admin_pb2.TierStats(tier="host", total_bytes=1 << 30, used_bytes=1 << 29, reservations_refused=7)]
    stats = admin_pb2.StatsResponse(version="1.2.3", tiers=tiers, sequences=len(sequences), groups=1, ranks=2)
    return Sample(at_s, stats, sequences, ranks)


def drawn(one: Sample, *, before: Sample | None = None, width: int = 130, height: int = 40, problem: str = "") -> str:
    view, rates = View(), rates_between(before, one)
    view.note(rates)
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(view.draw(one, rates, height, width, problem))
    return console.export_text()


def test_a_sample_holds_tiers_sequences_and_each_ranks_metrics(servers: FakeServers) -> None:
    def fetch(address: str) -> str:
        if address == "down:1":
            raise OSError("refused")
        return METRICS

    with Client(cache=servers.address) as client:
        taken = take_sample(client, ["up:1", "down:1"], fetch)
    assert [one.sequence_id for one in taken.sequences] == [4, 3, 2, 1, 0]  # the newest first
    assert taken.stats.tiers[0].used_bytes == 250
    up, down = taken.ranks
    assert (up.counters["tokens"], up.counters["recall_reads"], up.counters["promoted"]) == (37, 1000, 0)
    assert (up.device_used_bytes, up.device_limit_bytes, up.mass_missing) == (128, 256, 0.125)
    assert (up.sequences["queued"], up.positions["demoted"], up.cache_up) == (1, 30, False)
    assert (up.decode_steps, up.decode_seconds) == (4, 0.5)
    assert (down.error, down.counters) == ("refused", {})


def test_rates_are_differences_per_second() -> None:
    before = sample(10.0, [sequence(1, 100), sequence(2, 0)], rank(100, 10, 1.0))
    after = sample(12.0, [sequence(1, 110), sequence(2, 500), sequence(3, 9)], rank(120, 20, 1.5))
    rates = rates_between(before, after)
    assert rates.total_tokens_per_s == rates.ranks[0].per_s["tokens"] == 10
    assert rates.ranks[0].per_s["recall_reads"] == 100
    assert (rates.ranks[0].step_ms, rates.ranks[0].steps_per_s) == (50, 5)
    assert rates.tokens_per_s == {1: 5}  # a prompt that was read, and a sequence that is new, have none


@pytest.mark.parametrize("earlier", [None, RankSample("a:1", error="away"), rank(500, 50, 9.0)])
def test_there_is_no_rate_across_a_gap_or_a_restart(earlier: RankSample | None) -> None:
    before = sample(10.0, [], *([earlier] if earlier else []))
    assert rates_between(before, sample(11.0, [], rank(5, 5, 0.1))).total_tokens_per_s == 0
    assert rates_between(None, before).total_tokens_per_s == 0


def test_a_person_sees_tiers_ranks_and_where_tokens_are() -> None:
    before = sample(10.0, [sequence(17, 80)], rank(100, 10, 1.0))
    one = sample(12.0, [sequence(17, 100, policy="snapkv_h2o"), sequence(18, 0)], rank(140, 20, 1.5))
    text = drawn(one, before=before)
    assert "1 group, 2 ranks, 2 sequences (2 running)" in text
    assert "20.0 tokens/s" in text
    assert "step 50 ms" in text
    (host,) = [line for line in text.splitlines() if "host " in line and "512.0 MiB" in line]
    assert "50%" in host
    assert " 7 " in host  # refused
    (line,) = [line for line in text.splitlines() if " 17 " in line]
    assert "snapkv_h2o + recall" in line
    assert "█" * 16 in line
    assert " 25 " in line
    assert " 75 " in line
    assert "10.0" in line
    (reading,) = [line for line in text.splitlines() if " 18 " in line]
    assert "reading prompt" in reading


@pytest.mark.parametrize("width", [60, 80, 100, 130, 200])
def test_what_does_not_fit_is_left_out_and_nothing_is_cut(width: int) -> None:
    one = sample(1.0, [sequence(1883251548346496, 123456, policy="snapkv_h2o")], rank(1, 1, 1))
    text = drawn(one, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 80:
        assert "…" not in text
        assert "1883251548346496" in text
        assert "tok/s" in text
    assert ("lease" in text) == (width >= 130)


def test_a_narrow_screen_still_shows_where_tokens_are() -> None:
    one = sample(1.0, [sequence(1883251548346496, 3400, policy="snapkv_h2o")], rank(1, 1, 1))
    (line,) = [line for line in drawn(one, width=80).splitlines() if "1883251548346496" in line]
    assert "█" * 7 in line
    assert "snapkv_h2o + recall" in line


def test_the_heading_breaks_where_it_makes_sense_and_is_counted() -> None:
    sequences = [sequence(number, 9) for number in range(100)]
    before, after = sample(1.0, sequences, rank(0, 0, 0)), sample(2.0, sequences, rank(1, 1, 1))
    text = drawn(after, before=before, width=80, height=24)
    assert len(text.splitlines()) <= 24
    assert [line.split()[0] for line in text.splitlines()[:2]] == ["heavywater", "1.0"]


def test_an_empty_service_says_what_would_be_there() -> None:
    text = drawn(sample(1.0, []), width=80)
    assert "heavywater generate and heavywater chat" in text
    assert "--metrics HOST:PORT" in text


def test_more_sequences_than_lines_are_counted() -> None:
    text = drawn(sample(1.0, [sequence(number, 9) for number in range(100)]), height=20)
    assert len(text.splitlines()) <= 20
    shown = sum("▶" in line for line in text.splitlines())
    assert f"sequences ({100 - shown} more)" in text
    assert shown > 5


def test_trouble_is_named() -> None:
    assert "cannot reach the cache service" in drawn(sample(1.0, [], rank(1, 1, 1, up=False)))
    text = drawn(sample(1.0, [], RankSample("a:1", error="refused")))
    assert "no metrics from a:1: refused" in text
    assert "no answer" in text
    assert "it is away" in drawn(sample(1.0, []), problem="it is away")


def run_top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heavywater", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_once_prints_and_ends(servers: FakeServers) -> None:
    done = run_top("--cache", servers.address, "--once", "--interval", "0.1")
    assert done.returncode == 0, done.stderr
    assert "heavywater 9.9.9" in done.stdout


def test_a_cache_service_that_is_not_there_is_one_message() -> None:
    done = run_top("--cache", "127.0.0.1:1", "--once")
    assert done.returncode == 1
    assert done.stderr.startswith("error: UNAVAILABLE")
    assert "--json without --once" in run_top("--json").stderr
    assert "no terminal, want --once" in run_top().stderr


def test_the_figures_of_real_servers_add_up(local_servers: LocalServers) -> None:
    with local_servers.client() as client:
        generation = client.generate("Once upon a time", max_new_tokens=6, ignore_eos=True)
        generation.text()
        arguments = ["--metrics", ",".join(local_servers.metrics_addresses), "--interval", "0.1", "--once", "--json"]
        figures = json.loads(run_top("--cache", local_servers.cache_address, *arguments).stdout)
        (mine,) = [one for one in figures["sequences"] if one["sequence_id"] == generation.sequence_id]
        client.close(generation.sequence_id)
    assert mine["prompt_tokens"] + 5 <= mine["tokens_seen"] <= mine["prompt_tokens"] + 6
    assert mine["resident_tokens"] + mine["demoted_tokens"] == mine["tokens_seen"]
    (ours,) = figures["ranks"]
    assert ours["device_limit_bytes"] == 1 << 30
    assert ours["cache_up"]
    assert figures["tiers"][0]["used_bytes"] >= mine["host_bytes"] > 0
    assert figures["service"]["ranks"] == 1


def test_json_is_what_a_program_wants() -> None:
    one = sample(1.0, [sequence(17, 100)], rank(1, 1, 1), RankSample("b:2", error="away"))
    figures = json.loads(json.dumps(as_json(one, rates_between(None, one))))
    assert figures["tiers"][0] | {"failures": 0} == figures["tiers"][0]
    assert figures["sequences"][0]["demoted_tokens"] == 75
    assert figures["ranks"][1] == {"address": "b:2", "error": "away"}
