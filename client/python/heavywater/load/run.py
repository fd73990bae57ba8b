"""One load run: the servers before it, the requests, the servers after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from heavywater.client import Client
from heavywater.load.clients import LoadClients
from heavywater.load.figures import LoadFigures, Outcome, figures_of
from heavywater.load.leaks import Holdings, MemoryWatch, holdings, settled
from heavywater.load.requests import LoadPlan, make_requests
from heavywater.server_process import ServerProcess
from heavywater.v1 import common_pb2

_MAX_MESSAGES = 5


@dataclass(frozen=True)
class Target:
    """Servers to load. Processes and metrics are those of the servers, where they can be seen."""

    connect: Callable[[], Client]
    processes: Sequence[ServerProcess] = ()
    metrics_addresses: Sequence[str] = ()  # of workers, host:port, by rank


@dataclass(frozen=True)
class LoadResult:
    """`leaked`: names of what the servers hold more of than before, or that grew; empty: nothing."""

    figures: LoadFigures
    before: Holdings
    after: Holdings
    memory: dict[str, list[int]]  # bytes per process: at the start, after each quarter, at the end
    leaked: list[str]
    messages: list[str] = field(default_factory=list)  # of the first unexpected errors

    @property
    def good(self) -> bool:
        """Whether nothing unexpected was said and nothing is left."""
        return not self.figures.errors and not self.leaked

    def row(self) -> dict[str, object]:
        """As `heavywater load --json` prints it."""
        return {
            **self.figures.row(),
            "leaked": self.leaked,
            "held": _pairs(self.before.counts, self.after.counts),
            "working_bytes": _pairs(self.before.working, self.after.working),
            "memory_bytes": self.memory,
        }


def run_load(
    target: Target,
    plan: LoadPlan,
    clients: int,
    policy: common_pb2.PolicyOptions,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> LoadResult:
    """Runs the plan. Raises ValueError for what cannot be run, HeavywaterError where the servers are gone."""
    requests = make_requests(plan)
    with target.connect() as client:
        vocabulary = words(client.get_model().pieces)
        before = holdings(client, target.metrics_addresses)
        memory = MemoryWatch(target.processes, plan.sequences)

        def note_end(outcome: Outcome) -> None:
            memory.note_end()
            on_end(outcome)

        outcomes = LoadClients(target.connect, clients, vocabulary, policy, note_end).run(requests)
        after = settled(before, lambda: holdings(client, target.metrics_addresses))
        memory.finish()
    leaked = [*after.more_than(before), *memory.grown()]
    figures = figures_of(outcomes)
    return LoadResult(figures, before, after, memory.by_process(), leaked, first_messages(outcomes, figures))


def words(pieces: Sequence[str]) -> list[int]:
    """Any tokens will do for a prompt: whole words, so that control tokens are left out. Raises ValueError."""
    found = [index for index, piece in enumerate(pieces) if len(piece) > 3 and not piece.startswith("<")]
    if not found:
        raise ValueError(f"none of the vocabulary's {len(pieces)} tokens is a word, want one or more")
    return found


def first_messages(outcomes: Iterable[Outcome], figures: LoadFigures) -> list[str]:
    """The first few unexpected errors, in the servers' words."""
    unexpected = [outcome for outcome in outcomes if outcome.code in figures.errors]
    return [f"{outcome.code}: {outcome.message}" for outcome in unexpected[:_MAX_MESSAGES]]


def _pairs(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, list[int]]:
    return {name: [before.get(name, 0), count] for name, count in after.items()}
