"""Continues a long document with a bounded cache, with and without recall, and with the full one; compares them.

Then asks each for a detail deep in a text, once the text's cache has been compressed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heavywater import Client, Generation, HeavywaterError, PolicyOptions
from heavywater.book import read_book
from heavywater.cli.live import LiveText, mebibytes
from heavywater.cli.policy import RECALL, policy_options
from heavywater.eval.haystack import Needle, make_needles
from heavywater.local import LocalOptions, LocalServers, exit_on_signals
from heavywater.model import Model
from heavywater.server_process import ServerError
from rich.console import Console
from rich.table import Table

RANKS = 3
BUDGET = 0.2  # snapkv_h2o: of the prompt, half heavy, half recent; recall: of the full cache's bytes
POLICIES = (RECALL, "snapkv_h2o", "full")
QUESTION_SEED, QUESTION_TOKENS, QUESTION_DEPTH = 1, 1500, 2  # the middle of five depths
ANSWER_TOKENS = 5
TEMPERATURE, SEED = 0.7, 1  # greedy, so small a model soon repeats itself
OFFSET_TOKENS = 2000  # into Northanger Abbey: past the title and the author's notice
_BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Run:
    """One policy's generation."""

    policy: str
    budget: float | None
    generation: Generation
    text: str

    @property
    def name(self) -> str:
        return self.policy if self.budget is None else f"{self.policy}, {self.budget:.0%}"

    def as_json(self) -> dict[str, Any]:
        summary = self.generation.summary
        return {
            "policy": summary.budget.policy,
            "recall": summary.budget.recall,
            "budget": self.budget,
            "tp": summary.tensor_parallel,
            "tokens_seen": summary.counts.tokens_seen,
            "resident_tokens": summary.counts.tokens_resident,
            "device_bytes": summary.device_bytes_peak,
            "host_bytes": summary.host_bytes,
            "prompt_tokens_per_s": _per_second(summary.prompt_tokens, summary.prompt_seconds),
            "tokens_per_s": _per_second(summary.new_tokens - 1, summary.decode_seconds),
            "text": self.text,
        }


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def kv_bytes_per_token(model: Model) -> int:
    """K and V of one token in all layers and heads."""
    info = model.info
    element_bytes = _BYTES_PER_ELEMENT[info.fingerprint.dtype]
    return 2 * info.num_layers * info.num_kv_heads * info.head_dim * element_bytes


@dataclass(frozen=True)
class Answer:
    """What one policy answered, when the text was compressed before the question came."""

    policy: str
    recall: bool
    needle: Needle
    got: str

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "recall": self.recall,
            "asked_for": f"the secret code of the {self.needle.name}",
            "expected": self.needle.code,
            "answer": self.got,
        }


def policy_of(name: str) -> PolicyOptions:
    return policy_options(name, budget=BUDGET)


def ask(client: Client, needle: Needle, policy: str) -> Answer:
    with client.generate(
        needle.context,
        suffix=needle.question,
        max_new_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        policy=policy_of(policy),
    ) as generation:
        got = generation.text()
    budget = generation.summary.budget
    return Answer(budget.policy, budget.recall, needle, got)


def run_policy(client: Client, model: Model, prompt: list[int], new_tokens: int, name: str) -> Run:
    """Streams one continuation to standard output."""
    policy = policy_of(name)
    pieces = []
    with (
        client.generate(
            prompt, max_new_tokens=new_tokens, ignore_eos=True, policy=policy, temperature=TEMPERATURE, seed=SEED
        ) as generation,
        LiveText(Console(), kv_bytes_per_token(model)) as live,
    ):
        for token in generation:
            pieces.append(token.text)
            live.show(token)
    return Run(name, None if name == "full" else BUDGET, generation, "".join(pieces))


def table_of(runs: list[Run]) -> Table:
    """One column per run."""
    figures = [run.as_json() for run in runs]
    full_bytes = [run.generation.summary.full_cache_bytes for run in runs]
    table = Table("", title="KV cache of the sequence, summed over the ranks")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_row("tokens seen", *(str(one["tokens_seen"]) for one in figures))
    table.add_row("resident, mean over layers", *(f"{one['resident_tokens']:.0f}" for one in figures))
    table.add_row("on the devices", *(mebibytes(one["device_bytes"]) for one in figures))
    shares = (one["device_bytes"] / full for one, full in zip(figures, full_bytes, strict=True))
    table.add_row("... of the bare full cache", *(f"{share:.1%}" for share in shares))
    table.add_row("in host memory", *(mebibytes(one["host_bytes"]) for one in figures))
    table.add_row("prompt, tokens/s", *(_rate(one["prompt_tokens_per_s"]) for one in figures))
    table.add_row("decode, tokens/s", *(_rate(one["tokens_per_s"]) for one in figures))
    return table


def table_of_answers(answers: list[Answer]) -> Table:
    """One row per policy."""
    needle = answers[0].needle
    table = Table(
        title=f'"The secret code of the {needle.name} is {needle.code}." lies in the middle of {QUESTION_TOKENS} '
        "tokens; asked for once the cache was compressed"
    )
    table.add_column("policy")
    table.add_column("answer")
    table.add_column("")
    for policy, answer in zip(POLICIES, answers, strict=True):
        right = "[green]right[/]" if answer.got == needle.code else "[red]wrong[/]"
        table.add_row(policy, repr(answer.got), right)
    return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _describe(policy: str) -> str:
    if policy == RECALL:
        return f"snapkv_h2o with recall, {BUDGET:.0%} of the bytes on the devices"
    return "the full cache" if policy == "full" else f"{policy}, {BUDGET:.0%} of the prompt resident"


def demo(json_file: Path | None, prompt_tokens: int, new_tokens: int) -> None:
    console = Console()
    # Opened first: a wrong path must not cost the whole run.
    output = json_file.open("w") if json_file else None
    console.print("[bold]fetching the document[/]: Northanger Abbey (Debian package r-cran-janeaustenr)")
    text = read_book()
    console.print(f"[bold]starting[/] heavywater-cache and {RANKS} heavywater-worker (tensor parallel over Gloo)")
    runs = []
    with LocalServers(LocalOptions(ranks=RANKS)) as servers, servers.client() as client:
        model = client.get_model()
        prompt = model.encode(text)[OFFSET_TOKENS : OFFSET_TOKENS + prompt_tokens]
        for policy in POLICIES:
            console.rule(f"[bold]{_describe(policy)}[/]: {len(prompt)} tokens of prompt, {new_tokens} new")
            runs.append(run_policy(client, model, prompt, new_tokens, policy))
        needle = make_needles(model, text, QUESTION_SEED, variants=1, tokens=QUESTION_TOKENS)[QUESTION_DEPTH]
        console.rule("[bold]a detail deep in a text[/]")
        answers = [ask(client, needle, policy) for policy in POLICIES]
    console.print(table_of(runs))
    console.print(table_of_answers(answers))
    if output:
        with output:
            figures = {"runs": [run.as_json() for run in runs], "answers": [one.as_json() for one in answers]}
            json.dump(figures, output, indent=1)
            output.write("\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy/local/demo", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--prompt-tokens", type=int, default=3200)
    parser.add_argument("--new-tokens", type=int, default=200)
    args = parser.parse_args()
    exit_on_signals()
    try:
        demo(args.json, args.prompt_tokens, args.new_tokens)
    except (HeavywaterError, ServerError, ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
