"""What an endpoint serves, and its limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpOptions:
    """Sizes in bytes, times in seconds."""

    worker: str  # host:port of rank 0
    cache: str = ""  # of the cache service: sequences are then closed as soon as they are answered
    model_names: tuple[str, ...] = ()  # what clients call the model; none: its own name
    api_key: str = ""  # wanted as a bearer token; none: whoever connects may ask
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0  # for a request to arrive
    max_running: int = 256  # answers under way, of all requests; more are refused
    request_timeout_s: float = 600.0  # from the request to the answer's end
    max_choices: int = 16  # answers of one request
    default_max_tokens: int = 1024  # of a chat that names no number
    keepalive_s: float = 15.0  # silence on a stream after which a comment is sent
