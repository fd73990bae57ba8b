"""Tensor parallel, as Transformers does it: `torchrun`, a tp_plan, and scores that the ranks reduce. Each rank has its
heads' cache, and all of them the sets and tokens of one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from heavywater.hf.tensor_parallel import listen_address
from hf_models import tiny

HERE = Path(__file__).resolve().parent
BUDGET = {"heavy_tokens": 12, "recent_tokens": 8, "window": 10, "min_budget_tokens": 1}
H2O = {"policy": "h2o", **BUDGET}
RECALL = {"policy": "snapkv_h2o", "recall": True, "page_tokens": 32, **BUDGET}
TIMEOUT_S = 600


def run(jobs, out, ranks):
    """What each rank gave, [ranks] of a result for each job; ranks 1: without torchrun."""
    (out / "jobs.json").write_text(json.dumps(jobs))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(HERE / "split_model.py"), str(out / "jobs.json"), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, said[-4000:]
    names = [f"rank{rank}.json" for rank in range(ranks)] if ranks > 1 else ["rank-all.json"]
    return [json.loads((out / name).read_text()) for name in names]


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox")
WITH_FULL = ("llama", "gpt_neox")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(job, what one process gave, what each of two ranks gave), by name."""
    out = tmp_path_factory.mktemp("torchrun")
    torch.manual_seed(7)
    jobs = {}
    for name in FAMILIES:
        checkpoint = str(out / name)
        heads = {} if name == "gpt_neox" else {"num_key_value_heads": 2}
        tiny(name, **heads).save_pretrained(checkpoint)
        for policy in ({"policy": "full"}, H2O) if name in WITH_FULL else (H2O,):
            jobs[f"{name} {policy['policy']}"] = {"checkpoint": checkpoint, "options": policy, "prompts": [70]}
    llama = str(out / "llama")
    jobs["recall"] = {"checkpoint": llama, "options": RECALL, "prompts": [70]}
    jobs["padded"] = {"checkpoint": llama, "options": H2O, "prompts": [70, 41]}
    jobs["beams"] = {"checkpoint": llama, "options": {"policy": "full"}, "prompts": [70], "beams": 3}
    jobs["crop"] = {"checkpoint": llama, "options": {**H2O, "crop_tokens": 8}, "prompts": [70], "crop": 6}
    jobs["too small"] = {"checkpoint": llama, "options": {**H2O, "device_memory_bytes": 1 << 10}, "prompts": [70]}
    tiny("gemma").save_pretrained(str(out / "one KV head"))
    jobs["one KV head"] = {"checkpoint": str(out / "one KV head"), "options": H2O, "prompts": [70]}
    jobs["after errors"] = {"checkpoint": llama, "options": H2O, "prompts": [70]}
    for job in jobs.values():
        job["tokens"] = 20
    alone = run(list(jobs.values()), out, 1)[0]
    ranks = run(list(jobs.values()), out, 2)
    return {name: (alone[i], [rank[i] for rank in ranks]) for i, name in enumerate(jobs)}


@pytest.mark.parametrize("name", [*(f"{family} full" for family in WITH_FULL), "beams"])
def test_ranks_give_the_tokens_of_one_process(results, name):
    alone, ranks = results[name]
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]


@pytest.mark.parametrize(
    "name", [*(f"{family} h2o" for family in FAMILIES), "recall", "padded", "crop", "after errors"]
)
def test_ranks_keep_the_sets_of_one_process(results, name):
    alone, ranks = results[name]
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]
        assert rank["sets"] == alone["sets"]
        assert rank["resident"] == alone["resident"] == 20 * len(alone["sets"])


def test_each_rank_holds_its_heads_alone(results):
    alone, ranks = results["llama h2o"]
    for rank in ranks:
        assert rank["kv_bytes"] < 0.7 * alone["kv_bytes"]


def test_each_head_reads_its_own_demoted_tokens(results):
    alone, ranks = results["recall"]
    assert sum(rank["reads"] for rank in ranks) == alone["reads"] > 0


def test_what_is_refused_is_refused_on_every_rank(results):
    for name, words in (("too small", "RESOURCE_EXHAUSTED"), ("one KV head", "want a multiple of the 2 ranks")):
        for rank in results[name][1]:
            assert words in rank["error"], name


def test_where_a_rank_listens(monkeypatch):
    for name in ("HEAVYWATER_LISTEN_ADDRESS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert listen_address() == "127.0.0.1"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert listen_address() == "127.0.0.1"  # from where the master is reached
    monkeypatch.setenv("HEAVYWATER_LISTEN_ADDRESS", "10.1.2.3")
    assert listen_address() == "10.1.2.3"
