"""Another process of hf_session_test.py: goes on with a session.

python resume_session.py CHECKPOINT '[{"options": ..., "ids": [[...]], "tokens": 16}, ...]'
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reference"))
import heavywater.hf
from hf_models import greedy

warnings.simplefilter("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def main() -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    results = []
    for job in json.loads(sys.argv[2]):
        cache = heavywater.hf.attach(model, resume=True, **job["options"])
        seen = cache.get_seq_length()
        tokens = greedy(model, torch.tensor(job["ids"]), job["tokens"], cache=cache)
        sets = [kept.positions.tolist() for kept in cache.kept()]
        results.append({"seen": seen, "tokens": tokens.tolist(), "sets": sets})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
