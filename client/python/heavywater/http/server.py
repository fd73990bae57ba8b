"""The endpoint as a server of its own thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

import uvicorn

from heavywater.client import Client
from heavywater.http.app import create_app
from heavywater.http.options import HttpOptions
from heavywater.http.protocol import protocol_with
from heavywater.server_process import ServerError

_START_S = 30.0
_GRACE_S = 10  # for answers under way, when the server is told to end
_MAX_CONNECTIONS = 4096
_BACKLOG = 512


class HttpServer:
    """Context manager: it listens, takes requests, and is gone at the end.

    with HttpServer(HttpOptions(worker="127.0.0.1:7701"), port=0) as server:
        print(server.url)
    """

    def __init__(self, options: HttpOptions, host: str = "127.0.0.1", port: int = 8000, log_level: str = "warning"):
        """Port 0: one that the system picks. Raises ValueError."""
        if not host:
            raise ValueError("host is empty, want an address; 0.0.0.0 for all of this machine's")
        self._options = options
        self._host = host
        self._port = port
        self._log_level = log_level

    def __enter__(self) -> HttpServer:
        """Raises HeavywaterError where the worker cannot be asked for its model, OSError where the port is taken."""
        with Client(worker=self._options.worker, security=self._options.security) as client:
            model = client.get_model()
        self._socket = _listening(self._host, self._port)
        config = uvicorn.Config(
            create_app(self._options, model),
            log_level=self._log_level,
            access_log=self._log_level in ("info", "debug"),
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_S,
            server_header=False,
            http=protocol_with(self._options.headers_timeout_s),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + _START_S
        while not self._server.started:
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise ServerError(f"the HTTP server is not there in {_START_S:g} s")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    @property
    def url(self) -> str:
        """What clients take for their base URL, without /v1."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def check_alive(self) -> None:
        """Raises ServerError when it has ended."""
        if not self._thread.is_alive():
            raise ServerError("the HTTP server has ended; its log says why")

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # what it calls when it cannot start
            self._server.run(sockets=[self._socket])


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
