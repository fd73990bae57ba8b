"""A proxy between a worker and its cache service that makes each take the other for one of another version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures

import grpc

# A field that nobody knows, of each wire type that is in use.
UNKNOWN = b"\xf8\xbf\x3e\x2a" + b"\xfa\xbf\x3e\x03new" + b"\xf9\xbf\x3e" + bytes(8)

Change = Callable[[str, bytes], bytes]


def newer(method: str, message: bytes) -> bytes:
    """With fields that this version does not know."""
    return message + UNKNOWN


class Proxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Listens on `address`; every message of every call, either way, passes through `request` or `response`."""

    def __init__(self, target: str, request: Change, response: Change) -> None:
        self._request = request
        self._response = response
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self.calls: dict[str, int] = {}
        self.changed = 0  # messages
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=64))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def call(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self.calls[details.method] = self.calls.get(details.method, 0) + 1
            metadata = [(key, value) for key, value in details.invocation_metadata if not key.startswith("grpc-")]
            onward = self._channel.stream_stream(details.method)(
                (self._through(self._request, details.method, one) for one in requests),
                timeout=context.time_remaining(),
                metadata=[item for item in metadata if item[0] != "user-agent"],
            )
            context.add_callback(onward.cancel)
            try:
                for answer in onward:
                    yield self._through(self._response, details.method, answer)
            except grpc.RpcError as error:
                context.set_trailing_metadata(
                    [item for item in error.trailing_metadata() or () if item[0].endswith("-bin")]
                )
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(call)

    def _through(self, change: Change, method: str, message: bytes) -> bytes:
        changed = change(method, message)
        self.changed += changed != message
        return changed

    def close(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()
