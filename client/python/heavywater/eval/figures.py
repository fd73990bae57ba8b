"""Quality figures from logits. Pure: the dump's test computes them again with the same formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Natural log of the probabilities along the last axis, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


@dataclass
class Totals:
    """Sums over the scored positions of any number of windows."""

    nll: float = 0.0  # nats
    kl: float = 0.0  # KL(full || policy), nats
    agreed: int = 0  # positions whose most likely token is the full cache's
    positions: int = 0

    def add(self, logits: Logits, full: Logits, target: int) -> None:
        """One position: logits [vocab_size] with the policy and with the full cache, and what follows."""
        log_p = log_softmax(logits)
        log_full = log_softmax(full)
        self.nll -= float(log_p[target])
        self.kl += float((np.exp(log_full) * (log_full - log_p)).sum())
        self.agreed += int(logits.argmax() == full.argmax())
        self.positions += 1

    def __iadd__(self, other: Totals) -> Totals:
        self.nll += other.nll
        self.kl += other.kl
        self.agreed += other.agreed
        self.positions += other.positions
        return self

    @property
    def ppl(self) -> float:
        """exp(mean NLL) over all positions."""
        return math.exp(self.nll / self.positions)

    @property
    def mean_kl(self) -> float:
        return self.kl / self.positions

    @property
    def agree(self) -> float:
        return self.agreed / self.positions
