"""heavywater suspend, heavywater resume"""

from __future__ import annotations

from typing import Annotated

import typer

from heavywater.client import Client

_Sequence = Annotated[int, typer.Argument(metavar="SEQ", help="The sequence's id, as generate prints it.")]
_Cache = Annotated[str, typer.Option("--cache", envvar="HEAVYWATER_CACHE", help="host:port of the cache service")]
_DEFAULT_CACHE = "127.0.0.1:7700"


def suspend(
    sequence_id: _Sequence,
    ttl_s: Annotated[float, typer.Option("--ttl", min=0, help="Seconds; 0: as long as the service lets.")] = 0.0,
    cache: _Cache = _DEFAULT_CACHE,
) -> None:
    """Take a sequence off the devices and keep its cache for a further turn."""
    with Client(cache=cache) as client:
        kept = client.suspend(sequence_id, ttl_s)
    print(f"sequence {sequence_id} is kept for {kept.ttl_ms / 1000:.0f} s with {kept.tokens_seen} tokens")


def resume(sequence_id: _Sequence, cache: _Cache = _DEFAULT_CACHE) -> None:
    """Give a suspended sequence its ordinary lease again."""
    with Client(cache=cache) as client:
        client.resume(sequence_id)
    print(f"sequence {sequence_id} has its ordinary lease again")
