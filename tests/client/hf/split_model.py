"""One rank of hf_torchrun_test.py, or all of a model in one process: runs jobs and writes what each gave.

python -m torch.distributed.run --nproc-per-node 2 split_model.py jobs.json out
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reference"))
import heavywater.hf
from hf_models import greedy, left_padded, prompt

warnings.simplefilter("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def inputs_of(job: dict) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return left_padded([prompt(tokens)[0] for tokens in job["prompts"]])


def run(job: dict) -> dict:
    split = {"distributed_config": {"tp_plan": "auto"}} if "WORLD_SIZE" in os.environ else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32, **split).eval()
    model.generation_config.eos_token_id = None
    try:
        cache = heavywater.hf.attach(model, **job["options"])
        tokens = greedy(model, inputs_of(job), job["tokens"], cache=cache, num_beams=job.get("beams", 1))
        if job.get("crop"):
            cache.crop(-job["crop"])
            columns = cache.get_seq_length()
            again = torch.cat([inputs_of(job)["input_ids"], tokens], dim=1)[:, : columns + 1]
            tokens = torch.cat([tokens, greedy(model, again, job["tokens"], cache=cache)], dim=1)
    except Exception as error:  # what each rank says is compared
        return {"error": f"{type(error).__name__}: {error}"}
    rows = range(len(cache.rows.rows))
    sets = [[kept.positions.tolist() for kept in cache.kept(row)] for row in rows]
    stats = cache.stats()
    return {
        "tokens": tokens.tolist(),
        "sets": sets,
        "kv_bytes": stats.kv_bytes,
        "resident": stats.tokens_resident,
        "reads": stats.recall_reads,
    }


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = [run(job) for job in jobs]
    out = Path(sys.argv[2]) / f"rank{os.environ.get('RANK', '-all')}.json"
    out.write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
