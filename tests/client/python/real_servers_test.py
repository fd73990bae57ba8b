"""The commands against real servers and the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from heavywater import Client, PolicyOptions
from heavywater.eval.dump import dump_path, totals_of_dumps
from heavywater.inspection import KINDS
from heavywater.local import LocalServers

PROMPT, CONTINUE, OFFSETS = 256, 24, [0, 300]


def run_json(servers: LocalServers, *arguments: str) -> dict[str, object]:
    addresses = ["--address", servers.worker_address, "--cache", servers.cache_address]
    command = [sys.executable, "-m", "heavywater", *arguments, *addresses, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_clients_tokenizer_gives_the_servers_tokens_and_text(local_servers: LocalServers) -> None:
    text = "In 1807, Catherine's naïve 12 guests—laughed!\n\n  Twice\t<|im_end|>."
    with local_servers.client() as client:
        model = client.get_model()
        assert model.decode(model.encode(text)) == text
        by_text = client.generate(text, max_new_tokens=8, ignore_eos=True)
        by_ids = client.generate(model.encode(text), max_new_tokens=8, ignore_eos=True)
        assert [token.token for token in by_text] == [token.token for token in by_ids]
        assert by_text.summary.prompt_tokens == len(model.encode(text))


def test_generate_answers_in_the_chat_format(local_servers: LocalServers) -> None:
    figures = run_json(local_servers, "generate", "--chat", "What is the capital of France?", "-n", "24")
    assert "Paris" in figures["text"]
    assert figures["tokens_seen"] > figures["prompt_tokens"] > 20


def test_a_conversation_reads_for_the_server_as_its_template_says(local_servers: LocalServers) -> None:
    """What the server renders is what Jinja makes of the model's template."""
    conversations = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is water wet?"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": " Hello!\n"},
            {"role": "user", "content": "Naïve 你好 🙂"},
        ],
    ]
    with local_servers.client() as client:
        model = client.get_model()
        for messages in conversations:
            answered = client.generate(messages, max_new_tokens=8)
            rendered = client.generate(model.chat(messages), max_new_tokens=8)
            assert [token.token for token in answered] == [token.token for token in rendered]
            assert answered.summary.prompt_tokens == rendered.summary.prompt_tokens


def test_diff_names_what_a_policy_evicted_and_recall_reads_it(local_servers: LocalServers, tmp_path: Path) -> None:
    words = (Path(__file__).parents[3] / "docs/architecture.md").read_text()
    text = tmp_path / "text.txt"
    text.write_text(words[:1500] + "\nThe secret code of the harbour is 48213.\n" + words[1500:5000])
    question = [
        "--chat",
        "--file",
        str(text),
        "--question-after",
        "What is the secret code of the harbour?",
        "-n",
        "16",
    ]
    evicted = run_json(local_servers, "diff", *question, "--policy", "streaming")
    assert "48213" in evicted["full_text"]
    assert "48213" not in evicted["policy_text"]
    assert evicted["verdict"] == "evicted"
    assert evicted["missing"]
    recalled = run_json(local_servers, "generate", *question, "--policy", "recall", "--show-reads")
    assert "48213" in recalled["text"]
    assert len(recalled["reads"]) > 10


def test_logits_and_logprob_of_a_forced_token_agree(local_servers: LocalServers) -> None:
    with local_servers.client() as client:
        for token in client.generate([1, 2, 3], forced_tokens=[40, 50], return_logits=True):
            logits = token.logits.astype(np.float64)
            expected = logits[token.token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert token.logprob == pytest.approx(expected, abs=1e-4)


def test_inspect_accounts_for_every_position(local_servers: LocalServers) -> None:
    with local_servers.client() as client:
        policy = PolicyOptions(policy="snapkv_h2o", heavy_tokens=8, recent_tokens=8)
        generation = client.generate("It was a dark and stormy night. " * 10, max_new_tokens=16, policy=policy)
        generation.text()
        figures = run_json(local_servers, "inspect", str(generation.sequence_id))
    assert figures["tokens_seen"] == generation.summary.counts.tokens_seen
    assert sum(figures["counts"][kind] for kind in KINDS) == pytest.approx(figures["tokens_seen"])
    assert figures["counts"]["heavy"] == pytest.approx(8)
    assert figures["counts"]["dropped"] == 0
    assert figures["heaviest"][0]["token"]


def test_demoted_kv_reads_back_through_the_client(local_servers: LocalServers) -> None:
    with local_servers.client() as client:
        policy = PolicyOptions(policy="h2o", heavy_tokens=4, recent_tokens=4)
        generation = client.generate(
            "one two three four five six seven eight nine ten", max_new_tokens=4, policy=policy
        )
        generation.text()
        (layer,) = client.get_sets(generation.sequence_id, layers=[5])
        sequence = client.get(generation.sequence_id)
        for position in layer.demoted:
            keys, values = client.read(sequence, 5, 0, int(position), 1)
            assert keys.shape == values.shape == (1, sequence.fingerprint.head_dim)
            assert keys.any()
        assert len(layer.demoted) > 0


def test_eval_ppl_can_be_computed_again_from_its_dump(local_servers: LocalServers, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((Path(__file__).parents[3] / "README.md").read_text() * 2)
    sizes = ["--prompt", str(PROMPT), "--continue", str(CONTINUE), "--offsets", ",".join(map(str, OFFSETS))]
    rows = ["--policies", "snapkv_h2o", "--scopes", "layer,kv_head", "--budgets", "0.2"]
    figures = run_json(local_servers, "eval", "ppl", "--text", str(text), *sizes, *rows, "--dump", str(tmp_path))
    for row, name in zip(figures["rows"], ("full", "snapkv_h2o-layer-0.2", "snapkv_h2o-kv_head-0.2"), strict=True):
        totals = totals_of_dumps(tmp_path, name, OFFSETS)
        assert totals.positions == CONTINUE * len(OFFSETS)
        again = (totals.ppl, totals.mean_kl, totals.agree)
        assert again == pytest.approx((row["ppl"], row["kl"], row["agree"]), rel=1e-9, abs=1e-12)
        assert _kept_per_set(tmp_path, name) == {int(0.2 * PROMPT) if row["budget"] else PROMPT + CONTINUE - 1}
    assert figures["rows"][1]["bytes_ratio"] < 0.5 < figures["rows"][0]["bytes_ratio"]


def _kept_per_set(folder: Path, row_name: str) -> set[int]:
    with np.load(dump_path(folder, row_name, OFFSETS[0])) as dump:
        return set(np.diff(dump["set_begin"]).tolist())


def test_a_budget_that_cannot_work_is_refused_by_field(local_servers: LocalServers) -> None:
    with Client(worker=local_servers.worker_address) as client:
        policy = PolicyOptions(policy="h2o", heavy_tokens=4, recent_tokens=4, sink_tokens=100)
        with pytest.raises(Exception, match="sink_tokens") as caught:
            client.generate("hello", max_new_tokens=1, policy=policy).text()
    assert caught.value.code == "INVALID_ARGUMENT"
