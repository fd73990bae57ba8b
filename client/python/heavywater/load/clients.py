"""Clients that ask, read and leave, each on a thread and a connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.generation import Generation
from heavywater.load.figures import CANCELLED, COMPLETED, FAILED, Outcome, kind_of
from heavywater.load.requests import LoadRequest
from heavywater.v1 import common_pb2

MAX_CLIENTS = 1024


class LoadClients:
    """Runs requests in order, each by the first client that is free.

    A closed loop is requests that all arrive at 0: each client asks for the next as soon
    as its last has ended. In an open loop the number of clients bounds what is under
    way; times then count from the planned arrival, so that waiting for a client is seen.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        clients: int,
        vocabulary: Sequence[int],
        policy: common_pb2.PolicyOptions,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        """`on_end` is called on the client's thread, one call at a time. Raises ValueError."""
        if not 1 <= clients <= MAX_CLIENTS:
            raise ValueError(f"clients is {clients}, want 1 to {MAX_CLIENTS}")
        self._connect = connect
        self._clients = clients
        self._vocabulary = vocabulary
        self._policy = policy
        self._on_end = on_end
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._start_s = 0.0

    def run(self, requests: Sequence[LoadRequest]) -> list[Outcome]:
        """What came of each, in the order in which they ended."""
        outcomes: list[Outcome] = []
        connections = [self._connect() for _ in range(min(self._clients, len(requests)))]
        remaining = iter(requests)
        self._start_s = time.monotonic()

        def collect(outcome: Outcome) -> None:
            with self._lock:
                outcomes.append(outcome)
                self._on_end(outcome)

        pool = ThreadPoolExecutor(len(connections), thread_name_prefix="load")
        try:
            running = [pool.submit(self._serve, client, remaining, collect) for client in connections]
            for done in as_completed(running):
                done.result()
        finally:
            # After an error or a signal: whoever waits for a server waits no longer.
            self._stopped.set()
            for client in connections:
                client.disconnect()
            pool.shutdown()
        return outcomes

    def _serve(self, client: Client, remaining: Iterator[LoadRequest], collect: Callable[[Outcome], None]) -> None:
        while not self._stopped.is_set():
            with self._lock:
                request = next(remaining, None)
            if request is None:
                return
            arrival_s = self._start_s + request.arrival_s
            if self._stopped.wait(max(0.0, arrival_s - time.monotonic())):
                return
            collect(self._ask(client, request, arrival_s if request.arrival_s > 0 else time.monotonic()))

    def _ask(self, client: Client, request: LoadRequest, asked_s: float) -> Outcome:
        outcome = Outcome(asked_s, late_s=max(0.0, time.monotonic() - asked_s))
        generation: Generation | None = None
        try:
            generation = client.generate(
                request.prompt(self._vocabulary),
                max_new_tokens=request.new_tokens,
                ignore_eos=True,
                policy=self._policy,
                resume_timeout_s=0,  # what breaks off is to be seen
            )
            outcome.kind = _read(generation, request, outcome)
        except HeavywaterError as error:
            _note(outcome, error.code, error.message)
        outcome.ended_s = time.monotonic()
        self._close(client, generation, outcome)
        return outcome

    def _close(self, client: Client, generation: Generation | None, outcome: Outcome) -> None:
        """Frees the pages now, whatever came of the sequence; it may be closed while its end is under way."""
        if generation is None or not generation.sequence_id:
            return
        try:
            client.close(generation.sequence_id)
        except HeavywaterError as error:
            if outcome.kind in (COMPLETED, CANCELLED):
                _note(outcome, error.code, f"Close: {error.message}")


def _read(generation: Generation, request: LoadRequest, outcome: Outcome) -> str:
    """Reads to the end, or as far as the client stays. Returns the outcome's kind."""
    with generation:
        if request.cancel_after == 0:
            generation.wait_accepted()
            return CANCELLED
        for token in generation:
            outcome.token_times_s.append(time.monotonic())
            if token.index + 1 != len(outcome.token_times_s):
                _note(outcome, "DATA_LOSS", f"token {token.index} came as number {len(outcome.token_times_s)}")
                return FAILED
            if len(outcome.token_times_s) == request.cancel_after:
                return CANCELLED
    if len(outcome.token_times_s) != request.new_tokens:
        _note(outcome, "DATA_LOSS", f"{len(outcome.token_times_s)} tokens came, want {request.new_tokens}")
        return FAILED
    return COMPLETED


def _note(outcome: Outcome, code: str, message: str) -> None:
    outcome.kind, outcome.code, outcome.message = kind_of(code), code, message
