"""The `heavywater` command as a user runs it: a process, its output, its exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from client_fakes import PIECES, FakeServers
from heavywater import __version__
from heavywater.cli.app import app
from heavywater.v1 import generation_pb2
from typer.testing import CliRunner


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heavywater", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def run_json(*arguments: str) -> dict[str, object]:
    """The one JSON object on standard output; anything else there fails."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_version_is_printed() -> None:
    assert run("--version").stdout == f"heavywater {__version__}\n"


def test_generate_prints_the_text_and_describes_the_run_apart_from_it(servers: FakeServers) -> None:
    done = run("generate", "abc", "-n", "4", "--address", servers.address)
    assert done.returncode == 0
    assert done.stdout == "bcde\n"
    assert "sequence 42" in done.stderr


def test_suspend_and_resume_say_what_they_have_done(servers: FakeServers) -> None:
    done = run("suspend", "42", "--ttl", "90", "--cache", servers.address)
    assert done.stdout == "sequence 42 is kept for 90 s with 20 tokens\n"
    assert run("resume", "42", "--cache", servers.address).returncode == 0
    assert servers.cache.suspended == {}


def test_generate_json_is_one_object(servers: FakeServers) -> None:
    figures = run_json("generate", "abc", "-n", "4", "--address", servers.address)
    assert figures["text"] == "bcde"
    assert figures["finish_reason"] == "length"


