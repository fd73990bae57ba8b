"""What an endpoint serves, and its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heavywater.security import Security


@dataclass(frozen=True)
class HttpOptions:
    """Sizes in bytes, times in seconds."""

    worker: str  # host:port of rank 0
    cache: str = ""  # of the cache service: sequences are then closed as soon as they are answered
    model_names: tuple[str, ...] = ()  # what clients call the model; none: its own name
    api_key: str = ""  # wanted as a bearer token; none: whoever connects may ask
    max_body_bytes: int = 8 << 20
    headers_timeout_s: float = 30.0  # for a request's headers to arrive
    body_timeout_s: float = 30.0  # likewise its body
    max_running: int = 256  # answers under way, of all requests; more are refused
    request_timeout_s: float = 600.0  # from the request to the answer's end
    max_choices: int = 16  # answers of one request
    default_max_tokens: int = 1024  # of a chat that names no number
    max_turns: int = 0  # chats whose sequences are kept for their next question (wants the cache service)
    keep_turns_s: float = 600.0  # so long
    security: Security | None = None  # towards the servers; None: Security.from_environment()
    keepalive_s: float = 15.0  # silence on a stream after which a comment is sent

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 0 < self.request_timeout_s < math.inf:
            raise ValueError(f"the time limit of an answer is {self.request_timeout_s} s, want a number above 0")
        if self.max_turns < 0 or not 0 < self.keep_turns_s < math.inf:
            raise ValueError(f"turns are {self.max_turns} for {self.keep_turns_s} s, want 0 or more for a time above 0")
        if not self.api_key.isascii() or not self.api_key.isprintable():
            raise ValueError("the API key has letters that a header cannot carry, want printable ASCII")
        if not all(self.model_names):
            raise ValueError("a name of the model is empty")
