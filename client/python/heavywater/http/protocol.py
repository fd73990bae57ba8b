"""HTTP on a connection, with a time limit on a request's headers, which uvicorn has none for."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with(headers_timeout_s: float) -> type[asyncio.Protocol]:
    """For uvicorn.Config(http=...): closes a connection whose next request's headers take longer."""

    class Protocol(H11Protocol):
        """Between requests uvicorn's own limit (keep-alive) holds."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._expect_headers()
            else:
                self._forget_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_deadline()
            super().connection_lost(exc)

        def _expect_headers(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(headers_timeout_s, self.transport.abort)

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Protocol
