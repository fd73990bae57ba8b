"""HeavywaterTier against vLLM's own SecondaryTierManager and its factory, over a real cache service; driven as vLLM's
tiering manager drives its tiers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heavywater.integrations.vllm import HeavywaterTier
from real_cache import cache_service
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

CHUNKS, CHUNK_BYTES = 8, 12_288
END_OF_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
REQUEST = ReqContext(req_id="request")

# By name: by module_path the factory asks vLLM's distributed state whether to log, which wants all of vLLM.
SecondaryTierFactory.register_tier("heavywater", "heavywater.integrations.vllm", "HeavywaterTier")

_jobs = itertools.count()
_models = (f"model {i}" for i in itertools.count())


class Spec:
    """What a tier reads of an OffloadingSpec, whose own module wants a GPU's platform."""

    def __init__(self, model: str, dtype: str = "bfloat16", tp_size: int = 1) -> None:
        self.config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0", "layer.1"), group_id=0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig(name=model, dtype=dtype),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=tp_size,
                tp_size=tp_size,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
        )


class Engine:
    """A primary tier's memory and one Heavywater tier below it, made by vLLM's factory."""

    def __init__(self, address: str, spec: Spec, seed: int = 0, **options: Any) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, (CHUNKS, CHUNK_BYTES), np.uint8)
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "heavywater", "address": address, **options},
            memoryview(self.memory),
            spec,
        )

    def _run(self, names: list[str], chunks: list[int], is_promotion: bool) -> JobResult:
        job = TransferJob(next(_jobs), [key(name) for name in names], np.array(chunks), is_promotion, REQUEST)
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == job.job_id
        return result

    def store(self, names: list[str], chunks: list[int]) -> JobResult:
        return self._run(names, chunks, is_promotion=False)

    def load(self, names: list[str], chunks: list[int]) -> JobResult:
        return self._run(names, chunks, is_promotion=True)

    def lookup(self, name: str, request: ReqContext = REQUEST) -> LookupResult:
        """After as many steps as it takes."""
        deadline = time.monotonic() + 20
        while (found := self.tier.lookup(key(name), request)) is LookupResult.RETRY:
            self.tier.on_schedule_end(END_OF_STEP)
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return found


def key(name: str) -> Any:
    return make_offload_key(name.encode(), 0)


@pytest.fixture
def spec() -> Spec:
    return Spec(next(_models))


@pytest.fixture
def engine(service: str, spec: Spec) -> Iterator[Engine]:
    running = Engine(service, spec)
    yield running
    running.tier.shutdown()


def test_the_factory_of_vllm_makes_it_and_nothing_abstract_is_left(engine: Engine) -> None:
    assert type(engine.tier) is HeavywaterTier
    assert isinstance(engine.tier, SecondaryTierManager)
    assert not HeavywaterTier.__abstractmethods__


def test_chunks_are_stored_and_loaded_by_another_engine(engine: Engine, service: str, spec: Spec) -> None:
    stored = engine.store(["a", "b", "c"], [5, 0, 7])
    assert stored.success
    assert stored.transfer_bytes == 3 * CHUNK_BYTES
    other = Engine(service, spec, seed=1)
    untouched = other.memory[4].copy()
    loaded = other.load(["c", "a"], [1, 2])
    assert loaded.success
    assert loaded.successful_keys is None
    assert np.array_equal(other.memory[1], engine.memory[7])
    assert np.array_equal(other.memory[2], engine.memory[5])
    assert np.array_equal(other.memory[4], untouched)
    other.tier.shutdown()


def test_a_lookup_is_answered_a_step_later_without_waiting(engine: Engine) -> None:
    engine.store(["a"], [0])
    assert engine.tier.lookup(key("a"), REQUEST) is LookupResult.RETRY
    assert engine.lookup("a") is LookupResult.HIT
    assert engine.lookup("missing") is LookupResult.MISS
    engine.tier.on_request_finished(REQUEST)
    assert engine.tier.lookup(key("a"), ReqContext(req_id="next")) is LookupResult.RETRY


def test_of_a_load_that_fails_in_part_the_rest_is_kept_and_the_missing_not_asked_again(engine: Engine) -> None:
    engine.store(["a", "b"], [0, 1])
    for name in ("a", "b"):
        assert engine.lookup(name) is LookupResult.HIT
    engine.tier._blobs.erase(engine.tier._space, [bytes(key("b"))])
    result = engine.load(["a", "b"], [3, 4])
    assert not result.success
    assert result.successful_keys == (key("a"),)
    assert np.array_equal(engine.memory[3], engine.memory[0])
    assert engine.tier.lookup(key("b"), REQUEST) is LookupResult.MISS
    assert engine.tier.lookup(key("a"), REQUEST) is LookupResult.HIT


def test_only_equal_bytes_are_shared(engine: Engine, service: str, spec: Spec) -> None:
    engine.store(["a"], [0])
    name = spec.config.model.name
    for other in (Spec(name + "!"), Spec(name, dtype="float16"), Spec(name, tp_size=2)):
        running = Engine(service, other)
        assert running.lookup("a") is LookupResult.MISS
        running.tier.shutdown()


def test_a_chunk_outside_of_the_memory_fails_its_job_alone(engine: Engine, caplog: Any) -> None:
    assert not engine.store(["a"], [CHUNKS]).success
    assert "lies outside" in caplog.text
    assert engine.store(["a"], [CHUNKS - 1]).success


def test_many_jobs_at_once(engine: Engine) -> None:
    jobs = [TransferJob(next(_jobs), [key(f"{i}")], np.array([i % CHUNKS]), False, REQUEST) for i in range(50)]
    for job in jobs:
        engine.tier.submit_store(job)
    engine.tier.drain_jobs()
    results = list(engine.tier.get_finished_jobs())
    assert {result.job_id for result in results} == {job.job_id for job in jobs}
    assert all(result.success for result in results)
    assert list(engine.tier.get_finished_jobs()) == []


def test_a_service_that_is_away_is_a_miss(tmp_path: Path, spec: Spec, caplog: Any) -> None:
    with cache_service(tmp_path, host_bytes=32 << 20, blob_bytes=8 << 20) as (address, process):
        engine = Engine(address, spec)
        assert engine.store(["a"], [0]).success
        process.kill()
        assert engine.lookup("a") is LookupResult.MISS
        result = engine.load(["a"], [1])
        assert (result.success, result.successful_keys) == (False, None)
        assert not engine.store(["b"], [0]).success
        assert len([record for record in caplog.records if "cache service" in record.message]) == 1
        engine.tier.shutdown()


def test_what_is_wrong_in_the_configuration_is_named(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEAVYWATER_CACHE", raising=False)
    with pytest.raises(ValueError, match="no address"):
        Engine("", spec)
    with pytest.raises(ValueError, match="threads is 65"):
        Engine("127.0.0.1:1", spec, threads=65)
