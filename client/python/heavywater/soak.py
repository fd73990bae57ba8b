"""Generations while processes are killed: each must end with the undisturbed run's text."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.generation import Generation
from heavywater.local import LocalServers
from heavywater.v1 import common_pb2

Result = TypeVar("Result")

# Long enough for evictions, committed states and, with recall, promotions.
_PROMPT_TOKENS = 200
NEW_TOKENS = 160
_POLICIES = (
    common_pb2.PolicyOptions(policy="snapkv_h2o", heavy_tokens=96, recent_tokens=32),
    common_pb2.PolicyOptions(policy="recall", heavy_tokens=96, recent_tokens=32),
)
# Leases of sequences, and what else may hold a page after its sequence was closed.
SEQUENCE_LEASE_MS = 15_000
_BACK_S = 60.0
_SETTLE_S = 2 * SEQUENCE_LEASE_MS / 1000 + 15


@dataclass
class SoakFigures:
    """`leaked`: bytes that tiers still hold, or do not account for, when nothing runs; `pins`: left then."""

    kills: int = 0
    equal: int = 0
    errors: int = 0
    leaked: int = 0
    pins: int = 0

    def row(self) -> dict[str, int]:
        """As `heavywater soak --json` prints it."""
        return asdict(self)


def soak(servers: LocalServers, kills: int, seed: int, new_tokens: int, progress: Callable[[str], None]) -> SoakFigures:
    """Kills one process in each of `kills` generations of `new_tokens`, when and in which order drawn from
    `seed`: the cache service as often as a worker."""
    draws = random.Random(seed)
    figures = SoakFigures()
    victims: list[int] = []
    with servers.client() as client:
        prompt = _prompt(client, draws)
        undisturbed = [_run(client, prompt, policy, new_tokens) for policy in _POLICIES]
        for index in range(kills):
            policy = index % len(_POLICIES)
            if not victims:
                victims = draws.sample(range(len(servers.processes)), len(servers.processes))
            moment, victim = draws.randrange(new_tokens), victims.pop()
            name = _name(victim)
            figures.kills += 1
            try:
                text = _run(client, prompt, _POLICIES[policy], new_tokens, moment, servers.processes[victim].kill)
                figures.equal += text == undisturbed[policy]
                said = "equal" if text == undisturbed[policy] else "DIFFERS"
            except HeavywaterError as error:
                figures.errors += 1
                said = str(error)
            progress(f"kill {figures.kills}: {name} after {moment} tokens, {_POLICIES[policy].policy}: {said}")
        figures.leaked, figures.pins = _left(client)
    return figures


def _name(victim: int) -> str:
    return f"rank {victim - 1}" if victim else "cache service"


def _prompt(client: Client, draws: random.Random) -> list[int]:
    """Any tokens will do: whole words, so that a text comes of it."""
    words = [i for i, piece in enumerate(client.get_model().pieces) if len(piece) > 3]
    return [draws.choice(words) for _ in range(_PROMPT_TOKENS)]


def _run(
    client: Client,
    prompt: list[int],
    policy: common_pb2.PolicyOptions,
    new_tokens: int,
    moment: int = -1,
    kill: Callable[[], None] = lambda: None,
) -> list[int]:
    """The new tokens; `kill` is called when there are `moment` of them."""
    tokens: list[int] = []

    def start() -> Generation:
        generation = client.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, policy=policy)
        generation.wait_accepted()
        return generation

    # What was killed near the end of the text before may not be back yet.
    with _once_available(start) as generation:
        for token in generation:
            if len(tokens) == moment:
                kill()
            tokens.append(token.token)
    _once_available(lambda: _close(client, generation.sequence_id))
    return tokens


def _close(client: Client, sequence_id: int) -> None:
    try:
        client.close(sequence_id)
    except HeavywaterError as error:
        if error.code != "NOT_FOUND":  # the answer to an earlier try was lost
            raise


def _once_available(call: Callable[[], Result]) -> Result:
    deadline = time.monotonic() + _BACK_S
    while True:
        try:
            return call()
        except HeavywaterError as error:
            if error.code != "UNAVAILABLE" or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _left(client: Client) -> tuple[int, int]:
    """Bytes and pins, once all is given back, or what is left is no longer only late."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        stats = _once_available(client.stats)
        held = sum(tier.used_bytes + abs(tier.total_bytes - tier.used_bytes - tier.free_bytes) for tier in stats.tiers)
        if held + stats.pins == 0 or time.monotonic() > deadline:
            return held, stats.pins
        time.sleep(0.5)
