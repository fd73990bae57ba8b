"""snapkv_h2o with budgets that differ by KV head (Ada-KV, arXiv:2407.11550), by layer, or by both, against even ones.

Budgets follow the pooled votes at the prompt's end: the same total is split as the best positions of all
are spread, with a floor of the even share; half of each budget is recent in decode.

    python uneven_budgets.py MODEL.gguf .../janeaustenr/data/Rdata --prompt 512 --continue 48 --offsets 2000,52000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import janeausten
import numpy as np
from llama_numpy import Floats, Llama
from policies import BatchCache, Doubles, Ints, LayerCache, Policy, PromptLayer, Scope, pooled
from ppl import Row, log_softmax, run_full
from tokenizer import encode, load_tokenizer

WINDOW, KERNEL, FLOOR = 32, 5, 0.2
Split = Literal["even", "heads", "layers", "both"]
SPECS: list[tuple[Scope, Split]] = [
    ("kv_head", "even"),
    ("kv_head", "heads"),
    ("kv_head", "layers"),
    ("kv_head", "both"),
    ("layer", "even"),
    ("layer", "layers"),
]


class HeadCaches:
    """A layer whose KV heads have budgets of their own; scope layer: one budget for all."""

    def __init__(self, prompt: PromptLayer, budgets: Ints, scope: Scope) -> None:
        heads = [slice(None)] if scope == "layer" else [slice(i, i + 1) for i in range(len(budgets))]
        self._caches = []
        for head, budget in zip(heads, budgets, strict=False):
            policy = Policy("snapkv_h2o", scope, budget_tokens=int(budget), recent_tokens=max(int(budget) // 2, 1))
            of_head = PromptLayer(prompt.k[head], prompt.v[head], prompt.column_sums[head], prompt.window_sums[head])
            self._caches.append(LayerCache(policy, of_head))

    def append(self, q: Floats, k: Floats, v: Floats) -> Floats:
        count = len(self._caches)
        parts = zip(self._caches, np.split(q, count), np.split(k, count), np.split(v, count), strict=True)
        return np.concatenate([cache.append(q1, k1, v1) for cache, q1, k1, v1 in parts])


def split(votes: Doubles, total: int) -> Ints:
    """Slots for each row of votes [rows][columns]: as the best `total` of all are spread, above a floor.

    As worker/policy/head_budgets.h divides them; what rounding leaves goes to the rows with most of the best.
    """
    rows, columns = votes.shape
    best = np.argsort(-votes.ravel(), kind="stable")[:total]
    counts = np.bincount(best // columns, minlength=rows)
    even = total // rows
    least = int(FLOOR * even + 1e-6)
    slots = least + (even - least) * counts // max(even, 1)
    while slots.sum() < total:
        for row in np.argsort(-counts, kind="stable"):
            if slots.sum() < total and slots[row] < columns:
                slots[row] += 1
    return slots.astype(np.int64)


def budgets_of(prompt: Sequence[PromptLayer], fraction: float, how: Split) -> Ints:
    """[layers][KV heads]; the window stays in each."""
    heads, tokens, _ = prompt[0].k.shape
    layers, each = len(prompt), int(fraction * tokens) - WINDOW
    votes = np.stack([pooled(layer.window_sums[:, : tokens - WINDOW], "avg", KERNEL) for layer in prompt])
    if how == "even":
        slots = np.full((layers, heads), each)
    elif how == "heads":
        slots = np.stack([split(of_layer, each * heads) for of_layer in votes])
    elif how == "layers":
        slots = np.repeat(split(votes.mean(axis=1), each * layers)[:, None], heads, axis=1)
    else:
        slots = split(votes.reshape(layers * heads, -1), each * layers * heads).reshape(layers, heads)
    return slots + WINDOW


def run_window(
    model: Llama, window: Sequence[int], prompt_tokens: int, rows: Sequence[Row], budgets: list[float]
) -> None:
    full_logits, prompt = run_full(model, window, prompt_tokens)
    sequences = []
    for fraction in budgets:
        for scope, how in SPECS:
            slots = budgets_of(prompt, fraction, how)
            sequences.append([HeadCaches(layer, own, scope) for layer, own in zip(prompt, slots, strict=True)])
    caches = BatchCache(sequences)  # type: ignore[arg-type]  # append() is all that it asks for
    logits = np.repeat(full_logits[:1], len(rows), axis=0)  # the prompt is exact
    for step, target in enumerate(window[prompt_tokens:]):
        if step > 0:
            position = prompt_tokens + step - 1
            hidden = model.hidden([window[position]] * len(rows), [position] * len(rows), caches.attend)
            logits = model.logits(hidden)
        full_log_p = log_softmax(full_logits[step])
        for row, log_p in zip(rows, log_softmax(logits), strict=True):
            row.add(log_p, full_log_p, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("data", type=Path, help="path of janeaustenr's Rdata.rdb without its ending")
    parser.add_argument("--offsets", default="2000,52000")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--continue", type=int, default=48, dest="continuation")
    parser.add_argument("--budgets", default="0.1,0.2", help="fractions of the prompt")
    args = parser.parse_args()

    ids = encode(load_tokenizer(args.model), janeausten.read_book(args.data))
    model = Llama(args.model)
    budgets = [float(part) for part in args.budgets.split(",")]
    rows = [Row(Policy("full"), fraction) for fraction in budgets for _ in SPECS]
    for offset in map(int, args.offsets.split(",")):
        run_window(model, ids[offset : offset + args.prompt + args.continuation], args.prompt, rows, budgets)
    for index, row in enumerate(rows):
        scope, how = SPECS[index % len(SPECS)]
        figures = row.figures()
        print(f"{row.budget} {scope:8} {how:7} ", "ppl {ppl:.3f}  kl {kl:.4f}  agree {agree:.3f}".format(**figures))


if __name__ == "__main__":
    main()
