"""An AdminService that answers the Python client in tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from heavywater.v1 import admin_pb2, admin_pb2_grpc


@dataclass
class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Keeps what it was asked to do."""

    version: str = "9.9.9"
    unavailable: int = 0
    requests: list[Any] = field(default_factory=list)
    running: int = 0  # sequences that a drain finds
    tenants: dict[str, admin_pb2.TenantStats] = field(default_factory=dict)
    watch_ended: threading.Event = field(default_factory=threading.Event)

    def GetConfig(
        self, request: admin_pb2.GetConfigRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetConfigResponse:
        return admin_pb2.GetConfigResponse(yaml="host_bytes: 1000\ntenant_sequences: 9\n")

    def SetQuota(self, request: admin_pb2.SetQuotaRequest, context: grpc.ServicerContext) -> admin_pb2.SetQuotaResponse:
        self.requests.append(request)
        used = admin_pb2.TenantQuota(host_bytes=7, sequences=1)
        tenant = admin_pb2.TenantStats(
            tenant=request.tenant, used=used, quota=request.quota, own_quota=not request.use_default
        )
        self.tenants[request.tenant] = tenant
        return admin_pb2.SetQuotaResponse(tenant=tenant)

    def Pin(self, request: admin_pb2.PinRequest, context: grpc.ServicerContext) -> admin_pb2.PinResponse:
        self.requests.append(request)
        if request.sequence_id == 404:
            context.abort(grpc.StatusCode.NOT_FOUND, "sequence 404 is unknown or has ended")
        return admin_pb2.PinResponse(pins=0 if request.unpin else 2, host_bytes=4096)

    def Drain(self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext) -> admin_pb2.DrainResponse:
        self.requests.append(request)
        if request.undo:
            return admin_pb2.DrainResponse()
        state = admin_pb2.DrainState(running_sequences=self.running, suspended_by_drain=3)
        return admin_pb2.DrainResponse(drain=state)

    def Flush(self, request: admin_pb2.FlushRequest, context: grpc.ServicerContext) -> admin_pb2.FlushResponse:
        self.requests.append(request)
        return admin_pb2.FlushResponse(moved_bytes=8192, host_used_bytes=4096)

    def Snapshot(self, request: admin_pb2.SnapshotRequest, context: grpc.ServicerContext) -> admin_pb2.SnapshotResponse:
        self.requests.append(request)
        return admin_pb2.SnapshotResponse(sequences=5, bytes=1234)

    def Watch(
        self, request: admin_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.WatchResponse]:
        self.requests.append(request)
        context.add_callback(self.watch_ended.set)
        host = admin_pb2.TierStats(tier="host", total_bytes=1000, used_bytes=250)
        number = 0
        while context.is_active():
            number += 1
            event = admin_pb2.AdminEvent(number=number, unix_ms=1, kind="pin", text=f"sequence {number}")
            yield admin_pb2.WatchResponse(stats=admin_pb2.StatsResponse(tiers=[host], pins=1), events=[event])
