"""What operators do at the cache service, for the asyncio client: as heavywater.admin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from heavywater.admin import drain_timeout_s, new_request_id, quota_request
from heavywater.errors import translated
from heavywater.v1 import admin_pb2


class AdminCalls:
    """Part of aio.Client: the calls and arguments of heavywater.admin.AdminCalls."""

    _admin: Any
    _timeout_s: float

    async def _mutate(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        if self._admin is None:
            raise ValueError("this call needs the cache's address: Client(cache='host:port')")
        with translated():
            return await getattr(self._admin, name)(request, timeout=timeout_s or self._timeout_s)

    async def get_config(self) -> str:
        """The configuration in effect, as YAML."""
        return str((await self._mutate("GetConfig", admin_pb2.GetConfigRequest())).yaml)

    async def set_quota(
        self,
        tenant: str,
        *,
        host_bytes: int = 0,
        lower_bytes: int = 0,
        sequences: int = 0,
        use_default: bool = False,
    ) -> admin_pb2.TenantStats:
        """As heavywater.Client.set_quota."""
        request = quota_request(tenant, host_bytes, lower_bytes, sequences, use_default)
        tenant_stats: admin_pb2.TenantStats = (await self._mutate("SetQuota", request)).tenant
        return tenant_stats

    async def pin(self, sequence_id: int, owner: str, ttl_s: float) -> admin_pb2.PinResponse:
        """As heavywater.Client.pin."""
        request = admin_pb2.PinRequest(
            request_id=new_request_id(), sequence_id=sequence_id, owner=owner, ttl_ms=round(1000 * ttl_s)
        )
        response: admin_pb2.PinResponse = await self._mutate("Pin", request)
        return response

    async def unpin(self, sequence_id: int, owner: str) -> admin_pb2.PinResponse:
        """As heavywater.Client.unpin."""
        request = admin_pb2.PinRequest(request_id=new_request_id(), sequence_id=sequence_id, owner=owner, unpin=True)
        response: admin_pb2.PinResponse = await self._mutate("Pin", request)
        return response

    async def drain(self, deadline_s: float = 0.0, *, suspend: bool = False) -> admin_pb2.DrainState:
        """As heavywater.Client.drain."""
        request = admin_pb2.DrainRequest(
            request_id=new_request_id(), deadline_ms=round(1000 * deadline_s), suspend=suspend
        )
        timeout_s = drain_timeout_s(deadline_s, self._timeout_s)
        state: admin_pb2.DrainState = (await self._mutate("Drain", request, timeout_s)).drain
        return state

    async def undo_drain(self) -> None:
        """As heavywater.Client.undo_drain."""
        await self._mutate("Drain", admin_pb2.DrainRequest(request_id=new_request_id(), undo=True))

    async def flush(self, sequence_id: int = 0, timeout_s: float = 600.0) -> admin_pb2.FlushResponse:
        """As heavywater.Client.flush."""
        request = admin_pb2.FlushRequest(request_id=new_request_id(), sequence_id=sequence_id)
        response: admin_pb2.FlushResponse = await self._mutate("Flush", request, timeout_s)
        return response

    async def snapshot(self) -> admin_pb2.SnapshotResponse:
        """As heavywater.Client.snapshot."""
        response: admin_pb2.SnapshotResponse
        response = await self._mutate("Snapshot", admin_pb2.SnapshotRequest(request_id=new_request_id()))
        return response

    async def watch(self, interval_s: float = 1.0, after_event: int = 0) -> AsyncIterator[admin_pb2.WatchResponse]:
        """As heavywater.Client.watch."""
        if self._admin is None:
            raise ValueError("this call needs the cache's address: Client(cache='host:port')")
        request = admin_pb2.WatchRequest(interval_ms=round(1000 * interval_s), after_event=after_event)
        stream = self._admin.Watch(request)
        try:
            with translated():
                async for message in stream:
                    yield message
        finally:
            stream.cancel()
