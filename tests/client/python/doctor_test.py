"""What `heavywater doctor` finds, of real servers, of a server that is wrong, and of nodes made up."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from heavywater.doctor.finding import Finding, Verdict
from heavywater.doctor.metrics import examine_metrics, find_clock, find_counts
from heavywater.doctor.node import find_interfaces, find_name, find_shared_memory
from heavywater.doctor.run import examine
from heavywater.doctor.servers import find_health
from heavywater.local import LocalServers
from heavywater.v1 import admin_pb2, admin_pb2_grpc

ENTRY = [sys.executable, "-m", "heavywater", "doctor"]


def one(findings: list[Finding], what: str) -> Finding:
    found = [finding for finding in findings if finding.what == what]
    assert len(found) == 1, [finding.what for finding in findings]
    return found[0]


def test_servers_that_are_well_have_no_failure(local_servers: LocalServers) -> None:
    arguments = ["--cache", local_servers.cache_address, "--address", local_servers.worker_address, "--json"]
    done = subprocess.run([*ENTRY, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [
        Finding(**{**found, "verdict": Verdict(found["verdict"])}) for found in json.loads(done.stdout)["findings"]
    ]
    assert not [finding for finding in findings if finding.failed]
    assert one(findings, "members").text.startswith("1 ranks in 1 groups")
    assert one(findings, "model").text.endswith("default policy snapkv_h2o")
    assert one(findings, "shared memory").verdict is Verdict.OK, "the slab of this node's cache service is here"
    assert one(findings, "listen_address").verdict is Verdict.WARNING, "it listens on the loopback"
    assert [finding.verdict for finding in findings if finding.what == "version"] == [Verdict.OK] * 2


def test_the_table_names_what_failed_and_the_exit_status_says_so() -> None:
    done = subprocess.run(
        [*ENTRY, "--cache", "127.0.0.1:1", "--timeout-s", "1"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "failed" in done.stdout and "does not answer" in done.stdout.replace("\n", " ")


def test_no_address_is_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEAVYWATER_")}
    done = subprocess.run(ENTRY, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert "want --cache, --address or --metrics" in done.stderr


class OldCache(admin_pb2_grpc.AdminServiceServicer):
    """Of another version, without ranks, its disk full of holes."""

    def Stats(self, request: admin_pb2.StatsRequest, context: grpc.ServicerContext) -> admin_pb2.StatsResponse:
        disk = admin_pb2.TierStats(tier="disk", total_bytes=100, used_bytes=50, failures_corrupt=3)
        host = admin_pb2.TierStats(tier="host", total_bytes=100, used_bytes=97)
        remote = admin_pb2.TierStats(tier="remote", total_bytes=100, failures_unavailable=2)
        return admin_pb2.StatsResponse(version="0.0.9", tiers=[host, disk, remote])

    def GetConfig(
        self, request: admin_pb2.GetConfigRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetConfigResponse:
        return admin_pb2.GetConfigResponse(yaml='listen_address: "0.0.0.0:7700"\nhost_bytes: 100\ndisable_slab: true\n')


@contextlib.contextmanager
def serving(ready: bool) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    states = health.HealthServicer()
    states.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    serving_status = health_pb2.HealthCheckResponse
    states.set("readiness", serving_status.SERVING if ready else serving_status.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(OldCache(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_cache_service_that_is_wrong_is_described() -> None:
    with serving(ready=True) as address:
        findings = examine(cache=address)
    assert "0.0.9" in one(findings, "version").text
    assert one(findings, "version").verdict is Verdict.WARNING
    assert one(findings, "members").verdict is Verdict.WARNING
    assert one(findings, "listen_address").verdict is Verdict.OK
    assert one(findings, "tier host").verdict is Verdict.WARNING
    assert one(findings, "tier disk").failed and "3 corrupt" in one(findings, "tier disk").text
    assert one(findings, "tier remote").verdict is Verdict.WARNING
    assert "disable_slab" in one(findings, "shared memory").text


def test_a_server_that_is_not_ready_is_alive() -> None:
    with serving(ready=False) as address:
        found = find_health(address, 5.0)
    assert found.failed and found.text.startswith("alive and not ready")


def test_shared_memory_has_the_slab_or_room_or_neither(tmp_path: Path) -> None:
    assert "stream" in find_shared_memory({"host_bytes": "4096"}, tmp_path).text
    too_much = find_shared_memory({"host_bytes": str(1 << 60)}, tmp_path)
    assert too_much.verdict is Verdict.WARNING and "it cannot run here" in too_much.text
    (tmp_path / "heavywater-slab-7").write_bytes(bytes(8192))
    assert find_shared_memory({"host_bytes": "4096"}, tmp_path).verdict is Verdict.OK
    assert find_shared_memory({"host_bytes": "4096", "slab_name": "mine"}, tmp_path).verdict is Verdict.WARNING


def test_interfaces_beside_the_loopback_are_listed(tmp_path: Path) -> None:
    def interface(name: str, state: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state + "\n")
        (tmp_path / name / "mtu").write_text("1500\n")

    interface("lo", "unknown")
    interface("eth1", "down")
    assert find_interfaces(tmp_path).verdict is Verdict.WARNING
    interface("eth0", "up")
    assert find_interfaces(tmp_path) == Finding("this node", "interfaces", Verdict.OK, "eth0 (mtu 1500)")


def test_a_name_that_does_not_resolve_is_said_before_anything_is_asked() -> None:
    assert find_name("nowhere.invalid:7700").failed
    assert find_name("127.0.0.1:7700").text.endswith("of this node alone")
    assert find_name("[::1]:7700").text.endswith("of this node alone")
    findings = examine(cache="nowhere.invalid:7700")
    assert [finding.what for finding in findings] == ["interfaces", "name"]


def test_a_clock_that_is_off_is_said() -> None:
    def verdict(offset_s: float) -> Finding:
        return find_clock("a:1", formatdate(1_000_000 + offset_s, usegmt=True), 1_000_000.0)

    assert verdict(0).verdict is Verdict.OK
    assert verdict(90).verdict is Verdict.WARNING and "ahead of" in verdict(90).text
    assert "behind" in verdict(-90).text
    assert find_clock("a:1", "", 0.0).verdict is Verdict.WARNING


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        ("heavywater_groups 1\n", Verdict.OK, "nothing that should be 0"),
        ("heavywater_checksum_failures_total 2\n", Verdict.FAILED, "2 pages have changed"),
        ("heavywater_plan_disagreements_total 1\n", Verdict.FAILED, "decided differently"),
        ("heavywater_group_failures_total 4\n", Verdict.WARNING, "4 times the group lost a rank"),
        ('heavywater_cache_service_up{rank="1"} 0\n', Verdict.FAILED, "no cache service"),
        ("heavywater_cache_service_up 1\nheavywater_checksum_failures_total 0\n", Verdict.OK, "nothing"),
        ("go_threads 3\n", Verdict.FAILED, "another server's endpoint"),
    ],
)
def test_counts_that_should_be_0(text: str, verdict: Verdict, words: str) -> None:
    (found,) = find_counts("a:1", text)
    assert found.verdict is verdict and words in found.text


def test_an_endpoint_of_metrics_tells_counts_and_time() -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"heavywater_groups 1\n")

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() - 3600, usegmt=True)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        clock, counts = examine_metrics(f"127.0.0.1:{server.server_port}", 5.0)
    finally:
        server.shutdown()
        server.server_close()
    assert "3600 s behind" in clock.text or "3599 s behind" in clock.text
    assert counts.verdict is Verdict.OK


def test_an_endpoint_that_is_not_there_is_a_failure() -> None:
    findings = examine(metrics=["127.0.0.1:1"])
    assert one(findings, "metrics").failed
