"""Real processes for end-to-end tests: one cache service, the ranks of one group.

Every process listens on a port that the system picks, prints it, and is ended by
its own process id.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from heavywater import HeavywaterError, Security
from heavywater.v1 import (
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    group_pb2_grpc,
    page_store_pb2_grpc,
    sequence_pb2_grpc,
)

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("HEAVYWATER_BIN", ROOT / "build/release/bin"))
START_S = 60.0
# Of tests: what every change need not wait for.
takes_long = pytest.mark.skipif(not os.environ.get("HEAVYWATER_ALL"), reason="takes long: deploy/local/test --all")


@dataclass(frozen=True)
class Host:
    """Where a server runs: its address there, and what a command begins with to get there (nodes.py)."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


HERE = Host()


class Process:
    """A server of the project, its output kept for error messages."""

    def __init__(
        self, binary: str, flags: Mapping[str, object], log: Path, host: Host = HERE, binaries: Path = BIN
    ) -> None:
        self.host = host
        options = (f"--{name}={_text(value)}" for name, value in flags.items())
        command = [*host.prefix, str(binaries / binary), *options]
        self.log = log
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log_file = log.open("a")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log_file, text=True, env=environment
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_line(self, prefix: str, timeout_s: float = START_S) -> str:
        """The rest of the first line on standard output that begins with `prefix`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no line '{prefix}' within {timeout_s} s\n{self.tail()}") from None
            if line is None:
                raise RuntimeError(f"ended before the line '{prefix}'\n{self.tail()}")
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()

    def tail(self) -> str:
        self._log_file.flush()
        return self.log.read_text()[-4000:]

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, then the exit code."""
        if self.alive():
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=timeout_s)

    def wait(self, timeout_s: float) -> int:
        """Until it ends by itself: the exit code."""
        return self._process.wait(timeout=timeout_s)

    def close(self) -> None:
        if self.alive():
            try:
                self.terminate()
            except subprocess.TimeoutExpired:
                self.kill()
        self._log_file.close()


def plaintext(address: str) -> dict[str, object]:
    """What a server needs to listen there without TLS."""
    return {} if address.startswith("127.") else {"allow_plaintext": True}


