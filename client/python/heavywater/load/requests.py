"""What a load run asks for, drawn from a seed: the same seed asks the same in the same order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SEQUENCES = 100_000


@dataclass(frozen=True)
class LoadPlan:
    """Ranges are inclusive. `rate` is of arrivals per second; None: a closed loop, all at once."""

    sequences: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    cancel_share: float = 0.0
    rate: float | None = None
    seed: int = 1

    def check(self) -> None:
        """Raises ValueError naming the field, what it is and what is wanted."""
        if not 1 <= self.sequences <= MAX_SEQUENCES:
            raise ValueError(f"sequences is {self.sequences}, want 1 to {MAX_SEQUENCES}")
        for name, (low, high) in (("prompt_tokens", self.prompt_tokens), ("new_tokens", self.new_tokens)):
            if not 1 <= low <= high:
                raise ValueError(f"{name} is {low},{high}, want two numbers from 1 up, the lower one first")
        if not 0 <= self.cancel_share <= 1:
            raise ValueError(f"cancel_share is {self.cancel_share:g}, want 0 to 1")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"rate is {self.rate:g} sequences per second, want more than 0")


@dataclass(frozen=True)
class LoadRequest:
    """One sequence: when it comes, what it asks, and when its client goes."""

    index: int
    arrival_s: float  # since the start of the run; 0 in a closed loop
    prompt_tokens: int
    new_tokens: int
    cancel_after: int | None  # tokens; 0: once accepted, before the first; None: it stays
    seed: str

    def prompt(self, vocabulary: Sequence[int]) -> list[int]:
        """Token ids, drawn from `vocabulary`."""
        return random.Random(self.seed).choices(vocabulary, k=self.prompt_tokens)


def make_requests(plan: LoadPlan) -> list[LoadRequest]:
    """All of the run, in order of arrival: a Poisson process when there is a rate. Raises ValueError."""
    plan.check()
    draws = random.Random(plan.seed)
    requests = []
    arrival_s = 0.0
    for index in range(plan.sequences):
        if plan.rate is not None:
            arrival_s += draws.expovariate(plan.rate)
        prompt_tokens = draws.randint(*plan.prompt_tokens)
        new_tokens = draws.randint(*plan.new_tokens)
        # Drawn even where it is not used: another share leaves all else as it is.
        leaves, moment = draws.random() < plan.cancel_share, draws.randrange(new_tokens)
        cancel_after = moment if leaves else None
        requests.append(LoadRequest(index, arrival_s, prompt_tokens, new_tokens, cancel_after, f"{plan.seed}/{index}"))
    return requests
