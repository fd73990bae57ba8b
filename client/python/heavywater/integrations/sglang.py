"""SGLang's HiCache with Heavywater's cache service as its third level (docs/integrations.md).

--hicache-storage-backend dynamic
--hicache-storage-backend-extra-config '{"backend_name": "heavywater",
    "module_path": "heavywater.integrations.sglang", "class_name": "HeavywaterStorage",
    "interface_v1": 1, "address": "127.0.0.1:7700"}'
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from heavywater.blobs import BlobClient, Parts
from heavywater.integrations.naming import space_of
from heavywater.integrations.outages import OutageLog

logger = logging.getLogger(__name__)

# Of a host pool: what its pages' bytes depend on.
_POOL_FIELDS = ("dtype", "layout", "page_size", "layer_num", "start_layer", "head_num", "head_dim", "v_head_dim")
_RANK_FIELDS = ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size", "logical_page_size")


class HeavywaterStorage(HiCacheStorage):  # type: ignore[misc]
    """One value per page and pool, at the cache service that `address` names (or HEAVYWATER_CACHE).

    With `interface_v1` in the configuration a page is read and written where it lies in the host pool; without, through
    a flat tensor. Equal bytes of other ranks are shared exactly where the model's KV is (MLA). A cache service that is
    away, or has no room, is a miss and a warning once a minute.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """`extra_config`: address, timeout_s [30], interface_v1 [0]. `kwargs` is what SGLang's factory hands on.

        Raises ValueError without an address.
        """
        del kwargs
        extra = storage_config.extra_config or {}
        address = extra.get("address") or os.environ.get("HEAVYWATER_CACHE")
        if not address:
            raise ValueError("extra_config has no address (host:port of the cache service), nor has HEAVYWATER_CACHE")
        self._config = storage_config
        self._in_place = bool(int(extra.get("interface_v1", 0)))
        self._blobs = BlobClient(address, timeout_s=float(extra.get("timeout_s", 30.0)))
        self._outages = OutageLog(logger)
        self._pools: dict[str, Any] = {}
        self._spaces: dict[str, str] = {}
        self._set_pool(PoolName.KV, None)

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._set_pool(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._set_pool(host_pool_name, host_pool)

    def _set_pool(self, name: Any, pool: Any) -> None:
        config = self._config
        fields = {field: getattr(config, field, None) for field in _RANK_FIELDS}
        # Recurrent states are split by rank where MLA's KV is the same on all.
        if not config.is_mla_model or name == PoolName.MAMBA:
            fields |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
        fields |= {field: str(getattr(pool, field, None)) for field in _POOL_FIELDS}
        fields |= {"pool": str(name), "kind": type(pool).__name__, "in_place": self._is_in_place(name)}
        self._pools[str(name)] = pool
        self._spaces[str(name)] = space_of("sglang", config.model_name or "", fields)

    def _is_in_place(self, name: Any) -> bool:
        return self._in_place and name == PoolName.KV

    # One page, as a tensor.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Into the targets, which are returned; into new tensors of bytes where there is none."""
        targets = target_locations if target_locations is not None else [None] * len(keys)

        def read() -> list[torch.Tensor | None]:
            if any(target is None or not target.is_contiguous() for target in targets):
                values = self._blobs.get(self._space(), _encoded(keys))
                return [_as_tensor(value, target) for value, target in zip(values, targets, strict=True)]
            parts = [[_bytes_of(target)] for target in targets]
            found = self._blobs.get_into(self._space(), _encoded(keys), parts)
            return [target if is_there else None for target, is_there in zip(targets, found, strict=True)]

        missed: list[torch.Tensor | None] = [None] * len(keys)
        return self._outages.or_else(missed, read)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Tensors only: pages that are given by address come through batch_set_v1."""
        if values is None or any(value is None for value in values):
            raise ValueError("values: want a tensor for each key")
        parts = [[_bytes_of(value.contiguous())] for value in values]
        return all(self._put(self._space(), keys, parts))

    def exists(self, key: str) -> bool:
        return self._present(PoolName.KV, [key])[0]

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return _leading(self._present(PoolName.KV, keys))

    # Pages where they lie in the host pool.

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        parts = _pages_in_place(self._pool(PoolName.KV), len(keys), host_indices)
        return self._get_into(self._space(), keys, parts)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        parts = _pages_in_place(self._pool(PoolName.KV), len(keys), host_indices)
        return self._put(self._space(), keys, parts)

    # Several pools.

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix of pages that every pool can restore, and by pool how far it has its own."""
        kv_pages = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            lengths = _restorable_lengths(transfer, self._present(transfer.name, keys[:kv_pages]))
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._load(transfer) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._store(transfer) for transfer in transfers}

    def _load(self, transfer: PoolTransfer) -> list[bool]:
        keys, space = transfer.keys or [], self._space(transfer.name)
        pool, first_indices = self._pages_of(transfer)
        if self._is_in_place(transfer.name):
            return self._get_into(space, keys, _pages_in_place(pool, len(keys), transfer.host_indices))
        pages = [pool.get_dummy_flat_data_page().contiguous() for _ in keys]
        found = self._get_into(space, keys, [[_bytes_of(page)] for page in pages])
        for index, page, is_there in zip(first_indices, pages, found, strict=True):
            if is_there:
                pool.set_from_flat_data_page(index, page)
        return found

    def _store(self, transfer: PoolTransfer) -> list[bool]:
        keys, space = transfer.keys or [], self._space(transfer.name)
        pool, first_indices = self._pages_of(transfer)
        if self._is_in_place(transfer.name):
            return self._put(space, keys, _pages_in_place(pool, len(keys), transfer.host_indices))
        pages = [pool.get_data_page(index, flat=True).contiguous() for index in first_indices]
        return self._put(space, keys, [[_bytes_of(page)] for page in pages])

    def _pages_of(self, transfer: PoolTransfer) -> tuple[Any, list[int]]:
        """The transfer's pool, and where in it each key's page begins."""
        pool = self._pool(transfer.name)
        page_size = getattr(pool, "page_size", 1) or 1
        want = len(transfer.keys or []) * page_size
        got = 0 if transfer.host_indices is None else transfer.host_indices.numel()
        if got != want:
            raise ValueError(f"host_indices of pool {transfer.name}: {got}, want {want}")
        return pool, [] if transfer.host_indices is None else transfer.host_indices[::page_size].tolist()

    # The rest.

    def clear(self) -> None:
        """Everything of this rank and model, also what other processes have stored."""
        for space in self._spaces.values():
            self._outages.or_else(0, lambda space=space: self._blobs.erase(space))  # type: ignore[misc]

    def close(self) -> None:
        self._blobs.disconnect()

    def _space(self, name: Any = PoolName.KV) -> str:
        return self._spaces[str(name)]

    def _pool(self, name: Any) -> Any:
        pool = self._pools.get(str(name))
        if pool is None:
            raise ValueError(f"host pool {name} is not registered")
        return pool

    def _present(self, name: Any, keys: list[str]) -> list[bool]:
        if str(name) not in self._spaces:
            return [False] * len(keys)
        return self._outages.or_else([False] * len(keys), lambda: self._blobs.has(self._space(name), _encoded(keys)))

    def _get_into(self, space: str, keys: list[str], targets: Sequence[Parts]) -> list[bool]:
        return self._outages.or_else([False] * len(keys), lambda: self._blobs.get_into(space, _encoded(keys), targets))

    def _put(self, space: str, keys: list[str], values: Sequence[Parts]) -> list[bool]:
        return self._outages.or_else([False] * len(keys), lambda: self._blobs.put_parts(space, _encoded(keys), values))


