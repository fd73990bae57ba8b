"""The typed configuration of the chart, read by the real binaries."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import helm_chart
import pytest
import yaml
from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from heavywater.v1 import config_pb2
from helm_chart import Manifest, args, config, container, pod_templates, render

BIN = Path(os.environ.get("HEAVYWATER_BIN", helm_chart.ROOT / "build/release/bin"))

# What the chart decides itself, so that `config` may not.
SECURITY = {"tls_cert_file", "tls_key_file", "tls_client_ca_file", "allow_plaintext", "tokens_file"}
MANAGED = {
    "cache": {
        "listen_address", "advertised_address", "metrics_address", "disable_slab", "slab_name", "state_dir",
        "disk_path", *SECURITY,
    },
    "worker": {
        "group", "rank", "size", "model", "listen_address", "advertised_address", "comm_address",
        "comm_interface", "cache_address", "disable_slab", "metrics_address",
        # A pod sees its own GPU alone, and nothing can be read from a dump in it.
        "device", "allow_shared_device", "dump_dir", "record_dir",
        *SECURITY, "tls_ca_file", "tls_server_name", "token_file",
    },
}  # fmt: skip
MESSAGES: dict[str, Descriptor] = {
    "cache": config_pb2.CacheConfig.DESCRIPTOR,
    "worker": config_pb2.WorkerConfig.DESCRIPTOR,
}


def run_check(
    part: str, folder: Path, values: Manifest, flags: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = folder / f"{part}.yaml"
    path.write_text(yaml.safe_dump(config(render(values), part)))
    command = [str(BIN / f"heavywater-{part}"), f"--config={path}", "--check_config", *(flags or [])]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("part", ["cache", "worker"])
def test_the_schema_knows_exactly_the_fields_of_the_typed_config(part: str) -> None:
    with helm_chart.helm_python.Chart.load(helm_chart.CHART) as chart:
        assert chart.schema is not None
        allowed = set(chart.schema["properties"][part]["properties"]["config"]["properties"])
    fields = {field.name for field in MESSAGES[part].fields}
    assert MANAGED[part] <= fields
    assert allowed == fields - MANAGED[part]


@pytest.mark.parametrize("part", ["cache", "worker"])
@pytest.mark.parametrize("variant", helm_chart.VARIANTS)
def test_the_binaries_take_what_is_rendered(part: str, variant: str, tmp_path: Path) -> None:
    values = helm_chart.VARIANTS[variant]
    if variant == "restricted" and part == "worker":
        values = {**values, "worker": {**values["worker"], "config": ENGINE}}
    rendered = config(render(values), part)
    flags = ["--cache_address=a:1", "--advertised_address=b:1"] if part == "worker" else []
    checked = run_check(part, tmp_path, values, flags)
    assert checked.returncode == 0, checked.stderr
    taken = yaml.safe_load(checked.stdout)
    assert {key: taken[key] for key in rendered} == rendered


ENGINE = {
    "engine_model": "shape",
    "engine_layers": 2,
    "engine_query_heads": 4,
    "engine_kv_heads": 2,
    "engine_head_dim": 64,
    "drain_ms": 0,
}


def test_the_binaries_refuse_a_wrong_value_naming_it(tmp_path: Path) -> None:
    checked = run_check("cache", tmp_path, {}, ["--drain_ms=-1"])
    assert checked.returncode == 2
    assert "drain_ms is -1" in checked.stderr
    checked = run_check("worker", tmp_path, {}, ["--kv_dtype=int3"])
    assert checked.returncode == 2
    assert "kv_dtype" in checked.stderr


def expand(text: str, env: dict[str, str]) -> str:
    """As the kubelet does it."""
    return re.sub(r"\$\((\w+)\)", lambda match: env[match.group(1)], text)


@pytest.mark.parametrize(
    "values", [{"worker": {"groups": 2, "ranks": 3}}, helm_chart.LWS, {"ipFamily": "IPv6", "worker": {"ranks": 3}}]
)
def test_a_pod_tells_its_rank_and_address_to_the_others(values: Manifest, tmp_path: Path) -> None:
    ipv6 = values.get("ipFamily") == "IPv6"
    name, template = next((n, t) for n, t in pod_templates(render(values)).items() if "worker" in n)
    labels = {
        "apps.kubernetes.io/pod-index": "2",
        "leaderworkerset.sigs.k8s.io/worker-index": "2",
        "leaderworkerset.sigs.k8s.io/group-index": "0",
    }
    env = {}
    for entry in container(template)["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        address = "fd00::7" if ipv6 else "10.0.0.7"
        env[entry["name"]] = labels[label.group(1)] if label else address if path else entry["value"]
    flags = [expand(a, env) for a in container(template)["args"] if not a.startswith("--config=")]
    checked = run_check("worker", tmp_path, {**values, "worker": {**values["worker"], "config": {}}}, flags)
    assert checked.returncode == 0, checked.stderr
    taken = yaml.safe_load(checked.stdout)
    assert taken["rank"] == 2
    assert taken["group"] == "hw-heavywater-0"
    assert taken["advertised_address"] == ("[fd00::7]:7701" if ipv6 else "10.0.0.7:7701")
    assert taken["comm_address"] == ("fd00::7" if ipv6 else "10.0.0.7")
    assert taken["cache_address"] == "hw-heavywater-cache-0.hw-heavywater-cache.inference.svc.cluster.local:7700"
    assert taken["listen_address"] == ("[::]:7701" if ipv6 else "0.0.0.0:7701")
    assert name.startswith("hw-heavywater-worker")


def test_a_cache_service_among_several_tells_the_others_the_name_of_its_pod(tmp_path: Path) -> None:
    values = {
        "cache": {"perGroup": True, "config": {"etcd_endpoints": "etcd-0:2379,etcd-1:2379"}},
        "networkPolicy": {"extraEgress": [{"ports": [{"port": 2379, "protocol": "TCP"}]}]},
    }
    template = pod_templates(render(values))["hw-heavywater-cache"]
    address = args(template)["advertised_address"]
    assert address == "$(POD_NAME).hw-heavywater-cache.$(POD_NAMESPACE).svc.cluster.local:7700"
    checked = run_check("cache", tmp_path, values, [f"--advertised_address={address}"])
    assert checked.returncode == 0, checked.stderr
    assert yaml.safe_load(checked.stdout)["etcd_endpoints"] == "etcd-0:2379,etcd-1:2379"
    assert "advertised_address" not in args(pod_templates(render())["hw-heavywater-cache"])


def test_cache_addresses_are_names_of_pods_behind_the_headless_service() -> None:
    manifests = render()
    cache = helm_chart.find(manifests, "StatefulSet", "-cache")
    service = cache["spec"]["serviceName"]
    assert helm_chart.find(manifests, "Service", "-cache")["metadata"]["name"] == service
    address = args(pod_templates(manifests)["hw-heavywater-worker-0"])["cache_address"]
    assert address.startswith(f"{cache['metadata']['name']}-0.{service}.")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answer(channel: grpc.Channel, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5, wait_for_ready=True).status
    except grpc.RpcError as error:
        return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


@pytest.mark.parametrize("part", ["cache", "worker"])
def test_the_probes_ask_for_services_that_the_servers_register(part: str, tmp_path: Path) -> None:
    values: Manifest = {
        "sharedMemory": {"mode": "none"},
        "cache": {"disk": {"enabled": False}, "config": {"drain_ms": 0}},
    }
    values["worker"] = {"model": {"path": "none", "volume": None}, "config": ENGINE}
    template = next(t for name, t in pod_templates(render(values)).items() if part in name)
    path = tmp_path / f"{part}.yaml"
    path.write_text(yaml.safe_dump(config(render(values), part)))
    port = free_port()
    flags = [f"--config={path}", f"--listen_address=127.0.0.1:{port}", "--metrics_address="]
    server = subprocess.Popen([BIN / f"heavywater-{part}", *flags], stdout=sys.stderr, stderr=sys.stderr)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                service = container(template)[probe]["grpc"].get("service", "")
                assert answer(channel, service) == "SERVING", probe
            assert answer(channel, "liveliness") == "NOT_FOUND", "a wrong name would be noticed"
    finally:
        server.terminate()
        assert server.wait(timeout=20) == 0
    names = [container(template)[p]["grpc"].get("service") for p in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert names == [None, "liveness", "readiness"]
    assert {container(template)[p]["grpc"]["port"] for p in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        next(p["containerPort"] for p in container(template)["ports"] if p["name"] == "grpc")
    }
