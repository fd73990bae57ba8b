"""Writes expected_ids.json: greedy tokens of the full cache from the independent implementation.

python expected_ids.py MODEL.gguf .../janeaustenr/data/Rdata expected_ids.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import janeausten
import numpy as np
from llama_numpy import FullCache, Llama
from tokenizer import chat_prompt, encode, load_tokenizer

NEW_TOKENS = 64
QUESTION = "Why is the sky blue?"
EXCERPTS = ((10000, 200), (24000, 1200))  # token offset in Northanger Abbey, tokens
METHOD = (
    "tests/reference/expected_ids.py: numpy, float32, weights dequantised by gguf.quants, whole prompt in one pass, "
    "then one token at a time over the full cache; every token is the argmax of the logits and generation does not "
    "stop at an end token. Excerpts are slices of the token ids of northangerabbey (R package janeaustenr, lines "
    "joined by newlines), tokenised as a whole, no token added."
)


def greedy(model: Llama, prompt: list[int]) -> dict[str, Any]:
    """Ids, the first step's five best logits, and of every step the best logit and its lead on the second."""
    cache = FullCache(model.shape)
    hidden = model.hidden(prompt, range(len(prompt)), cache.attend)
    ids: list[int] = []
    best: list[float] = []
    margins: list[float] = []
    first_top5: list[tuple[int, float]] = []
    while True:
        logits = model.logits(hidden[-1])
        order = np.argsort(-logits, kind="stable")[:5]
        if not ids:
            first_top5 = [(int(token), round(float(logits[token]), 5)) for token in order]
        ids.append(int(order[0]))
        best.append(round(float(logits[order[0]]), 5))
        margins.append(round(float(logits[order[0]] - logits[order[1]]), 5))
        if len(ids) == NEW_TOKENS:
            return {"ids": ids, "first_step_top5": first_top5, "best_logits": best, "margins": margins}
        hidden = model.hidden(ids[-1:], [len(prompt) + len(ids) - 1], cache.attend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("data", type=Path, help="path of janeaustenr's Rdata.rdb without its ending")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.model)
    book = encode(tokenizer, janeausten.read_book(args.data))
    chat: dict[str, Any] = {"user": QUESTION}
    prompts = [("chat", chat, encode(tokenizer, chat_prompt(QUESTION)))]
    for offset, tokens in EXCERPTS:
        source = {"book": "northangerabbey", "offset": offset, "tokens": tokens}
        prompts.append((f"excerpt_{tokens}", source, book[offset : offset + tokens]))

    model = Llama(args.model)
    cases = []
    for name, source, prompt in prompts:
        case = greedy(model, prompt)
        print(f"{name}: {len(prompt)} tokens, smallest margin {min(case['margins'])}")
        print(tokenizer.decode(case["ids"]), end="\n\n")
        cases.append({"name": name, "source": source, "prompt_ids": prompt, **case})
    written = {
        "model_sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
        "method": METHOD,
        "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    args.out.write_text(_compact(written))


def _compact(value: dict[str, Any]) -> str:
    """JSON with one field a line, so that differences can be read."""
    lines = []
    for key, item in value.items():
        if key != "cases":
            lines.append(f" {json.dumps(key)}: {json.dumps(item)}")
            continue
        cases = [",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in case.items()) for case in item]
        lines.append(' "cases": [\n' + ",\n".join("  {\n" + case + "\n  }" for case in cases) + "\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
