"""The options by which a command's user chooses a policy."""

from __future__ import annotations

from typing import Annotated

import typer

from heavywater.v1 import common_pb2

RECALL = "recall"  # the tuned preset: snapkv_h2o with recall
SCISSORHANDS = "scissorhands"
ALL = "all"
MAX_INT, MAX_SEED = 2**31 - 1, 2**64 - 1  # what the API's fields hold
_RECENT_TOKENS = 32  # with --device-ratio, as in the preset

POLICIES = "full, streaming, h2o, snapkv, snapkv_h2o, scissorhands, pyramidkv or recall (the tuned preset)"
Policy = Annotated[str, typer.Option(help=f"{POLICIES}.")]
Scope = Annotated[str, typer.Option(help="Heads that share one resident set: layer or kv_head.")]
Budget = Annotated[
    float, typer.Option(help="Fraction of the prompt that stays on the device; recall: of the full cache's bytes.")
]
Recall = Annotated[
    bool | None,
    typer.Option("--recall/--no-recall", help="Let queries read demoted tokens in place, or not [the policy's]."),
]
RecallTokens = Annotated[
    str, typer.Option(help='Demoted tokens that a query reads at most, per layer and KV head, or "all" [64].')
]
DeviceRatio = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Instead of --budget: all KV bytes on the device, of the full cache's.")
]
Sinks = Annotated[
    int | None, typer.Option(min=0, max=MAX_INT, help="First tokens that are never evicted [the policy's].")
]
TopK = Annotated[int, typer.Option(min=0, max=MAX_INT, help="Draw from so many of the likeliest tokens; 0 = all.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the tokens drawn.")]
Decay = Annotated[float, typer.Option(min=0.0, max=1.0, help="Of all scores, per token; 0: the policy's.")]
Exposure = Annotated[
    float,
    typer.Option(min=0.0, max=4.0, help="Tokens compete by score / queries that saw them ^ exposure; 0: by score."),
]
Positions = Annotated[
    str,
    typer.Option(
        help="Where attention sees a token: absolute (in the text) or cache_relative (by order within the cache: "
        "generation may go on past the model's context) [absolute]."
    ),
]

HeadBudgets = Annotated[
    str,
    typer.Option(
        help="In scope kv_head: even (every KV head as many slots) or adaptive (divided among a layer's KV heads as "
        "its scores are spread, as Ada-KV does) [even]."
    ),
]


def parse_recall_tokens(text: str) -> tuple[int, bool]:
    """(at most so many, all of them); (0, False) for the default. Raises ValueError."""
    if text in ("", ALL):
        return 0, text == ALL
    if not text.isdecimal() or not 1 <= int(text) <= MAX_INT:
        raise ValueError(f'--recall-tokens {text}, want a number from 1 up or "{ALL}"')
    return int(text), False


def reads_demoted(policy: str, recall: bool | None) -> bool:
    """Whether queries read demoted tokens in place under these options."""
    return policy == RECALL if recall is None else recall


def policy_name(budget: common_pb2.ResolvedBudget) -> str:
    """What a sequence runs under, as people read it."""
    return f"{budget.policy} + recall" if budget.recall else budget.policy


def policy_options(
    policy: str,
    scope: str = "layer",
    budget: float = 0.2,
    recall: bool | None = None,
    recall_tokens: str = "",
    device_ratio: float = 0.0,
    sinks: int | None = None,
    decay: float = 0.0,
    exposure: float = 0.0,
    positions: str = "",
    head_budgets: str = "",
) -> common_pb2.PolicyOptions:
    """What the options above ask for. Whether it can be is the server's to say.

    Raises ValueError for an option that no server could make sense of.
    """
    if not 0 < budget <= 1:
        raise ValueError(f"--budget {budget:g}, want a fraction above 0 and at most 1")
    options = common_pb2.PolicyOptions(
        policy=policy, scope=scope, decay=decay, exposure=exposure, positions=positions, head_budgets=head_budgets
    )
    if sinks is not None:
        options.sink_tokens = sinks
    options.recall_tokens, everything = parse_recall_tokens(recall_tokens)
    if everything:
        options.recall_all = True
    if recall is not None:
        options.recall = recall
    if policy == RECALL:
        options.device_ratio = device_ratio or budget
    elif device_ratio:
        options.device_ratio, options.recent_tokens = device_ratio, _RECENT_TOKENS
    elif policy == SCISSORHANDS:
        options.heavy_ratio = budget  # and the policy's own 10 recent tokens
    elif policy != "full":
        options.heavy_ratio = options.recent_ratio = budget / 2
    return options
