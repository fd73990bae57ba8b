"""Errors in OpenAI's shape, and which status each has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.responses import JSONResponse

from heavywater.errors import HeavywaterError

INVALID = "invalid_request_error"
_RETRY_AFTER_S = "1"
_MAX_CHARACTERS = 1000
# Status, type and code of the servers' codes; others are this server's fault: 500.
_OF_CODE = {
    "INVALID_ARGUMENT": (400, INVALID, None),
    "OUT_OF_RANGE": (400, INVALID, "context_length_exceeded"),
    "FAILED_PRECONDITION": (400, INVALID, None),
    "NOT_FOUND": (404, INVALID, None),
    "ALREADY_EXISTS": (409, INVALID, None),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "resource_exhausted"),
    "UNAVAILABLE": (503, "server_error", "unavailable"),
    "DEADLINE_EXCEEDED": (504, "server_error", "timeout"),
}
# A complaint begins with the field's name: "policy.scope: ...", "heavy_ratio is ...".
_FIELD = re.compile(r"^((?:policy\.|sampling\.)?\w+)(?:\[\d+\])?(?:: | is | has )")
_OUR_NAMES = {"max_new_tokens": "max_tokens", "text": "prompt", "tokens": "prompt"}


@dataclass
class ApiError(Exception):
    """A refusal: HTTP status, and the fields of OpenAI's error object."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, object]:
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": self.kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"retry-after": _RETRY_AFTER_S} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def _printable(text: str) -> str:
    """As UTF-8 can hold it, and not endless: it may quote what a client has sent."""
    return text[:_MAX_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def invalid(param: str, message: str) -> ApiError:
    """A field that is wrong; `message` says what came and what is wanted."""
    return ApiError(400, f"{param}: {message}", param=param)


def of_server(error: HeavywaterError) -> ApiError:
    """What a server's refusal is over HTTP."""
    status, kind, code = _OF_CODE.get(error.code, (500, "server_error", error.code.lower()))
    param = _param_of(error.message) if error.code == "INVALID_ARGUMENT" else None
    return ApiError(status, error.message, kind, param, code)


def _param_of(message: str) -> str | None:
    """The request's field that the server's words name."""
    found = _FIELD.match(message)
    if found is None:
        return None
    group, _, name = found[1].rpartition(".")
    if group == "sampling":
        return name
    if name in _OUR_NAMES:
        return _OUR_NAMES[name]
    return f"heavywater.{name}"