def _addresses(host: Host) -> dict[str, object]:
    return {"listen_address": f"{host.address}:0", "comm_address": host.address, **plaintext(host.address)}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Cluster:
    """One cache service (unless `cache` is None) and `size` ranks.

    Rank r runs on hosts[r], or here; the cache service on `cache_host`.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        cache: Mapping[str, object] | None,
        worker: Mapping[str, object],
        per_rank: Mapping[int, Mapping[str, object]] | None = None,
        worker_binary: str = "heavywater-worker",
        hosts: Sequence[Host] = (),
        cache_host: Host = HERE,
        security: Security | None = None,
        binaries: Mapping[str, Path] | None = None,
    ) -> None:
        """`security`: how this process calls them; None: in plaintext. `binaries`: the folder of "cache" or
        "worker" where it is another build's; what starts from now on is of what `self.binaries` says then."""
        self.binaries = {"cache": BIN, "worker": BIN, **(binaries or {})}
        self.security = security or Security()
        self.folder = folder
        self._hosts = [*hosts, *[HERE] * (size - len(hosts))]
        self._cache_host = cache_host
        folder.mkdir(parents=True, exist_ok=True)
        self.cache: Process | None = None
        self.cache_address = ""
        self.workers: list[Process] = []
        self._channels: list[grpc.Channel] = []
        try:
            if cache is not None:
                self._start_cache(cache)
            self._start_workers(size, worker, per_rank or {}, worker_binary)
        except BaseException:
            self.close()
            raise

    def _start_cache(self, flags: Mapping[str, object]) -> None:
        listen = f"{self._cache_host.address}:0"
        merged = {"listen_address": listen, "metrics_address": "", "host_bytes": 1 << 30, **plaintext(listen), **flags}
        self._cache_flags = merged
        self._launch_cache(merged)

    def restart_cache(self, **changed: object) -> None:
        """In the place of one that has ended: a new process at the same address."""
        self._launch_cache({**self._cache_flags, "listen_address": self.cache_address, **changed})

    def _launch_cache(self, flags: Mapping[str, object]) -> None:
        log = self.folder / "cache.log"
        self.cache = Process("heavywater-cache", flags, log, self._cache_host, self.binaries["cache"])
        self.cache_address = self.cache.wait_for_line("listening on ")

    def _start_workers(
        self,
        size: int,
        worker: Mapping[str, object],
        per_rank: Mapping[int, Mapping[str, object]],
        binary: str,
    ) -> None:
        common = {
            "group": "e2e",
            "size": size,
            "model": os.environ["HEAVYWATER_MODEL"],
            "cache_address": self.cache_address,
        }
        self._binary = binary
        self._worker_flags = [
            {**common, **_addresses(host), "rank": rank, **worker, **per_rank.get(rank, {})}
            for rank, host in enumerate(self._hosts)
        ]
        for rank, flags in enumerate(self._worker_flags):
            self.workers.append(self._launch_worker(rank, flags))
        bound = [process.wait_for_line("listening on ") for process in self.workers]
        self.worker_addresses = [
            address.replace("0.0.0.0", host.address) for address, host in zip(bound, self._hosts, strict=True)
        ]
        self.worker_address = self.worker_addresses[0] if size else ""
        for address in self.worker_addresses:
            self.wait_ready(address)

    def restart_worker(self, rank: int, host: Host | None = None, *, wait: bool = True) -> None:
        """In the place of one that has died: a new process at the same address, or on another host."""
        if host is not None:
            self._hosts[rank] = host
            port = self.worker_addresses[rank].rpartition(":")[2]
            self._worker_flags[rank] = {**self._worker_flags[rank], **_addresses(host)}
            self.worker_addresses[rank] = f"{host.address}:{port}"
        flags = {**self._worker_flags[rank], "listen_address": self.worker_addresses[rank]}
        self.workers[rank] = self._launch_worker(rank, flags)
        if wait:
            self.workers[rank].wait_for_line("listening on ")

    def restart_workers(self) -> None:
        """All, once none of them runs any more; they are ready."""
        for rank in range(len(self.workers)):
            self.restart_worker(rank, wait=False)
        for rank, worker in enumerate(self.workers):
            worker.wait_for_line("listening on ")
            self.wait_ready(self.worker_addresses[rank])

    def _launch_worker(self, rank: int, flags: Mapping[str, object]) -> Process:
        log = self.folder / f"rank{rank}.log"
        return Process(self._binary, flags, log, self._hosts[rank], self.binaries["worker"])

    def is_ready(self, rank: int, service: str = "readiness") -> bool:
        stub = health_pb2_grpc.HealthStub(self.channel(self.worker_addresses[rank]))
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_ready(self, address: str, timeout_s: float = START_S) -> None:
        stub = health_pb2_grpc.HealthStub(self.channel(address))
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            dead = [p for p in self.workers if not p.alive()]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"--- {p.log.name}\n{p.tail()}" for p in self.workers)
                raise RuntimeError(f"the group at {address} is not ready\n{logs}")
            time.sleep(0.1)

    def channel(self, address: str) -> grpc.Channel:
        # As the project's clients: a call that fails is not quietly made again.
        channel = self.security.channel(address, [("grpc.enable_retries", 0)])
        self._channels.append(channel)
        return channel

    @property
    def generation(self) -> generation_pb2_grpc.GenerationServiceStub:
        return generation_pb2_grpc.GenerationServiceStub(self.channel(self.worker_address))

    @property
    def sequences(self) -> sequence_pb2_grpc.SequenceServiceStub:
        return sequence_pb2_grpc.SequenceServiceStub(self.channel(self.cache_address))

    @property
    def pages(self) -> page_store_pb2_grpc.PageStoreServiceStub:
        return page_store_pb2_grpc.PageStoreServiceStub(self.channel(self.cache_address))

    @property
    def groups(self) -> group_pb2_grpc.GroupServiceStub:
        return group_pb2_grpc.GroupServiceStub(self.channel(self.cache_address))

    @property
    def admin(self) -> admin_pb2_grpc.AdminServiceStub:
        return admin_pb2_grpc.AdminServiceStub(self.channel(self.cache_address))

    def generate(self, **fields: object) -> list[generation_pb2.GenerateResponse]:
        """All messages of one Generate; the last carries the summary."""
        request = generation_pb2.GenerateRequest(**fields)
        return list(self.generation.Generate(request, timeout=300))

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        for process in [*self.workers, *([self.cache] if self.cache else [])]:
            process.close()
        self._remove_kept_slab()

    def _remove_kept_slab(self) -> None:
        """With state_dir it waits for a cache service that comes back: this one does not."""
        if self.cache is None or not self.cache.log.exists():
            return
        for name in re.findall(r'slab="(heavywater-state-[^"]+)"', self.cache.log.read_text()):
            (Path("/dev/shm") / name).unlink(missing_ok=True)


@contextmanager
def cluster(folder: Path, size: int = 1, **kwargs: object) -> Iterator[Cluster]:
    started = Cluster(folder, size, **{"cache": {}, "worker": {}, **kwargs})  # type: ignore[arg-type]
    try:
        yield started
    finally:
        started.close()


def until_available(call: Callable[[], list[int]]) -> list[int]:
    """New requests are UNAVAILABLE while a group forms."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return call()
        except HeavywaterError as error:
            assert error.code == "UNAVAILABLE", error
            assert time.monotonic() < deadline, error
        time.sleep(0.2)


def token_ids(messages: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [m.token for m in messages if m.HasField("index")]


def summary(messages: list[generation_pb2.GenerateResponse]) -> generation_pb2.GenerateSummary:
    assert messages[-1].HasField("summary")
    return messages[-1].summary
