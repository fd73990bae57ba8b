"""What a call can fail with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc


class HeavywaterError(Exception):
    """A call that failed: `code` is gRPC's status name ("NOT_FOUND"), `message` the server's words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns gRPC's exceptions into HeavywaterError; the only place that does."""
    try:
        yield
    except grpc.RpcError as error:
        code = error.code().name if hasattr(error, "code") else "UNKNOWN"
        details = (error.details() or "no details") if hasattr(error, "details") else str(error)
        raise HeavywaterError(code, details) from error
