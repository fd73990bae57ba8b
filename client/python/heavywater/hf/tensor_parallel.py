"""A model that Transformers has split over processes (`tp_plan`, under torchrun): its ranks find each other through
torch's own store, and reduce scores over Heavywater's communicator."""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from heavywater.engine import EngineGroup
from heavywater.hf.models import UnsupportedModelError, kv_heads

_groups = itertools.count()  # ranks attach in the same order


def group_of(model: Any) -> EngineGroup | None:
    """The group of this process among those that have a part of the model's heads; None where it has all. A
    collective: every rank calls it in the same order."""
    size = getattr(model, "tp_size", None) or 1
    if size == 1:
        return None
    mesh = model._device_mesh["tp"]
    ranks = mesh.mesh.tolist()
    if len(ranks) != size:
        raise UnsupportedModelError(f"{type(model).__name__} has tp_size {size}, but its mesh has ranks {ranks}")
    _check_divisible(model, size)
    default = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"heavywater/{'-'.join(map(str, ranks))}/{next(_groups)}", default)
    return EngineGroup(
        mesh.get_local_rank(),
        size,
        put=store.set,
        wait=lambda key, seconds: _wait(store, key, seconds),
        listen_address=listen_address(),
    )


def _check_divisible(model: Any, size: int) -> None:
    heads = kv_heads(model.config)
    if heads % size != 0:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {heads} KV heads, want a multiple of the {size} ranks of its tp_plan"
        )


def _wait(store: Any, key: str, seconds: float) -> bytes:
    store.wait([key], timedelta(seconds=seconds))
    return bytes(store.get(key))


def listen_address() -> str:
    """Where other ranks reach this one: HEAVYWATER_LISTEN_ADDRESS, loopback where all ranks are on this machine, else
    the address from which torchrun's MASTER_ADDR is reached."""
    given = os.environ.get("HEAVYWATER_LISTEN_ADDRESS")
    if given:
        return given
    world, local = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    if local is None or local == world:
        return "127.0.0.1"
    master, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    family, kind, protocol, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: asks the routing table
        return str(probe.getsockname()[0])
