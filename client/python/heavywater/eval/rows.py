"""The rows of the table: which policy, scope and budget, and what that means in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heavywater.v1 import common_pb2

FULL = "full"
STREAMING_SINKS = 4
_BOUNDED = ("streaming", "h2o", "snapkv", "snapkv_h2o")


@dataclass(frozen=True)
class Row:
    """One line of the table. `full` has neither scope nor budget."""

    policy: str
    scope: str | None = None  # "layer" or "kv_head"
    budget: float | None = None  # fraction of the prompt

    @property
    def name(self) -> str:
        return self.policy if self.budget is None else f"{self.policy}-{self.scope}-{self.budget:g}"

    def options(self, prompt_tokens: int) -> common_pb2.PolicyOptions:
        """B = int(budget x prompt): recent B // 2, the rest heavy; streaming: 4 sinks, all else recent."""
        if self.budget is None:
            return common_pb2.PolicyOptions(policy=self.policy)
        budget_tokens = int(self.budget * prompt_tokens)
        sinks = STREAMING_SINKS if self.policy == "streaming" else 0
        recent = budget_tokens - sinks if sinks else budget_tokens // 2
        return common_pb2.PolicyOptions(
            policy=self.policy,
            scope=self.scope,
            heavy_tokens=budget_tokens - recent,
            recent_tokens=recent,
            sink_tokens=sinks,
            plan_interval_steps=1,
            decay=1.0,
        )


def make_rows(policies: Sequence[str], scopes: Sequence[str], budgets: Sequence[float]) -> list[Row]:
    """Every policy in every scope at every budget; `full` once. Raises ValueError for unknown names."""
    for name, known in [*((p, (FULL, *_BOUNDED)) for p in policies), *((s, ("kv_head", "layer")) for s in scopes)]:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    for budget in budgets:
        if not 0 < budget <= 1:
            raise ValueError(f"budget {budget:g}, want a fraction of the prompt above 0 and at most 1")
    bounded = [policy for policy in policies if policy != FULL]
    return [Row(FULL)] + [Row(p, s, b) for s in scopes for b in budgets for p in bounded]


def published_rows(budgets: Sequence[float]) -> list[Row]:
    """The table of the design: each KV head its own set at every budget; shared by a layer at 20 %."""
    rows = make_rows(["streaming", "h2o", "snapkv_h2o"], ["kv_head"], budgets)
    return rows + [Row(p, "layer", b) for b in budgets if b == 0.2 for p in ("h2o", "snapkv_h2o")]
