"""Policy options from keyword arguments: a preset, then what the caller says otherwise."""

from __future__ import annotations

from heavywater.engine import PolicyOptions, RecallOptions, preset

# Fields of PolicyOptions that a caller may set; budgets come as arguments of their own.
POLICY_FIELDS = (
    "scope",
    "head_budgets",
    "head_budget_floor",
    "sink_tokens",
    "min_budget_tokens",
    "window",
    "pool_kernel",
    "plan_interval_steps",
    "decay",
    "exposure",
    "history_window",
    "pyramid_beta",
    "pooled_seeds",
    "device_ratio",
)
RECALL_FIELDS = ("recall_tokens", "min_share", "sketch_channels", "promote_candidates")


def policy_options(
    policy: str,
    *,
    heavy_ratio: float | None = None,
    recent_ratio: float | None = None,
    heavy_tokens: int | None = None,
    recent_tokens: int | None = None,
    recall: bool | str | None = None,
    **fields: object,
) -> PolicyOptions:
    """The preset `policy` with these changes; HeavywaterError for an unknown preset, TypeError for an unknown field.

    A ratio ends the preset's number of tokens, and its device_ratio, as a number of heavy tokens does (as
    ReplaceBudget() of worker/policy). `recall`: None as the preset, "all"
    reads everything back.
    """
    options = preset(policy)
    if heavy_ratio is not None or heavy_tokens is not None or recent_ratio is not None:
        options.device_ratio = 0.0
    if heavy_ratio is not None or heavy_tokens is not None:
        options.heavy_tokens = heavy_tokens or 0
    if heavy_ratio is not None:
        options.heavy_ratio = heavy_ratio
    if recent_ratio is not None or recent_tokens is not None:
        options.recent_tokens = recent_tokens or 0
    if recent_ratio is not None:
        options.recent_ratio = recent_ratio
    _set_recall(options.recall, recall)
    for name, value in fields.items():
        if name in POLICY_FIELDS:
            setattr(options, name, value)
        elif name in RECALL_FIELDS:
            setattr(options.recall, name, value)
        else:
            raise TypeError(f"unknown option {name!r}, want one of: {', '.join(POLICY_FIELDS + RECALL_FIELDS)}")
    return options


def _set_recall(options: RecallOptions, recall: bool | str | None) -> None:
    if recall is None:
        return
    if isinstance(recall, str) and recall != "all":
        raise ValueError(f'recall is {recall!r}, want True, False or "all"')
    options.enabled = bool(recall)
    options.all = recall == "all"
