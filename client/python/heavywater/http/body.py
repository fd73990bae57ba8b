"""The body of a request, within limits."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from heavywater.http.errors import ApiError
from heavywater.http.options import HttpOptions


async def read_body(request: Request, options: HttpOptions) -> bytes:
    """All of it. Raises ApiError when it is too long or too slow."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > options.max_body_bytes:
        raise _too_long(options)
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > options.max_body_bytes:
                    raise _too_long(options)
    except TimeoutError:
        message = f"the body did not come in {options.body_timeout_s:g} s"
        raise ApiError(408, message, code="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was whole") from None
    return bytes(body)


def _too_long(options: HttpOptions) -> ApiError:
    return ApiError(413, f"the body is longer than {options.max_body_bytes} bytes", code="request_too_large")
