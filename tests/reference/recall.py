"""A plain reference of recall: the sketch of a page's keys, the scan, the pick, and attention over slots and picks.

One KV head at a time. Of its head_size channels, the few that tell most are coded at
4 bits for each position; of the others only each page's mean is kept. A query
estimates its logits from that, picks the positions which promise most attention, and
attends to them exactly, in one softmax with the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llama_numpy import Floats
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

QUERIES = 32  # the last so many choose the channels
LARGEST_CODE = 15
LARGEST_WEIGHT = 127


def default_channels(head_size: int) -> int:
    """A quarter of the head, rounded up to whole groups of 8; at least 24 of 64 and more."""
    quarter = -(-head_size // 32) * 8
    return max(quarter, 24) if head_size >= 64 else quarter


def choose_channels(queries: Floats, keys: Floats, channels: int) -> Ints:
    """Ascending channels with the largest mean q_c^2 x variance of k_c; ties to the lower.

    queries [tokens, group, head_size], of which the last QUERIES tokens count; keys
    [positions, head_size], rotated.
    """
    squares = queries[-QUERIES:].astype(np.float64) ** 2
    telling = squares.sum(axis=1).mean(axis=0) * keys.astype(np.float64).var(axis=0)
    return np.sort(np.argsort(-telling, kind="stable")[:channels])


@dataclass(frozen=True)
class PageSketch:
    """What stays on the device of one page's keys."""

    chosen: Ints  # [channels]
    codes: Ints  # [positions, channels], 0 to LARGEST_CODE
    minima: Doubles  # [channels], as 16-bit floats hold them
    steps: Doubles  # [channels], likewise
    means: Doubles  # [head_size - channels], likewise, of the other channels in ascending order

    @property
    def others(self) -> Ints:
        size = len(self.chosen) + len(self.means)
        return np.setdiff1d(np.arange(size), self.chosen)

    def keys(self) -> Doubles:
        """The keys that the sketch stands for, [positions, head_size]."""
        keys = np.empty((len(self.codes), len(self.chosen) + len(self.means)))
        keys[:, self.chosen] = self.minima + self.steps * self.codes
        keys[:, self.others] = self.means
        return keys


def encode_page(keys: Floats, chosen: Ints) -> PageSketch:
    """Codes one page's keys [positions, head_size]."""
    others = np.setdiff1d(np.arange(keys.shape[1]), chosen)
    told = keys[:, chosen].astype(np.float64)
    minima = _half(told.min(axis=0))
    steps = _half((told.max(axis=0) - minima) / LARGEST_CODE)
    # A constant channel has no step: every code is 0.
    quotients = np.divide(told - minima, steps, out=np.zeros_like(told), where=steps > 0)
    return PageSketch(
        chosen=chosen,
        codes=np.clip(np.floor(quotients + 0.5), 0, LARGEST_CODE).astype(np.int64),
        minima=minima,
        steps=steps,
        means=_half(keys[:, others].astype(np.float64).mean(axis=0)),
    )


def _half(values: Doubles) -> Doubles:
    return values.astype(np.float16).astype(np.float64)


def estimate_logits(query: Floats, page: PageSketch, scale: float) -> Doubles:
    """[positions] of one query head [head_size]: a constant, and a sum of integers with one factor."""
    q = query.astype(np.float64)
    constant = scale * (q[page.chosen] @ page.minima + q[page.others] @ page.means)
    exact = scale * q[page.chosen] * page.steps
    unit = np.abs(exact).max() / LARGEST_WEIGHT
    if unit == 0:
        return np.full(len(page.codes), constant)
    weights = np.rint(exact / unit).astype(np.int64)
    return constant + unit * (page.codes @ weights)


def log_sum_exp(logits: Doubles) -> float:
    """Of one query head; -infinity of nothing."""
    if logits.size == 0:
        return -np.inf
    largest = logits.max()
    return float(largest + np.log(np.exp(logits - largest).sum()))


def pick(positions: Ints, estimates: Doubles, slots_lse: Doubles, max_picks: int, min_share: float) -> Ints:
    """The positions that a token reads in place, ascending.

    positions [n] are demoted, ascending; estimates [group, n]; slots_lse [group], of the
    slots' exact logits. A position's value is the mean over the group's heads of its
    probability beside the slots; at least min_share of it, and the best, ties to the
    lower position.
    """
    if not np.isfinite(slots_lse).all():
        return positions[:0]
    values = np.exp(estimates - slots_lse[:, None]).mean(axis=0)
    candidates = np.flatnonzero(values >= min_share)
    best = candidates[np.argsort(-values[candidates], kind="stable")[:max_picks]]
    return np.sort(positions[best])


@dataclass(frozen=True)
class Attention:
    """What one token's query heads of a KV head get."""

    out: Doubles  # [group, head_size]
    slot_probabilities: Doubles  # [group, slots]
    pick_probabilities: Doubles  # [group, picks]
    picks: Ints
    missing: float  # estimated share of attention that demoted positions would have had, unpicked


@dataclass(frozen=True)
class Demoted:
    """What left the device: exact K and V in host memory, the sketch on the device."""

    keys: Floats  # [positions, head_size], of all positions from 0
    values: Floats
    pages: list[PageSketch]
    positions: Ints  # of them, those that are demoted; ascending

    def estimates(self, queries: Floats, scale: float) -> Doubles:
        """[group, demoted positions]."""
        of_all = [np.concatenate([estimate_logits(query, page, scale) for page in self.pages]) for query in queries]
        return np.stack(of_all)[:, self.positions]


def attend(
    queries: Floats,
    slot_keys: Floats,
    slot_values: Floats,
    demoted: Demoted,
    *,
    scale: float,
    max_picks: int = 64,
    min_share: float = 1e-4,
    everything: bool = False,
) -> Attention:
    """One token: queries [group, head_size], slots [slots, head_size]. `everything`: every demoted position is read."""
    q = queries.astype(np.float64)
    slot_logits = scale * (q @ slot_keys.astype(np.float64).T)
    estimates = demoted.estimates(queries, scale)
    lse = np.array([log_sum_exp(row) for row in slot_logits])
    picks = demoted.positions if everything else pick(demoted.positions, estimates, lse, max_picks, min_share)
    logits = np.concatenate([slot_logits, scale * (q @ demoted.keys[picks].astype(np.float64).T)], axis=1)
    attended = np.array([log_sum_exp(row) for row in logits])
    probabilities = np.exp(logits - attended[:, None])
    slots = slot_logits.shape[1]
    unpicked = np.exp(estimates[:, ~np.isin(demoted.positions, picks)] - attended[:, None]).sum(axis=1)
    return Attention(
        out=probabilities @ np.concatenate([slot_values, demoted.values[picks]]).astype(np.float64),
        slot_probabilities=probabilities[:, :slots],
        pick_probabilities=probabilities[:, slots:],
        picks=picks,
        missing=float((unpicked / (1 + unpicked)).mean()),
    )
