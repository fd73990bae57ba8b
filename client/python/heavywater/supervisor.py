"""Restarts servers of this machine that have died or stand still.

What a cluster's scheduler does elsewhere: a rank that is started again joins its group
under the same name, and the group goes on; a cache service goes on from its state.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heavywater.security import Security
from heavywater.server_process import ServerError, ServerProcess

_POLL_S = 0.2
# A process that gives no answer at all for so long stands still: it is killed.
_SILENT_S = 10.0
# So soon after its start an end is no accident that a start mends.
_SHORT_LIFE_S = 10.0
_MAX_SHORT_LIVES = 5


@dataclass
class Supervised:
    """One server: where it listens, and how to start it there again."""

    process: ServerProcess
    address: str
    start: Callable[[], ServerProcess]
    started_s: float
    answered_s: float  # when it last answered, of time.monotonic()
    short_lives: int = 0


class Supervisor:
    """Watches on a thread of its own, from its making until stop()."""

    def __init__(
        self,
        workers: Sequence[Supervised],
        poll_s: float = _POLL_S,
        silent_s: float = _SILENT_S,
        security: Security | None = None,
    ) -> None:
        """`security`: how the servers are called; None: in plaintext."""
        self._workers = workers
        self._security = security or Security()
        self._poll_s = poll_s
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._watching = True
        self._failure: ServerError | None = None
        self.restarts = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def processes(self) -> list[ServerProcess]:
        """Those that run now, in the order that they were given in."""
        with self._lock:
            return [worker.process for worker in self._workers]

    def check(self) -> None:
        """Raises ServerError when a server ends again and again."""
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def pause(self) -> None:
        """Nothing is started from now on. Servers die with the thread that started them: stop() comes last."""
        with self._lock:
            self._watching = False

    def stop(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._poll_s):
            for worker in self._workers:
                with self._lock:
                    if not self._watching or self._failure is not None:
                        continue
                    if not worker.process.alive():
                        self._restart(worker)
                        continue
                self._kill_if_silent(worker)

    def _restart(self, worker: Supervised) -> None:
        now_s = time.monotonic()
        worker.short_lives = worker.short_lives + 1 if now_s - worker.started_s < _SHORT_LIFE_S else 0
        if worker.short_lives > _MAX_SHORT_LIVES:
            try:
                worker.process.check_alive()
            except ServerError as error:
                self._failure = error
            return
        worker.process = worker.start()
        worker.started_s = worker.answered_s = now_s
        self.restarts += 1

    def _kill_if_silent(self, worker: Supervised) -> None:
        if _answers(worker.address, self._security, timeout_s=1.0):
            worker.answered_s = time.monotonic()
        elif time.monotonic() - max(worker.answered_s, worker.started_s) > self._silent_s:
            with self._lock:
                if self._watching:
                    worker.process.kill()


def _answers(address: str, security: Security, timeout_s: float) -> bool:
    """Whether a process answers there, whatever it says."""
    with security.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with contextlib.suppress(grpc.RpcError):
            stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            return True
    return False