def _encoded(keys: list[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _leading(present: list[bool]) -> int:
    return present.index(False) if False in present else len(present)


def _restorable_lengths(transfer: PoolTransfer, present: list[bool]) -> set[int]:
    """Prefix lengths, in pages, at which this pool has what its policy wants."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(present) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or []))
        return {end for end in range(1, len(present) + 1) if all(present[max(0, end - window) : end])}
    raise ValueError(f"pool {transfer.name}: hit policy {transfer.hit_policy} is not served")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's own memory."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _as_tensor(value: bytes | None, target: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    read = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return read if target is None else target.copy_(read.view(target.dtype).view(target.shape))


def _pages_in_place(pool: Any, num_keys: int, host_indices: torch.Tensor) -> list[Parts]:
    """By key the memory of its page in the pool: one piece or several, as the pool's layout has it."""
    addresses, sizes = pool.get_page_buffer_meta(host_indices)
    if num_keys == 0 or len(addresses) % num_keys or len(addresses) == 0:
        raise ValueError(f"host_indices name {len(addresses)} pieces of memory for {num_keys} keys")
    pieces = [
        memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        for address, size in zip(addresses, sizes, strict=True)
    ]
    per_key = len(pieces) // num_keys
    return [pieces[first : first + per_key] for first in range(0, len(pieces), per_key)]
