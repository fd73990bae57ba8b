"""vLLM's tiered KV offloading with Heavywater's cache service below its CPU tier (docs/integrations.md).

"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ...,
    "secondary_tiers": [{"type": "HeavywaterTier", "module_path": "heavywater.integrations.vllm",
                         "address": "127.0.0.1:7700"}]}
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from vllm.v1.kv_offload.base import Locality, LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)

from heavywater.blobs import BlobClient, Parts
from heavywater.integrations.naming import space_of
from heavywater.integrations.outages import OutageLog

logger = logging.getLogger(__name__)


class HeavywaterTier(SecondaryTierManager):  # type: ignore[misc]
    """One value per offloaded chunk, at the cache service that `address` names (or HEAVYWATER_CACHE).

    Lookups and transfers run on threads of their own: no call waits for the service but drain_jobs() and shutdown(). A
    cache service that is away, or has no room, is a miss and a warning once a minute.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        address: str = "",
        threads: int = 4,
        timeout_s: float = 30.0,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        """`threads`: transfers at once, 1 to 64. Raises ValueError naming what is wrong."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        address = address or os.environ.get("HEAVYWATER_CACHE", "")
        if not address:
            raise ValueError("the tier has no address (host:port of the cache service), nor has HEAVYWATER_CACHE")
        if not 1 <= threads <= 64:
            raise ValueError(f"threads is {threads}, want 1 to 64")
        self.locality = Locality(locality) if locality is not None else None
        self._space = _space_of_spec(offloading_spec, self.block_size_bytes)
        self._memory = primary_kv_view.cast("B")
        self._blobs = BlobClient(address, timeout_s=timeout_s)
        self._outages = OutageLog(logger)
        self._lookups = _Lookups(self._blobs, self._space, self._outages, tier_type)
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="heavywater_tier")
        self._running: set[Future[None]] = set()
        self._finished: queue.SimpleQueue[tuple[TransferJob, list[bool], float]] = queue.SimpleQueue()

    # Lookups: an answer is there one step after the question.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    # Transfers.

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata)

    def _submit(self, job: TransferJob) -> None:
        future = self._pool.submit(self._run, job)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _run(self, job: TransferJob) -> None:
        start = time.monotonic()
        keys = [bytes(key) for key in job.keys]
        done = [False] * len(keys)
        try:
            chunks = [self._chunk(chunk_id) for chunk_id in job.chunk_ids]
            call = self._blobs.get_into if job.is_promotion else self._blobs.put_parts
            done = self._outages.or_else(done, lambda: call(self._space, keys, chunks))
        except Exception:
            logger.exception("transfer of %d chunks failed", len(keys))
        self._finished.put((job, done, time.monotonic() - start))

    def _chunk(self, chunk_id: int) -> Parts:
        first = int(chunk_id) * self.block_size_bytes
        if first < 0 or first + self.block_size_bytes > self._memory.nbytes:
            raise ValueError(f"chunk {chunk_id} lies outside of the primary tier's {self._memory.nbytes} bytes")
        return [self._memory[first : first + self.block_size_bytes]]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while True:
            try:
                job, done, seconds = self._finished.get_nowait()
            except queue.Empty:
                return results
            results.append(self._result(job, done, seconds))

    def _result(self, job: TransferJob, done: list[bool], seconds: float) -> JobResult:
        moved = [key for key, is_done in zip(job.keys, done, strict=True) if is_done]
        successful = None
        if job.is_promotion and not all(done):
            # Else the same lookup would send the scheduler here again and again.
            self._lookups.mark_miss([key for key, is_done in zip(job.keys, done, strict=True) if not is_done])
            successful = tuple(moved) or None
        return JobResult(
            job_id=job.job_id,
            success=all(done),
            successful_keys=successful,
            transfer_time=seconds,
            transfer_bytes=len(moved) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        wait(list(self._running))

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._pool.shutdown(wait=True)
        self._blobs.disconnect()


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """A step's lookups in one call, on vLLM's lookup thread."""

    def __init__(self, blobs: BlobClient, space: str, outages: OutageLog, tier_type: str) -> None:
        self._blobs = blobs
        self._space = space
        self._outages = outages
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._outages.or_else(
            [False] * len(keys), lambda: self._blobs.has(self._space, [bytes(key) for key in keys])
        )


def _space_of_spec(spec: Any, block_bytes: int) -> str:
    config = spec.config
    fields: dict[str, Any] = {
        "dtype": config.model.dtype,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "chunk_bytes": block_bytes,
        "worker_kv_bytes_per_block": config.worker_kv_bytes_per_block,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "canonical_layout": config.canonical_layout,
        "replicated_layout": config.replicated_layout,
        "kv_cache_layout": config.kv_cache_layout,
    }
    parallel = config.parallel
    fields |= {name: getattr(parallel, name) for name in ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")}
    return space_of("vllm", config.model.name, fields)
