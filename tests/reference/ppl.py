"""Perplexity of each policy on Northanger Abbey, with the plain reference of model and policies.

Each window is `prompt` + `continue` tokens of the text, none added. All
`continue` tokens are scored: the first from the logits of the prompt's last
token, the others from decode steps. ppl = exp(mean NLL over all windows);
kl = KL(full || policy) in nats and agree = share of equal greedy tokens, means
over the same positions.

    python ppl.py MODEL.gguf .../janeaustenr/data/Rdata --json ppl.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import janeausten
import numpy as np
from llama_numpy import Floats, Llama, causal_probabilities, weighted_values
from policies import BatchCache, Doubles, LayerCache, Name, Policy, PromptLayer, Scope, summarize_probabilities
from tokenizer import encode, load_tokenizer

NAMES: tuple[Name, ...] = ("streaming", "h2o", "snapkv_h2o")


@dataclass
class Row:
    """One line of the result and what it was measured from."""

    policy: Policy
    budget: float | None
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)

    def add(self, log_p: Doubles, full_log_p: Doubles, target: int) -> None:
        """One scored position: log probabilities [vocabulary] of this policy and of the full cache."""
        self.nll.append(-float(log_p[target]))
        self.kl.append(float(np.exp(full_log_p) @ (full_log_p - log_p)))
        self.agree.append(bool(log_p.argmax() == full_log_p.argmax()))

    def figures(self) -> dict[str, Any]:
        return {
            "policy": self.policy.name,
            "scope": self.policy.scope,
            "budget": self.budget,
            "ppl": float(np.exp(np.mean(self.nll))),
            "kl": float(np.mean(self.kl)),
            "agree": float(np.mean(self.agree)),
        }


def budgeted(name: Name, scope: Scope, fraction: float, prompt_tokens: int) -> Policy:
    """B = int(fraction x prompt), B // 2 of it recent; four sinks in `streaming`, none elsewhere."""
    budget = int(fraction * prompt_tokens)
    sinks = 4 if name == "streaming" else 0
    return Policy(name, scope, budget_tokens=budget, recent_tokens=budget // 2, sink_tokens=sinks)


def log_softmax(logits: Floats) -> Doubles:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def run_full(model: Llama, window: Sequence[int], prompt_tokens: int) -> tuple[Floats, list[PromptLayer]]:
    """Logits that predict the continuation [continue, vocabulary], and the prompt's layers."""
    prompt: list[PromptLayer] = []

    def attend(_layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        probabilities = causal_probabilities(q, k)
        of_prompt = probabilities[:, :prompt_tokens, :prompt_tokens]
        prompt.append(summarize_probabilities(of_prompt, k[:prompt_tokens], v[:prompt_tokens]))
        return weighted_values(probabilities, v)

    hidden = model.hidden(window, range(len(window)), attend)
    return model.logits(hidden[prompt_tokens - 1 : -1]), prompt


def run_window(model: Llama, window: Sequence[int], prompt_tokens: int, rows: Sequence[Row]) -> None:
    """Scores one window; rows[0] is the full cache, the others decode together as one batch."""
    full_logits, prompt = run_full(model, window, prompt_tokens)
    bounded = rows[1:]
    caches = BatchCache([[LayerCache(row.policy, layer) for layer in prompt] for row in bounded])
    logits = np.repeat(full_logits[:1], len(bounded), axis=0)  # the prompt is exact
    for step, target in enumerate(window[prompt_tokens:]):
        if step > 0:
            position = prompt_tokens + step - 1
            count = len(bounded)
            logits = model.logits(model.hidden([window[position]] * count, [position] * count, caches.attend))
        full_log_p = log_softmax(full_logits[step])
        rows[0].add(full_log_p, full_log_p, target)
        for row, log_p in zip(bounded, log_softmax(logits), strict=True):
            row.add(log_p, full_log_p, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("data", type=Path, help="path of janeaustenr's Rdata.rdb without its ending")
    parser.add_argument("--offsets", default="2000,27000,52000,77000")
    parser.add_argument("--prompt", type=int, default=1536)
    parser.add_argument("--continue", type=int, default=512, dest="continuation")
    parser.add_argument("--budgets", default="0.1,0.2,0.4", help="fractions of the prompt, scope kv_head")
    parser.add_argument("--layer-budgets", default="0.2", help="the same, scope layer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    text = janeausten.read_book(args.data)
    ids = encode(load_tokenizer(args.model), text)
    model = Llama(args.model)
    rows = [Row(Policy("full"), None)]
    budgets_of: dict[Scope, str] = {"kv_head": args.budgets, "layer": args.layer_budgets}
    for scope, budgets in budgets_of.items():
        for fraction in map(float, filter(None, budgets.split(","))):
            rows += [Row(budgeted(name, scope, fraction, args.prompt), fraction) for name in NAMES]

    for offset in map(int, args.offsets.split(",")):
        window = ids[offset : offset + args.prompt + args.continuation]
        run_window(model, window, args.prompt, rows)
        print(f"offset {offset}: full {rows[0].figures()['ppl']:.3f} so far", file=sys.stderr)
    figures = [row.figures() for row in rows]
    for row in figures:
        print("{policy:<12} {scope:<8} {budget!s:<5} ppl {ppl:.3f}  kl {kl:.4f}  agree {agree:.4f}".format(**row))
    if args.json:
        args.json.write_text(json.dumps({"rows": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
