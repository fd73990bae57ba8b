"""heavywater generate"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from heavywater.cli.connection import Address, CacheAddress, Json, LocalModel, Ranks, connected
from heavywater.cli.live import LiveText, mebibytes
from heavywater.cli.policy import (
    POLICIES,
    Budget,
    Decay,
    DeviceRatio,
    Exposure,
    HeadBudgets,
    Positions,
    Recall,
    RecallTokens,
    Scope,
    Seed,
    Sinks,
    TopK,
    policy_name,
    policy_options,
    reads_demoted,
)
from heavywater.cli.prompt import Chat, File, MaxNewTokens, Prompt, QuestionAfter, System, prompt_and_suffix, read_text
from heavywater.cli.reads import print_reads, reads_json, total_reads
from heavywater.generation import Generation, Token, mean_reads
from heavywater.local import LocalOptions
from heavywater.v1 import common_pb2, generation_pb2

_OWN_POLICY = "snapkv_h2o"  # where no server has one of its own


def generate(
    prompt: Prompt = "",
    file: File = None,
    chat: Chat = False,
    system: System = "",
    max_new_tokens: MaxNewTokens = 128,
    question_after: QuestionAfter = "",
    policy: Annotated[str, typer.Option(help=f"{POLICIES} [of servers that run: theirs; else {_OWN_POLICY}].")] = "",
    scope: Scope = "layer",
    budget: Budget = 0.2,
    recall: Recall = None,
    recall_tokens: RecallTokens = "",
    device_ratio: DeviceRatio = 0.0,
    sinks: Sinks = None,
    decay: Decay = 0.0,
    exposure: Exposure = 0.0,
    positions: Positions = "",
    head_budgets: HeadBudgets = "",
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens that have this probability.")] = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    model: LocalModel = None,
    ranks: Ranks = 1,
    address: Address = "",
    cache: CacheAddress = "",
    show_reads: Annotated[
        bool, typer.Option("--show-reads", help="With recall: show in the text which demoted tokens were read.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a text, or answer with --chat. Streams the text with a line of live figures."""
    text = read_text(prompt, file)
    log = Console(stderr=True)
    name = policy or _OWN_POLICY
    options = policy_options(
        name,
        scope,
        budget,
        recall,
        recall_tokens,
        device_ratio,
        sinks=sinks,
        decay=decay,
        exposure=exposure,
        positions=positions,
        head_budgets=head_budgets,
    )
    of_servers = address != "" and not policy and options == policy_options(_OWN_POLICY)
    if show_reads and not of_servers and not reads_demoted(name, recall):
        raise ValueError(f"--show-reads with --policy {name} and no recall, want --policy recall or --recall")
    with connected(address, cache, LocalOptions(ranks=ranks, model=model, supervise=True), log) as client:
        text, suffix = prompt_and_suffix(client, text, chat, system, question_after)
        generation = client.generate(
            text,
            suffix=suffix,
            max_new_tokens=max_new_tokens,
            policy=None if of_servers else options,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            return_reads=show_reads,
        )
        if as_json:
            tokens = list(generation)
            figures = {"text": "".join(token.text for token in tokens), **_summary_json(generation)}
            print(json.dumps({**figures, "reads": reads_json(total_reads(tokens)) if show_reads else None}))
            return
        tokens = _stream(generation)
        if show_reads:
            print_reads(Console(), client.get_model(), text, suffix, total_reads(tokens))
        log.print(_describe(generation), style="dim", highlight=False)


def _stream(generation: Generation) -> list[Token]:
    tokens = []
    with LiveText(Console()) as live:
        for token in generation:
            live.figures.sequence_id = generation.sequence_id
            live.show(token)
            tokens.append(token)
    return tokens


def _describe(generation: Generation) -> str:
    summary = generation.summary
    return (
        f"sequence {generation.sequence_id}: {summary.finish_reason}; "
        f"{policy_name(summary.budget)} in scope {summary.budget.scope}, {_budget_words(summary.budget)}; "
        f"{summary.prompt_tokens}{_suffix_words(summary)} + {summary.new_tokens} tokens, "
        f"{_rate(summary):.1f} tokens/s; "
        f"KV on the device {mebibytes(summary.device_bytes_peak)} of the full cache's "
        f"{mebibytes(summary.full_cache_bytes)}, in host memory {mebibytes(summary.host_bytes)}"
        f"{_dropped_words(summary)}{_recall_words(summary)}"
    )


def _suffix_words(summary: generation_pb2.GenerateSummary) -> str:
    return f" + {summary.suffix_tokens}" if summary.suffix_tokens else ""


def _dropped_words(summary: generation_pb2.GenerateSummary) -> str:
    dropped = summary.counts.tokens_dropped
    return f", {dropped:.0f} tokens in neither" if dropped else ""


def _recall_words(summary: generation_pb2.GenerateSummary) -> str:
    if not summary.HasField("recall"):
        return ""
    reads = mean_reads(summary.recall)
    return (
        f"; a query read {reads:.1f} demoted tokens in place (at most {summary.recall.reads_max}), "
        f"{summary.recall.mass_missing:.1%} of attention missing"
    )


def _budget_words(budget: common_pb2.ResolvedBudget) -> str:
    if not budget.bounded_decode:
        return "unbounded in decode"
    of_layers = budget.layer_budget_tokens
    if of_layers:
        return f"{of_layers[0]} slots in the first layer down to {of_layers[-1]} in the last"
    if budget.head_budgets == "adaptive":
        return f"at most {budget.budget_tokens} slots a KV head in the mean, divided by scores"
    return f"at most {budget.budget_tokens} slots a layer"


def _rate(summary: generation_pb2.GenerateSummary) -> float:
    """New tokens per second after the first."""
    return (summary.new_tokens - 1) / summary.decode_seconds if summary.decode_seconds > 0 else 0.0


def _summary_json(generation: Generation) -> dict[str, object]:
    summary = generation.summary
    return {
        "sequence_id": generation.sequence_id,
        "finish_reason": summary.finish_reason,
        "policy": summary.budget.policy,
        "scope": summary.budget.scope,
        "budget_tokens": summary.budget.budget_tokens,
        "layer_budget_tokens": list(summary.budget.layer_budget_tokens) or None,
        "seed": summary.seed,
        "tp": summary.tensor_parallel,
        "tokens_seen": summary.counts.tokens_seen,
        "resident_tokens": summary.counts.tokens_resident,
        "prompt_tokens": summary.prompt_tokens,
        "new_tokens": summary.new_tokens,
        "device_bytes": summary.device_bytes_peak,
        "full_cache_bytes": summary.full_cache_bytes,
        "host_bytes": summary.host_bytes,
        "prompt_seconds": summary.prompt_seconds,
        "tokens_per_s": _rate(summary),
        "suffix_tokens": summary.suffix_tokens,
        "recall": _recall_json(summary),
    }


def _recall_json(summary: generation_pb2.GenerateSummary) -> dict[str, object] | None:
    if not summary.HasField("recall"):
        return None
    return {
        "recall_tokens": "all" if summary.budget.recall_all else summary.budget.recall_tokens,
        "reads_mean": mean_reads(summary.recall),
        "reads_max": summary.recall.reads_max,
        "promoted": summary.recall.promoted,
        "mass_missing": summary.recall.mass_missing,
        "sketch_bytes": summary.recall.sketch_bytes,
    }
