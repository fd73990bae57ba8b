"""What the papers say of attention, measured: where its mass is, whether heavy tokens stay heavy, and who they are.

All of it from what positions have received in whole prompts (`kept.received`), for each
layer and KV head, and then the mean over both.

- Mass (H2O, arXiv:2306.14048, section 3): the share of all attention, summed over the
  prompt's queries, that the heaviest 20 and 30 % of its tokens hold; also without the
  first four tokens and their mass, since what they get is a place to leave attention
  at (StreamingLLM, arXiv:2309.17453), not a matter of content.
- Overlap: of the heaviest 20 % of a prompt's tokens, the share that are still among the
  heaviest 20 % of the same tokens so many tokens later: by all queries so far (H2O's
  score), and by the last 32 alone, which has no memory. At random: 20 %.
- Classes: the share of the heaviest 20 % that is of a class, beside its share of the text.
- Persistence (Scissorhands, arXiv:2305.17118, section 3): of the tokens that are pivotal for
  some of the next queries, the share that had been for some of the last 400. Beside it
  the share of all tokens that had been: what chance would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heavywater.client import Client
from heavywater.eval.kept import received
from heavywater.eval.token_class import CLASSES

Floats = npt.NDArray[np.float64]  # [layers, kv_heads, positions], unless said
HEAVY = 0.2
SHARES = (0.2, 0.3)
FIRST = 4
WINDOW = 32
HISTORY = 400
CURVE = tuple(round(0.02 * i, 2) for i in range(1, 51))


def mass_of_top(sums: Floats, fraction: float) -> Floats:
    """[layers, kv_heads]: of each set's mass, what its heaviest `fraction` of positions hold."""
    count = max(1, round(fraction * sums.shape[-1]))
    ordered = np.sort(sums, axis=-1)[..., ::-1]
    shares: Floats = ordered[..., :count].sum(axis=-1) / ordered.sum(axis=-1)
    return shares


def heavy_sets(sums: Floats, fraction: float = HEAVY) -> npt.NDArray[np.bool_]:
    """Which positions are among the heaviest of their set; equal ones: the lower position."""
    count = max(1, round(fraction * sums.shape[-1]))
    order = np.argsort(-sums, axis=-1, kind="stable")
    heavy = np.zeros(sums.shape, bool)
    np.put_along_axis(heavy, order[..., :count], True, axis=-1)
    return heavy


def overlap(before: Floats, after: Floats) -> float:
    """Of the heavy positions of `before`, the share that is heavy in `after`, among the same positions."""
    first, second = heavy_sets(before), heavy_sets(after[..., : before.shape[-1]])
    return float((first & second).sum() / first.sum())


def persistence(history: Floats, following: Floats) -> tuple[float, float]:
    """(share of the positions pivotal in `following` that were in `history`, share of all that were)."""
    was, is_now = history > 0, following[..., : history.shape[-1]] > 0
    return float((was & is_now).sum() / max(1, is_now.sum())), float(was.mean())


def class_shares(sums: Floats, classes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Each class's share of the heavy positions and of the text."""
    heavy, names = heavy_sets(sums), np.array(classes)
    return {
        name: {
            "of_heavy": float(heavy[..., names == name].sum() / heavy.sum()),
            "of_text": float((names == name).mean()),
            "of_mass": float((sums[..., names == name].sum(axis=-1) / sums.sum(axis=-1)).mean()),
        }
        for name in CLASSES
    }


@dataclass(frozen=True)
class Passage:
    """A stretch of a text: what is looked at, and what follows."""

    offset: int
    tokens: list[int]  # the prompt, then at least max(steps) more
    classes: list[str]  # of the prompt's tokens
    prompt: int


def look_at(client: Client, passage: Passage, steps: Sequence[int], on_run: Callable[[], None]) -> dict[str, Any]:
    """All figures of one passage, as JSON."""

    def run(length: int, policy: str, window: int = 0) -> Floats:
        sums = received(client, passage.tokens[:length], policy, window)
        on_run()
        return sums

    n = passage.prompt
    all_queries, last = run(n, "h2o"), run(n, "snapkv_h2o", WINDOW)
    history = run(n, "scissorhands", min(HISTORY, n))
    old = n - WINDOW  # the window's own positions are not yet seen by all of its queries
    figures: dict[str, Any] = {
        "mass": {f"{share:g}": float(mass_of_top(all_queries, share).mean()) for share in SHARES},
        "mass_without_first": {
            f"{share:g}": float(mass_of_top(all_queries[..., FIRST:], share).mean()) for share in SHARES
        },
        "mass_of_first": float((all_queries[..., :FIRST].sum(-1) / all_queries.sum(-1)).mean()),
        "curve": np.array([mass_of_top(all_queries, share).mean(axis=1) for share in CURVE]).T.tolist(),
        "classes": class_shares(all_queries, passage.classes),
        "later": {},
    }
    for step in steps:
        persists, at_random = persistence(history, run(n + step, "scissorhands", step))
        figures["later"][str(step)] = {
            "overlap_all_queries": overlap(all_queries, run(n + step, "h2o")),
            "overlap_last_queries": overlap(last[..., :old], run(n + step, "snapkv_h2o", WINDOW)),
            "persistence": persists,
            "persistence_at_random": at_random,
        }
    return figures


def runs_of(steps: Sequence[int]) -> int:
    """Prompts that `look_at` runs."""
    return 3 + 3 * len(steps)


def mean_figures(passages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of every number over passages of one structure."""
    return {key: _mean([passage[key] for passage in passages]) for key in passages[0]}


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return np.mean(np.array(values), axis=0).tolist()
