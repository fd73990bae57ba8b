"""How clients connect: plaintext or TLS, with or without a token. One place for both clients."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

# What a client reads where nothing else is said; heavywater-health reads the first four.
CA_FILE = "HEAVYWATER_TLS_CA_FILE"
CERT_FILE = "HEAVYWATER_TLS_CERT_FILE"
KEY_FILE = "HEAVYWATER_TLS_KEY_FILE"
SERVER_NAME = "HEAVYWATER_TLS_SERVER_NAME"
TOKEN = "HEAVYWATER_TOKEN"
TOKEN_FILE = "HEAVYWATER_TOKEN_FILE"

_CONNECT_MS = "grpc.min_reconnect_backoff_ms"

Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Security:
    """TLS and a token, as a client has them.

    `ca_file`: PEM of who signs the servers' certificates; TLS is used. `cert_file` and
    `key_file`: the client's own, where servers want one. `server_name`: what the servers'
    certificates are made out to, where that is not the address's host. `token`, or
    `token_file`, whose one line is read anew for each call, goes with every call.
    """

    ca_file: str | os.PathLike[str] = ""
    cert_file: str | os.PathLike[str] = ""
    key_file: str | os.PathLike[str] = ""
    server_name: str = ""
    token: str = ""
    token_file: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("of a client's certificate and key only one is given, want both")
        if self.cert_file and not self.ca_file:
            raise ValueError(f"cert_file is {self.cert_file} without ca_file, want the file that checks the servers")
        if self.server_name and not self.ca_file:
            raise ValueError(
                f"server_name is {self.server_name} without ca_file, want the file that checks the servers"
            )
        if self.token:
            _clean(self.token)
        if self.token and self.token_file:
            raise ValueError(f"token and token_file {self.token_file} are given, want one of the two")

    def __repr__(self) -> str:
        """Never shows the token."""
        return (
            f"Security(ca_file={self.ca_file!s}, cert_file={self.cert_file!s}, token={'yes' if self.token else 'no'})"
        )

    @classmethod
    def from_environment(cls) -> Security:
        """As HEAVYWATER_TLS_CA_FILE, _CERT_FILE, _KEY_FILE, _SERVER_NAME, HEAVYWATER_TOKEN and _TOKEN_FILE say."""
        read = os.environ.get
        return cls(
            ca_file=read(CA_FILE, ""),
            cert_file=read(CERT_FILE, ""),
            key_file=read(KEY_FILE, ""),
            server_name=read(SERVER_NAME, ""),
            token=read(TOKEN, ""),
            token_file=read(TOKEN_FILE, ""),
        )

    @property
    def uses_tls(self) -> bool:
        return bool(self.ca_file)

    def channel(self, address: str, options: Options = ()) -> Any:
        """A channel for stubs. Raises ValueError for a token that would go in plaintext to another machine."""
        return self._made(address, options, grpc.secure_channel, grpc.insecure_channel)

    def aio_channel(self, address: str, options: Options = ()) -> Any:
        """Likewise, for asyncio."""
        import grpc.aio

        return self._made(address, options, grpc.aio.secure_channel, grpc.aio.insecure_channel)

    def _made(self, address: str, options: Options, secure: Callable[..., Any], insecure: Callable[..., Any]) -> Any:
        if not self.uses_tls:
            if (self.token or self.token_file) and not is_loopback(address):
                raise ValueError(
                    f"a token would go to {address} in plaintext, want TLS ({CA_FILE}) or a loopback address"
                )
            # Loopback is no loopback through somebody's proxy.
            return self._with_token(insecure(address, options=(*options, ("grpc.enable_http_proxy", 0))))
        credentials = grpc.ssl_channel_credentials(
            _read(self.ca_file), _read(self.key_file) or None, _read(self.cert_file) or None
        )
        # So long may connecting take, at least; what the caller says is for plaintext. It has no
        # bearing on how soon a refused connection is tried again.
        options = (*(one for one in options if one[0] != _CONNECT_MS), (_CONNECT_MS, 3000))
        if self.server_name:
            options = (*options, ("grpc.ssl_target_name_override", self.server_name))
        return self._with_token(secure(address, credentials, options=options))

    def _with_token(self, channel: Any) -> Any:
        if not self.token and not self.token_file:
            return channel
        return _TokenChannel(channel, self)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        token = _clean(self.token or _read(self.token_file).decode(errors="replace"))
        return (("authorization", f"Bearer {token}"),)


def _clean(text: str) -> str:
    """What a header can carry. The error does not show it, as grpcio's would."""
    token = text.strip()
    if not token or len(token) > 512 or not all("!" <= c <= "~" for c in token):
        raise ValueError(
            f"the token has {len(token)} characters, want 1 to 512 of printable ASCII without spaces, on one line"
        )
    return token


class _TokenChannel:
    """A channel whose calls carry the token. Not gRPC's call credentials: those refuse plaintext to loopback."""

    def __init__(self, channel: Any, security: Security) -> None:
        self._channel = channel
        self._security = security

    def _call(self, kind: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        call = getattr(self._channel, kind)(*args, **kwargs)
        return lambda *request, **options: call(*request, metadata=self._security.metadata(), **options)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._call("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._call("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._call("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._call("stream_stream", args, kwargs)

    def close(self) -> Any:
        return self._channel.close()

    def __enter__(self) -> _TokenChannel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def is_loopback(address: str) -> bool:
    """Whether host:port can only be reached from this machine. Names but "localhost" are not looked up."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: str | os.PathLike[str]) -> bytes:
    return Path(path).read_bytes() if path else b""
