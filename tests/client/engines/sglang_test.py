"""HeavywaterStorage against SGLang's own HiCacheStorage and its factory, over a real cache service."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heavywater.integrations.sglang import HeavywaterStorage
from host_pool import HostPool
from real_cache import cache_service
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

_models = (f"model {i}" for i in itertools.count())


def config(address: str, **changed: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "heavywater",
        "module_path": "heavywater.integrations.sglang",
        "class_name": "HeavywaterStorage",
        "address": address,
        "interface_v1": changed.pop("interface_v1", 1),
    }
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "model",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**(fields | changed))


@pytest.fixture
def model() -> str:
    return next(_models)


def made(address: str, pool: HostPool, **changed: Any) -> HiCacheStorage:
    """As SGLang makes it: by its factory, from the configuration."""
    storage = StorageBackendFactory.create_backend("dynamic", config(address, **changed), pool)
    storage.register_mem_pool_host(pool)
    return storage


def keys(count: int, prefix: str = "page") -> list[str]:
    return [f"{prefix} {i}" for i in range(count)]


def indices(*pages: int, page_size: int = 4) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def test_the_factory_of_sglang_makes_it_and_nothing_abstract_is_left(service: str, model: str) -> None:
    storage = made(service, HostPool("layer_first"), model_name=model)
    assert type(storage) is HeavywaterStorage
    assert isinstance(storage, HiCacheStorage)
    assert not HeavywaterStorage.__abstractmethods__


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_are_written_and_read_where_they_lie(service: str, model: str, layout: str) -> None:
    pool = HostPool(layout)
    storage = made(service, pool, model_name=model)
    assert storage.batch_set_v1(keys(3), indices(1, 2, 3)) == [True] * 3
    before = [pool.get_data_page(4 * page).clone() for page in (1, 2, 3)]
    other = HostPool(layout)
    reader = made(service, other, model_name=model)
    assert reader.batch_exists([*keys(3), "missing"]) == 3
    assert reader.batch_get_v1([*keys(3), "missing"], indices(7, 0, 5, 6)) == [True, True, True, False]
    for page, want in zip((7, 0, 5), before, strict=True):
        assert torch.equal(other.get_data_page(4 * page), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pages_pass_through_tensors(service: str, model: str, dtype: torch.dtype) -> None:
    pool = HostPool("layer_first", dtype=dtype)
    storage = made(service, pool, model_name=model, interface_v1=0)
    pages = [pool.get_data_page(0), pool.get_data_page(4)]
    assert storage.batch_set(keys(2), pages)
    assert storage.set("single", pages[0])
    assert storage.exists("single")
    assert not storage.exists("missing")
    targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
    got = storage.batch_get(["page 0", "missing", "page 1"], targets)
    assert got[0] is targets[0]
    assert got[1] is None
    assert torch.equal(got[0], pages[0])
    assert torch.equal(got[2], pages[1])
    assert torch.equal(storage.get("single", pool.get_dummy_flat_data_page()), pages[0])
    strided = torch.zeros(2 * pages[0].numel(), dtype=dtype)[::2]
    assert torch.equal(storage.get("single", strided), pages[0])
    assert storage.get("single").dtype == torch.uint8
    assert storage.get("missing", targets[0]) is None
    with pytest.raises(ValueError, match="want a tensor"):
        storage.set("single", None, target_location=1234, target_sizes=5)


def test_only_equal_bytes_are_shared(service: str, model: str) -> None:
    """Another rank, layout, dtype or model has keys of its own; ranks of a model whose KV is the same on all share."""
    pool = HostPool("layer_first")
    made(service, pool, model_name=model, tp_size=2).batch_set_v1(keys(1), indices(0))
    assert made(service, pool, model_name=model, tp_size=2).batch_exists(keys(1)) == 1
    for other in (
        made(service, pool, model_name=model, tp_size=2, tp_rank=1),
        made(service, pool, model_name=model, tp_size=1),
        made(service, pool, model_name=model + "!", tp_size=2),
        made(service, pool, model_name=model, tp_size=2, pp_size=2),
        made(service, pool, model_name=model, tp_size=2, interface_v1=0),
        made(service, HostPool("page_first"), model_name=model, tp_size=2),
        made(service, HostPool("layer_first", dtype=torch.float16), model_name=model, tp_size=2),
        made(service, HostPool("layer_first", page_size=8), model_name=model, tp_size=2),
    ):
        assert other.batch_exists(keys(1)) == 0
    made(service, pool, model_name=model, is_mla_model=True, tp_size=2).batch_set_v1(keys(1), indices(0))
    assert made(service, pool, model_name=model, is_mla_model=True, tp_size=2, tp_rank=1).batch_exists(keys(1)) == 1


def test_states_are_split_by_rank_where_kv_is_not(service: str, model: str) -> None:
    state = HostPool("layer_first", page_size=1, layers=1)
    shared = {"model_name": model, "is_mla_model": True, "tp_size": 2}
    ranks = [made(service, HostPool("page_first"), tp_rank=rank, **shared) for rank in (0, 1)]
    for rank in ranks:
        rank.register_mem_host_pool_v2(state, PoolName.MAMBA)
    transfer = PoolTransfer(name=PoolName.MAMBA, keys=["page 0"], host_indices=torch.tensor([0]))
    ranks[0].batch_set_v1(keys(1), indices(0))
    assert ranks[0].batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}
    assert [rank.batch_exists_v2(keys(1), [transfer]).kv_hit_pages for rank in ranks] == [1, 0]
    assert ranks[1].batch_get_v2([transfer]) == {PoolName.MAMBA: [False]}


def test_several_pools_are_stored_and_restored_together(service: str, model: str) -> None:
    pool, state = HostPool("page_first"), HostPool("layer_first", page_size=1, layers=1)
    storage = made(service, pool, model_name=model)
    storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
    transfers = [
        PoolTransfer(name=PoolName.KV, keys=keys(3), host_indices=indices(0, 1, 2)),
        PoolTransfer(name=PoolName.MAMBA, keys=keys(2), host_indices=torch.tensor([5, 6])),
    ]
    assert storage.batch_set_v2(transfers) == {PoolName.KV: [True] * 3, PoolName.MAMBA: [True] * 2}
    want = pool.get_data_page(4).clone(), state.get_data_page(6).clone()
    read = [
        PoolTransfer(name=PoolName.KV, keys=["page 1"], host_indices=indices(7)),
        PoolTransfer(name=PoolName.MAMBA, keys=["page 1", "missing"], host_indices=torch.tensor([0, 1])),
    ]
    assert storage.batch_get_v2(read) == {PoolName.KV: [True], PoolName.MAMBA: [True, False]}
    assert torch.equal(pool.get_data_page(28), want[0])
    assert torch.equal(state.get_data_page(0), want[1])
    with pytest.raises(ValueError, match="host_indices of pool"):
        storage.batch_set_v2([PoolTransfer(name=PoolName.KV, keys=keys(2), host_indices=indices(0))])


def test_how_far_a_prefix_can_be_restored(service: str, model: str) -> None:
    pool, state = HostPool("page_first"), HostPool("layer_first", page_size=1, layers=1)
    storage = made(service, pool, model_name=model)
    storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
    storage.register_mem_host_pool_v2(state, PoolName.INDEXER)
    storage.batch_set_v1(keys(5), indices(0, 1, 2, 3, 4))
    for name, there in ((PoolName.MAMBA, (1, 3)), (PoolName.INDEXER, (0, 1, 3))):
        storage.batch_set_v2(
            [PoolTransfer(name=name, keys=[f"page {i}" for i in there], host_indices=torch.arange(len(there)))]
        )
    plain = storage.batch_exists_v2([*keys(5), "missing"])
    assert (plain.kv_hit_pages, plain.extra_pool_hit_pages) == (5, {PoolName.KV: 5})
    trailing = PoolTransfer(name=PoolName.MAMBA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(keys(5), [trailing])
    assert found.kv_hit_pages == 4
    assert found.restorable_prefix_pages == [2, 4]
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4}
    every = PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert storage.batch_exists_v2(keys(5), [every, trailing]).restorable_prefix_pages == [2]
    assert storage.batch_exists_v2(["missing"], [every]).kv_hit_pages == 0
    unregistered = PoolTransfer(name=PoolName.SWA)
    assert storage.batch_exists_v2(keys(5), [unregistered]).kv_hit_pages == 0
    groups = PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    with pytest.raises(ValueError, match="hit policy"):
        storage.batch_exists_v2(keys(5), [groups])


def test_clear_takes_what_is_this_ranks(service: str, model: str) -> None:
    pool = HostPool("layer_first")
    storage, other = made(service, pool, model_name=model), made(service, pool, model_name=model, tp_size=2)
    for one in (storage, other):
        one.batch_set_v1(keys(2), indices(0, 1))
    storage.clear()
    assert storage.batch_exists(keys(2)) == 0
    assert other.batch_exists(keys(2)) == 2
    storage.close()


@pytest.fixture
def mortal_service(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    with cache_service(tmp_path, host_bytes=32 << 20, blob_bytes=8 << 20) as running:
        yield running


def test_a_service_that_is_away_is_a_miss_and_said_once(
    mortal_service: tuple[str, Any], model: str, caplog: Any
) -> None:
    address, process = mortal_service
    pool = HostPool("layer_first")
    storage = made(address, pool, model_name=model)
    assert storage.batch_set_v1(keys(1), indices(0)) == [True]
    process.kill()
    for _ in range(2):
        assert storage.batch_exists(keys(2)) == 0
        assert storage.batch_get_v1(keys(2), indices(0, 1)) == [False, False]
        assert storage.batch_set_v1(keys(2), indices(0, 1)) == [False, False]
        assert storage.get("page 0", pool.get_dummy_flat_data_page()) is None
    storage.clear()
    said = [record for record in caplog.records if "cache service" in record.message]
    assert len(said) == 1
    assert "UNAVAILABLE" in said[0].message


def test_without_an_address_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEAVYWATER_CACHE", raising=False)
    with pytest.raises(ValueError, match="extra_config has no address"):
        HeavywaterStorage(config(""), {})