def test_generate_reads_a_file_or_standard_input(servers: FakeServers, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    assert run("generate", "--file", str(file), "--address", servers.address).returncode == 0
    assert run("generate", "-", "--address", servers.address, stdin="from stdin").returncode == 0
    assert [request.text for request in servers.worker.requests] == ["from a file", "from stdin"]


def test_generate_chat_sends_the_rendered_template(servers: FakeServers) -> None:
    run("generate", "hi", "--chat", "--system", "be kind", "--address", servers.address)
    assert servers.worker.requests[0].text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generate_leaves_the_policy_to_servers_that_run_unless_one_is_asked_for(servers: FakeServers) -> None:
    for options in ([], ["--budget", "0.4"], ["--policy", "snapkv_h2o"]):
        assert run("generate", "hi", *options, "--address", servers.address).returncode == 0
    asked = [request.policy if request.HasField("policy") else None for request in servers.worker.requests]
    assert asked[0] is None
    assert [policy.policy for policy in asked[1:] if policy] == ["snapkv_h2o", "snapkv_h2o"]
    assert [policy.heavy_ratio for policy in asked[1:] if policy] == [0.2, 0.1]


def test_generate_asks_for_the_budget_in_equal_halves(servers: FakeServers) -> None:
    run("generate", "hi", "--budget", "0.4", "--policy", "h2o", "--address", servers.address)
    policy = servers.worker.requests[0].policy
    assert (policy.policy, policy.heavy_ratio, policy.recent_ratio) == ("h2o", 0.2, 0.2)


def test_generate_sends_sinks_decay_and_exposure_and_leaves_scissorhands_its_own_recent(servers: FakeServers) -> None:
    options = ["--policy", "scissorhands", "--sinks", "0", "--decay", "0.9", "--exposure", "0.5"]
    assert run("generate", "hi", *options, "--address", servers.address).returncode == 0
    policy = servers.worker.requests[0].policy
    assert (policy.heavy_ratio, policy.recent_ratio, policy.recent_tokens) == (0.2, 0, 0)
    assert (policy.HasField("sink_tokens"), policy.sink_tokens) == (True, 0)
    assert (policy.decay, policy.exposure) == (0.9, 0.5)


def test_generate_asks_for_recall_by_its_preset_and_the_share_of_bytes(servers: FakeServers) -> None:
    for arguments in (["--budget", "0.1"], ["--device-ratio", "0.1", "--recall-tokens", "all"], ["--no-recall"]):
        assert run("generate", "hi", "--policy", "recall", *arguments, "--address", servers.address).returncode == 0
    tenth, everything, without = (request.policy for request in servers.worker.requests)
    assert (tenth.policy, tenth.device_ratio, tenth.heavy_ratio) == ("recall", 0.1, 0)
    assert not tenth.HasField("recall")
    assert (everything.device_ratio, everything.recall_all) == (0.1, True)
    assert without.HasField("recall")
    assert not without.recall


def test_generate_adds_recall_to_any_policy(servers: FakeServers) -> None:
    options = ["--policy", "h2o", "--recall", "--recall-tokens", "32", "--device-ratio", "0.2"]
    figures = run_json("generate", "hi", *options, "--address", servers.address)
    policy = servers.worker.requests[0].policy
    assert (policy.policy, policy.recall, policy.recall_tokens) == ("h2o", True, 32)
    assert (policy.device_ratio, policy.recent_tokens, policy.heavy_ratio) == (0.2, 32, 0)
    assert figures["recall"] == {
        "recall_tokens": 32,
        "reads_mean": 2.5,
        "reads_max": 7,
        "promoted": 3,
        "mass_missing": 0.125,
        "sketch_bytes": 9,
    }


def test_generate_describes_what_recall_did(servers: FakeServers) -> None:
    done = run("generate", "hi", "--policy", "recall", "--address", servers.address)
    said = " ".join(done.stderr.split())
    assert "read 2.5 demoted tokens in place (at most 7), 12.5% of attention missing" in said


def test_generate_shows_what_was_read_in_the_text_below_the_answer(servers: FakeServers) -> None:
    options = ["abc", "-n", "4", "--question-after", "de", "--policy", "recall", "--address", servers.address]
    done = run("generate", *options, "--show-reads")
    assert done.returncode == 0, done.stderr
    answer, _, text, *_ = done.stdout.split("\n")
    assert (answer, text) == ("defg", "[[ab]]c[[[d]]]e")
    assert "2 tokens, 12 reads" in " ".join(done.stdout.split())
    assert run_json("generate", *options, "--show-reads")["reads"] == [[2, 9], [0, 3]]
    assert run_json("generate", *options)["reads"] is None
    assert [request.return_reads for request in servers.worker.requests] == [True, True, False]


def test_generate_shows_no_reads_without_recall() -> None:
    for arguments in (["--policy", "h2o"], ["--policy", "recall", "--no-recall"]):
        done = run("generate", "hi", "--show-reads", *arguments)
        assert done.returncode == 1
        assert "--show-reads with --policy" in done.stderr
        assert "want --policy recall or --recall" in done.stderr


@pytest.mark.parametrize("budget", ["0", "7", "-0.1"])
def test_generate_refuses_a_budget_that_is_no_fraction(budget: str) -> None:
    done = run("generate", "hi", f"--budget={budget}")
    assert (done.returncode, done.stderr) == (
        1,
        f"error: --budget {budget}, want a fraction above 0 and at most 1\n",
    )


def test_a_server_that_does_not_answer_is_told_with_what_starts_one() -> None:
    done = run("generate", "hi", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: UNAVAILABLE: ")
    assert "`heavywater serve` starts one" in done.stderr


@pytest.mark.parametrize("tokens", ["0", "-1", "some"])
def test_generate_refuses_a_number_of_recalled_tokens_that_is_none(tokens: str) -> None:
    done = run("generate", "hi", f"--recall-tokens={tokens}")
    assert done.returncode == 1
    assert done.stderr == f'error: --recall-tokens {tokens}, want a number from 1 up or "all"\n'


def test_generate_appends_a_question_after_the_text(servers: FakeServers) -> None:
    run("generate", "a text", "--question-after", "why", "--address", servers.address)
    figures = run_json("generate", "a text", "--chat", "--question-after", "why", "--address", servers.address)
    plain, chat = servers.worker.requests
    assert (plain.text, plain.suffix_text) == ("a text", "why")
    assert chat.text == "<|im_start|>user\na text\n\n"
    assert chat.suffix_text == "why<|im_end|>\n<|im_start|>assistant\n"
    assert figures["suffix_tokens"] == len(chat.suffix_text)


@pytest.mark.parametrize("arguments", [[], ["text", "--file", "x"]])
def test_generate_wants_one_input(arguments: list[str]) -> None:
    done = run("generate", *arguments)
    assert done.returncode == 1
    assert done.stderr == "error: give a text or --file, one of them\n"


def test_a_server_that_is_not_there_is_one_line_of_error() -> None:
    done = run("generate", "hi", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: UNAVAILABLE")
    assert "Traceback" not in done.stderr


def test_inspect_shows_the_text_the_counts_and_the_heaviest_tokens(servers: FakeServers) -> None:
    done = run("inspect", "42", "--cache", servers.address, "--address", servers.address)
    assert done.returncode == 0, done.stderr
    assert "{a}bc[d]e[fg]hijklmnopqr<st>" in done.stdout, "marks, since there are no colours"
    assert "sinks 1" in done.stdout
    assert "heavy 2" in done.stdout
    assert "'d'" in done.stdout


def test_inspect_shows_in_one_line_how_much_of_each_stretch_is_on_the_device(servers: FakeServers) -> None:
    lines = run("inspect", "42", "--cache", servers.address, "--address", servers.address).stdout.splitlines()
    overview = lines[lines.index("on the device, from the first token to the last:") + 1]
    # Two layers: sinks, a heavy position each, the last two of twenty.
    assert overview.rstrip() == "█" + " " * 2 + "█" + " " + "▄" * 2 + " " * 11 + "█" * 2


def test_inspect_json_gives_the_sets_of_each_layer(servers: FakeServers) -> None:
    figures = run_json("inspect", "42", "--cache", servers.address, "--address", servers.address)
    assert figures["counts"] == pytest.approx({"sinks": 1, "recent": 2, "heavy": 2, "demoted": 15, "dropped": 0})
    assert [one["heavy"] for one in figures["sets"]] == [[3, 5], [3, 6]]
    first = figures["heaviest"][0]
    assert (first["position"], first["token"], first["heavy_share"], first["score"]) == (3, "d", 1.0, 4.0)


def test_inspect_of_one_layer_shows_that_layer_alone(servers: FakeServers) -> None:
    figures = run_json("inspect", "42", "--cache", servers.address, "--layer", "1")
    assert [one["layer"] for one in figures["sets"]] == [1]
    assert figures["heaviest"][1]["position"] == 6


def test_eval_ppl_json_has_a_row_for_each_policy_scope_and_budget(servers: FakeServers, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ab cd ef " * 20)
    sizes = ["--offsets", "0,10", "--prompt", "20", "--continue", "5"]
    rows = ["--policies", "h2o", "--scopes", "layer,kv_head", "--budgets", "0.5"]
    figures = run_json("eval", "ppl", "--text", str(text), *sizes, *rows, "--address", servers.address)
    names = ["policy", "scope", "budget", "recall", "recall_tokens"]
    names += ["bytes_ratio", "ppl", "kl", "agree", "mass_kept"]
    assert [list(row) for row in figures["rows"]] == [names] * 3
    assert [(row["policy"], row["scope"], row["budget"]) for row in figures["rows"]] == [
        ("full", None, None),
        ("h2o", "layer", 0.5),
        ("h2o", "kv_head", 0.5),
    ]
    assert figures["rows"][1]["bytes_ratio"] == 0.5
    assert figures["rows"][1]["kl"] > 0


def test_eval_ppl_compares_recall_at_equal_bytes(servers: FakeServers, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ab cd ef " * 20)
    sizes = ["--offsets", "0", "--prompt", "20", "--continue", "5", "--budgets", "0.2"]
    rows = ["--recall", "--recall-tokens", "32,all"]
    figures = run_json("eval", "ppl", "--text", str(text), *sizes, *rows, "--address", servers.address)
    assert [(row["policy"], row["scope"], row["recall"], row["recall_tokens"]) for row in figures["rows"]] == [
        ("full", None, False, None),
        ("snapkv_h2o", "layer", False, None),
        ("snapkv_h2o", "layer", True, 32),
        ("snapkv_h2o", "layer", True, "all"),
    ]
    ordered, some, everything = (request.policy for request in servers.worker.requests[1:])
    assert {ordered.device_ratio, some.device_ratio, everything.device_ratio} == {0.2}


@pytest.fixture
def haystack(servers: FakeServers, tmp_path: Path) -> list[str]:
    """Arguments of a small evaluation; the server answers 12345."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"sentence {i} says nothing at all." for i in range(100)))
    servers.worker.answer = lambda request: "12345"
    return ["--text", str(text), "--tokens", "200", "--variants", "1", "--address", servers.address]


def test_eval_needle_fails_when_the_full_cache_misses_and_lists_what(haystack: list[str]) -> None:
    done = run("eval", "needle", "--question-after", *haystack, "--json")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "error: the full cache finds 0 of 5: seed 0, " in said
    assert "got '12345'" in said
    names = ["policy", "preset", "budget", "recall", "recall_tokens", "question_after", "bytes_ratio", "hits", "total"]
    rows = json.loads(done.stdout)["rows"]
    assert [list(row) for row in rows] == [names] * 5
    assert [(row["policy"], row["budget"], row["recall_tokens"]) for row in rows] == [
        ("full", None, None),
        ("snapkv_h2o", 0.2, None),
        ("snapkv_h2o", 0.2, 64),
        ("snapkv_h2o", 0.1, None),
        ("snapkv_h2o", 0.1, 64),
    ]
    assert {(row["question_after"], row["hits"], row["total"]) for row in rows} == {(True, 0, 5)}


def test_eval_needle_asks_before_and_after_each_seed_by_default(haystack: list[str], servers: FakeServers) -> None:
    codes = []

    def answer(request: generation_pb2.GenerateRequest) -> str:
        text = "".join(PIECES[i] for i in request.tokens)
        codes.append(re.search(r"isĠ(\d{5})\.", text).group(1))
        return codes[-1]

    servers.worker.answer = answer
    options = ["--seeds", "0,1", "--budgets", "0.5", "--no-recall"]
    done = run("eval", "needle", *options, *haystack)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("10/10") == 4
    assert len(set(codes)) == 10
    assert [bool(request.suffix_tokens) for request in servers.worker.requests].count(True) == 20
    assert len(servers.worker.requests) == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "9,x"], "--prompt-tokens 9,x, want MIN,MAX or one number"),
        (["--new-tokens", "1,2,3"], "--new-tokens 1,2,3, want MIN,MAX or one number"),
        (["--new-tokens", "8,4"], "new_tokens is 8,4, want"),
        (["--address", "127.0.0.1:1"], "give --cache, too"),
        (["--metrics", "127.0.0.1:1"], "--metrics without --address"),
        (["--policy", "h2o", "--budget", "2"], "--budget 2, want"),
    ],
)
def test_load_refuses_what_it_cannot_run_before_it_starts_anything(arguments: list[str], message: str) -> None:
    done = run("load", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""


def run_here(*arguments: str) -> Result:
    """In this process: a message is all that is looked at."""
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("generate --file PICTURE", "picture.png is no UTF-8 text"),
        ("generate hi --system kind", "--system without --chat"),
        ("generate hi --seed -1", "'--seed'"),
        ("generate hi --top-k 99999999999", "'--top-k'"),
        ("generate hi -n 99999999999", "'-n'"),
        ("generate hi --sinks 99999999999", "'--sinks'"),
        ("generate hi --policy recall --recall-tokens 99999999999", "--recall-tokens 99999999999"),
        ("chat --seed -1", "'--seed'"),
        ("inspect -- -1", "'SEQ'"),
        ("inspect 99999999999999999999", "'SEQ'"),
        ("load --rate nan", "--rate nan"),
        ("load --metrics http://x/metrics", "--metrics http://x/metrics"),
        ("eval ppl --text PICTURE", "picture.png is no UTF-8 text"),
        ("eval ppl --offsets x", "--offsets x"),
        ("eval ppl --budgets x", "--budgets x"),
        ("eval needle --seeds x", "--seeds x"),
        ("eval sweep --offsets 1,x", "--offsets 1,x"),
        ("eval hypothesis --steps x", "--steps x"),
    ],
)
def test_files_and_numbers_that_make_no_sense_are_named(
    servers: FakeServers, tmp_path: Path, arguments: str, complaint: str
) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"\x89PNG")
    words = arguments.replace("PICTURE", str(file)).split()
    addresses = ["--cache", servers.address]
    if words[0] != "inspect" or "--" not in words:
        words += addresses if words[0] == "inspect" else ["--address", servers.address, *addresses]
    result = run_here(*words)
    assert result.exit_code != 0
    said = f"{result.exception} {result.output}"
    assert complaint in said.replace("\n", " ")
    assert servers.worker.requests == []
