"""`heavywater doctor`: each check against what is well and what is not, and the command's exit status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from client_fakes import FakeServers
from heavywater import __version__
from heavywater.doctor.finding import FAIL, OK, WARN, Finding
from heavywater.doctor.installation import check_binary, check_extras, check_model, check_packages
from heavywater.doctor.machine import check_memory, check_port, check_processor, check_shared_memory
from heavywater.doctor.servers import check_cache, check_metrics, check_worker
from heavywater.local import LocalServers

AVX512 = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "state", "found"),
    [(AVX512, OK, "AVX-512"), ("avx2 fma f16c avx512f", OK, "AVX2"), ("sse4_2 f16c", FAIL, "without avx2, fma")],
)
def test_the_processor_must_have_avx2(tmp_path: Path, flags: str, state: str, found: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    finding = check_processor(file)
    assert (finding.state, found in finding.found) == (state, True)
    assert bool(finding.advice) == (state != OK)


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    assert check_memory(file).found == "4.0 GiB available of 8.0 GiB"
    file.write_text("MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n")
    assert check_memory(file).state == WARN
    assert check_memory(tmp_path / "none").state == WARN


@pytest.mark.parametrize(("free_mib", "state"), [(4096, OK), (512, WARN), (64, FAIL)])
def test_shared_memory_must_hold_the_slab(monkeypatch: pytest.MonkeyPatch, free_mib: int, state: str) -> None:
    usage = type("Usage", (), {"free": free_mib << 20, "total": 8 << 30})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert check_shared_memory().state == state


def test_a_folder_that_is_no_tmpfs_fails(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "none").state == FAIL


def test_a_port_is_free_or_somebodys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert check_port(port, "somebody").state == WARN
    assert check_port(port, "somebody").state == OK


def test_packages_are_compared_with_what_is_wanted() -> None:
    assert check_packages(["grpcio>=1.76,<2", "rich>=14", "torch>=2 ; extra == 'hf'"]).found == "2 as they should be"
    finding = check_packages(["grpcio<1.2", "rich>=99.1", "no-such-package", "numpy"])
    assert finding.state == FAIL
    assert "grpcio is" in finding.found
    assert "want >=99.1" in finding.found
    assert "no-such-package is missing" in finding.found
    assert "numpy" not in finding.found
    assert check_extras().state == OK


def put(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "state", "found"),
    [
        (f"echo heavywater-cache {__version__}", OK, __version__),
        ("echo heavywater-cache 0.0.1", WARN, "is 0.0.1, this client"),
        ("echo libgrpc++.so: not found >&2; exit 127", FAIL, "libgrpc++.so: not found"),
        (None, FAIL, "not on PATH"),
    ],
)
def test_a_binary_must_be_there_start_and_be_of_this_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, state: str, found: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    if script:
        put(tmp_path, "heavywater-cache", script)
    finding = check_binary("heavywater-cache")
    assert (finding.state, found in finding.found) == (state, True)


def test_a_model_is_a_gguf_file_or_a_whole_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert check_model(file).state == FAIL
    file.write_bytes(b"<html>")
    assert "no GGUF file" in check_model(file).found
    file.write_bytes(b"GGUF" + bytes(100))
    assert check_model(file).state == OK
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").touch()
    assert check_model(folder).found.endswith("has no tokenizer.json, *.safetensors")
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    assert check_model(folder).state == OK


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


def test_a_worker_is_asked_whether_it_is_ready_and_what_it_is(servers: FakeServers) -> None:
    first, version = check_worker(servers.address)
    assert (first.state, "tiny" in first.found) == (OK, True)
    assert (version.state, "run the same version" in version.advice) == (WARN, True)  # the fake says none
    servers.health.ready = False
    (finding,) = check_worker(servers.address)
    assert (finding.state, "not ready" in finding.found) == (FAIL, True)
    (finding,) = check_worker("127.0.0.1:1")
    assert (finding.state, "UNAVAILABLE" in finding.found) == (FAIL, True)


def test_a_cache_service_is_asked_for_its_members_tiers_and_version(servers: FakeServers) -> None:
    members, tier, version = check_cache(servers.address)
    assert (members.state, "no worker is a member" in members.advice) == (WARN, True)
    assert (tier.state, "3 pages corrupt" in tier.found) == (WARN, True)
    assert (version.state, "9.9.9" in version.found) == (WARN, True)
    servers.cache.version = __version__
    assert len(check_cache(servers.address)) == 2
    assert states(check_cache("127.0.0.1:1")) == [FAIL]


@contextmanager
def metrics_server(text: str, ahead_s: float = 0.0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + ahead_s, usegmt=True)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_metrics_tell_of_a_lost_cache_service_lost_ranks_and_the_clock() -> None:
    with metrics_server("heavywater_cache_service_up 1\n") as address:
        assert states(check_metrics(address)) == [OK]
    with metrics_server("heavywater_cache_service_up 0\nheavywater_group_failures_total 2\n", 60) as address:
        lost, failures, clock = check_metrics(address)
    assert (lost.state, failures.state, clock.state) == (FAIL, WARN, WARN)
    assert "its clock is 60 s ahead" in clock.found or "its clock is 61 s ahead" in clock.found
    with metrics_server("", -60) as address:
        assert "behind" in check_metrics(address)[0].found
    for nobody in ("127.0.0.1:1", "nonsense"):
        assert states(check_metrics(nobody)) == [FAIL]


def run_doctor(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PATH": path} if path else {})}
    command = [sys.executable, "-m", "heavywater", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_servers_that_run_are_well(local_servers: LocalServers) -> None:
    metrics = ",".join(local_servers.metrics_addresses)
    addresses = [
        "--address",
        local_servers.worker_address,
        "--cache",
        local_servers.cache_address,
        "--metrics",
        metrics,
    ]
    done = run_doctor("--json", *addresses)
    report = json.loads(done.stdout)
    assert (done.returncode, report["healthy"]) == (0, True)
    found = {finding["what"]: finding["state"] for finding in report["findings"]}
    assert {"heavywater-cache", "heavywater-worker", "model", "processor", "shared memory"} <= found.keys()
    for what in (f"worker {local_servers.worker_address}", f"metrics {metrics}", "processor"):
        assert found[what] == OK


def test_what_fails_is_said_with_what_to_do_and_in_the_exit_status(tmp_path: Path) -> None:
    done = run_doctor("--address", "127.0.0.1:1", path=str(tmp_path))
    assert done.returncode == 1
    assert "FAIL  heavywater-worker" in done.stdout
    assert "deploy/local/run" in done.stdout
    assert int(done.stdout.split()[-2]) >= 3  # "... fail": both binaries, and the worker
    report = json.loads(run_doctor("--json", path=str(tmp_path)).stdout)
    assert report["healthy"] is False
    assert all(finding["advice"] for finding in report["findings"] if finding["state"] != OK)
