"""What operators do at the cache service: the calls of AdminService, for the client."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from heavywater.errors import translated
from heavywater.v1 import admin_pb2

_DRAIN_S = 60.0  # the service's default


def new_request_id() -> str:
    """Of a mutation: whoever repeats it with the same one gets the first answer."""
    return uuid.uuid4().hex


def quota_request(
    tenant: str, host_bytes: int, lower_bytes: int, sequences: int, use_default: bool
) -> admin_pb2.SetQuotaRequest:
    """As `set_quota` was asked."""
    request = admin_pb2.SetQuotaRequest(request_id=new_request_id(), tenant=tenant, use_default=use_default)
    quota = admin_pb2.TenantQuota(host_bytes=host_bytes, lower_bytes=lower_bytes, sequences=sequences)
    if not use_default or quota.ByteSize() > 0:
        request.quota.CopyFrom(quota)
    return request


def drain_timeout_s(deadline_s: float, timeout_s: float) -> float:
    """How long a call may take that waits for the drain's end."""
    return (deadline_s or _DRAIN_S) + timeout_s


class AdminCalls:
    """Part of Client: needs the cache service's address, and an admin's token where the service has tokens."""

    _admin: Any
    _timeout_s: float

    def _mutate(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        if self._admin is None:
            raise ValueError("this call needs the cache's address: Client(cache='host:port')")
        with translated():
            return getattr(self._admin, name)(request, timeout=timeout_s or self._timeout_s)

    def get_config(self) -> str:
        """The configuration in effect, as YAML."""
        return str(self._mutate("GetConfig", admin_pb2.GetConfigRequest()).yaml)

    def set_quota(
        self,
        tenant: str,
        *,
        host_bytes: int = 0,
        lower_bytes: int = 0,
        sequences: int = 0,
        use_default: bool = False,
    ) -> admin_pb2.TenantStats:
        """How much a tenant may hold: bytes of host memory and in the tiers below, sequences; 0: no limit.

        `use_default`: the configuration's again. What the tenant holds already stays.
        """
        request = quota_request(tenant, host_bytes, lower_bytes, sequences, use_default)
        tenant_stats: admin_pb2.TenantStats = self._mutate("SetQuota", request).tenant
        return tenant_stats

    def pin(self, sequence_id: int, owner: str, ttl_s: float) -> admin_pb2.PinResponse:
        """Until then the sequence's pages stay in their tier and nothing but its close ends it. NOT_FOUND,
        RESOURCE_EXHAUSTED. The owner's pin of before is replaced."""
        request = admin_pb2.PinRequest(
            request_id=new_request_id(), sequence_id=sequence_id, owner=owner, ttl_ms=round(1000 * ttl_s)
        )
        response: admin_pb2.PinResponse = self._mutate("Pin", request)
        return response

    def unpin(self, sequence_id: int, owner: str) -> admin_pb2.PinResponse:
        """The owner's pin ends now. NOT_FOUND: there is none."""
        request = admin_pb2.PinRequest(request_id=new_request_id(), sequence_id=sequence_id, owner=owner, unpin=True)
        response: admin_pb2.PinResponse = self._mutate("Pin", request)
        return response

    def drain(self, deadline_s: float = 0.0, *, suspend: bool = False) -> admin_pb2.DrainState:
        """The service takes no new sequences; waits until none runs, or `deadline_s` (0: a minute) is over.

        `suspend`: those that run are suspended, as soon as they have a committed state.
        """
        request = admin_pb2.DrainRequest(
            request_id=new_request_id(), deadline_ms=round(1000 * deadline_s), suspend=suspend
        )
        timeout_s = drain_timeout_s(deadline_s, self._timeout_s)
        state: admin_pb2.DrainState = self._mutate("Drain", request, timeout_s).drain
        return state

    def undo_drain(self) -> None:
        """The service takes new work again."""
        self._mutate("Drain", admin_pb2.DrainRequest(request_id=new_request_id(), undo=True))

    def flush(self, sequence_id: int = 0, timeout_s: float = 600.0) -> admin_pb2.FlushResponse:
        """Pages in host memory that may leave it (of one sequence; 0: of all) go to the tiers below."""
        request = admin_pb2.FlushRequest(request_id=new_request_id(), sequence_id=sequence_id)
        response: admin_pb2.FlushResponse = self._mutate("Flush", request, timeout_s)
        return response

    def snapshot(self) -> admin_pb2.SnapshotResponse:
        """What state_dir keeps is written anew, and is on the medium when this returns."""
        response: admin_pb2.SnapshotResponse
        response = self._mutate("Snapshot", admin_pb2.SnapshotRequest(request_id=new_request_id()))
        return response

    def watch(self, interval_s: float = 1.0, after_event: int = 0) -> Iterator[admin_pb2.WatchResponse]:
        """Figures and events at an interval, until the service ends (UNAVAILABLE) or the iterator is closed."""
        if self._admin is None:
            raise ValueError("this call needs the cache's address: Client(cache='host:port')")
        request = admin_pb2.WatchRequest(interval_ms=round(1000 * interval_s), after_event=after_event)
        stream = self._admin.Watch(request)
        try:
            with translated():
                yield from stream
        finally:
            stream.cancel()
