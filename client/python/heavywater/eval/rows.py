"""The rows of the tables: which policy, scope and budget, and what that means in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from heavywater.v1 import common_pb2

FULL = "full"
ORDERED = "snapkv_h2o"
RECALL_PRESET = "recall"
STREAMING_SINKS = 4
SCISSORHANDS = "scissorhands"
_SCISSORHANDS_RECENT = 10  # as published
_SCISSORHANDS_INTERVAL = 16  # its batch
BOUNDED = ("streaming", "h2o", "snapkv", ORDERED, SCISSORHANDS, "pyramidkv")
# Those whose slots the prompt's scores can divide among a layer's KV heads.
DIVISIBLE = ("h2o", "snapkv", ORDERED, SCISSORHANDS, "pyramidkv")
EVEN, ADAPTIVE = "even", "adaptive"
# Keeps everything, attends to its budget's worth: what the others are compared with.
ORACLE = "oracle"

# Demoted positions that a query may read in place.
RecallTokens = int | Literal["all"]


@dataclass(frozen=True)
class Row:
    """One line of a table. `full` has neither scope nor budget."""

    policy: str
    scope: str | None = None  # "layer" or "kv_head"
    budget: float | None = None  # fraction of the prompt; of_bytes: of the full cache's bytes
    recall: RecallTokens | None = None  # None: off; else of_bytes
    tuned: bool = True  # recall: the preset "recall"; else `policy` as it is, with recall
    of_bytes: bool = False
    exposure: float = 0.0  # of PolicyOptions
    head_budgets: str = EVEN  # likewise

    @property
    def name(self) -> str:
        if self.budget is None:
            return self.policy
        recall = f"{'' if self.tuned else '-and'}-recall-{self.recall}"
        ending = recall if self.recall else "-bytes" if self.of_bytes else ""
        ending += f"-exposure-{self.exposure:g}" if self.exposure else ""
        ending += f"-{self.head_budgets}" if self.head_budgets != EVEN else ""
        return f"{self.policy}-{self.scope}-{self.budget:g}{ending}"

    @property
    def preset(self) -> str:
        """The policy that is asked for."""
        return RECALL_PRESET if self.recall is not None and self.tuned else self.policy

    @property
    def scope_words(self) -> str:
        """For tables: the scope, and that its slots are divided by scores."""
        return (self.scope or "-") + (f", {self.head_budgets}" if self.head_budgets != EVEN else "")

    def options(self, prompt_tokens: int) -> common_pb2.PolicyOptions:
        """What is asked of the server for a prompt of so many tokens."""
        if self.budget is None:
            return common_pb2.PolicyOptions(policy=self.policy)
        if self.recall is not None and self.tuned:
            return self._recalling(
                common_pb2.PolicyOptions(
                    policy=RECALL_PRESET, scope=self.scope, device_ratio=self.budget, min_budget_tokens=1
                )
            )
        options = self._ordered_options(int(self.budget * prompt_tokens))
        if self.of_bytes:
            options.ClearField("heavy_tokens")
            options.device_ratio, options.min_budget_tokens = self.budget, 1
        if self.recall is not None:
            options.recall = True
            self._recalling(options)
        return options

    def _ordered_options(self, budget_tokens: int) -> common_pb2.PolicyOptions:
        """Recent budget_tokens // 2, the rest heavy; streaming: 4 sinks, all else recent.

        scissorhands: 10 recent, batches of 16, as the preset has it. oracle: the token itself,
        all else by what each query pays.
        """
        sinks = STREAMING_SINKS if self.policy == "streaming" else 0
        batches = self.policy == SCISSORHANDS
        recent = budget_tokens - sinks if sinks else budget_tokens // 2
        recent = min(recent, _SCISSORHANDS_RECENT) if batches else 1 if self.policy == ORACLE else recent
        return common_pb2.PolicyOptions(
            policy=self.policy,
            scope=self.scope,
            heavy_tokens=budget_tokens - recent,
            recent_tokens=recent,
            sink_tokens=sinks,
            plan_interval_steps=_SCISSORHANDS_INTERVAL if batches else 1,
            decay=1.0,
            exposure=self.exposure,
            head_budgets=self.head_budgets,
        )

    def _recalling(self, options: common_pb2.PolicyOptions) -> common_pb2.PolicyOptions:
        if self.recall == "all":
            options.recall_all = True
        else:
            options.recall_tokens = self.recall or 0
        return options


def make_rows(
    policies: Sequence[str], scopes: Sequence[str], budgets: Sequence[float], head_budgets: Sequence[str] = (EVEN,)
) -> list[Row]:
    """Every policy in every scope at every budget; `full` once. Raises ValueError for unknown names.

    `head_budgets`: with "adaptive" among them also, or only, rows whose slots are divided among KV heads by
    scores, of the policies and in the scope where that can be; with "even" all others.
    """
    known_policies = (FULL, *BOUNDED, ORACLE)
    for name, known in [*((p, known_policies) for p in policies), *((s, ("kv_head", "layer")) for s in scopes)]:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    if ORACLE in policies and "layer" in scopes:
        raise ValueError(f"{ORACLE!r} chooses by head: want scope kv_head")
    _check_budgets(budgets)
    _check_head_budgets(head_budgets, policies, scopes)
    bounded = [policy for policy in policies if policy != FULL]
    rows = [Row(p, s, b, head_budgets=h) for s in scopes for b in budgets for p in bounded for h in head_budgets]
    return [Row(FULL)] + [row for row in rows if row.head_budgets == EVEN or _can_divide(row)]


def _can_divide(row: Row) -> bool:
    return row.policy in DIVISIBLE and row.scope == "kv_head"


def _check_head_budgets(head_budgets: Sequence[str], policies: Sequence[str], scopes: Sequence[str]) -> None:
    for name in head_budgets:
        if name not in (EVEN, ADAPTIVE):
            raise ValueError(f"{name!r} is not one of {EVEN}, {ADAPTIVE}")
    if ADAPTIVE in head_budgets and not ("kv_head" in scopes and set(policies) & set(DIVISIBLE)):
        wanted = f"scope kv_head and one of {', '.join(DIVISIBLE)}"
        raise ValueError(f"{ADAPTIVE!r} divides a layer's slots by scores: want {wanted}")


def published_rows(budgets: Sequence[float]) -> list[Row]:
    """The table of the design: each KV head its own set at every budget; shared by a layer at 20 %."""
    rows = make_rows(["streaming", "h2o", ORDERED], ["kv_head"], budgets)
    return rows + [Row(p, "layer", b) for b in budgets if b == 0.2 for p in ("h2o", ORDERED)]


def rows_at_equal_bytes(
    scopes: Sequence[str],
    budgets: Sequence[float],
    recalls: Sequence[RecallTokens | None],
    *,
    untuned: bool = False,
) -> list[Row]:
    """`full`, and at each budget of the full cache's bytes the ordered policy without recall (None) or with, as the
    preset tunes it; `untuned`: also as it is."""
    make_rows([], scopes, budgets)
    bounded = [
        Row(ORDERED, s, b, recall=r, of_bytes=True, tuned=tuned)
        for s in scopes
        for b in budgets
        for r in recalls
        for tuned in ((False, True) if untuned and r is not None else (True,))
    ]
    return [Row(FULL), *bounded]


def _check_budgets(budgets: Sequence[float]) -> None:
    for budget in budgets:
        if not 0 < budget <= 1:
            raise ValueError(f"budget {budget:g}, want a fraction above 0 and at most 1")
