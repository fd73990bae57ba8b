"""The chart as Helm's own engine renders it, offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/helm/heavywater"
RELEASE = "hw"
NAMESPACE = "inference"

Manifest = dict[str, Any]

# What the tests render beside the defaults: every branch of the templates once.
LWS: Manifest = {
    "worker": {
        "workload": "LeaderWorkerSet",
        "groups": 2,
        "ranks": 4,
        "interface": "eth0",
        "runtimeClassName": "nvidia",
        "config": {"backend": "cuda", "communicator": "nccl", "device_memory_bytes": 68719476736},
    },
}
VARIANTS: Mapping[str, Manifest] = {
    "defaults": {},
    "statefulsets": {"worker": {"groups": 2, "ranks": 3, "colocate": "required"}},
    "lws": LWS,
    "lws_per_group": {**LWS, "cache": {"perGroup": True}},
    "statefulsets_per_group": {"worker": {"groups": 2, "ranks": 2}, "cache": {"perGroup": True}},
    "restricted": {
        "sharedMemory": {"mode": "none"},  # state is kept in the slab's mode alone
        "cache": {"disk": {"enabled": False}},
        "worker": {"colocate": "none", "model": {"path": "none", "volume": None}},
    },
    "secured": {
        "tls": {"enabled": True, "secretName": "hw-tls", "clientCertificates": True},
        "tokens": {"secretName": "hw-tokens"},
        "worker": {"ranks": 2},
    },
    "stores": {
        "cache": {
            "perGroup": True,
            "config": {
                "redis_address": "redis:6380",
                "redis_username": "heavywater",
                "etcd_endpoints": "etcd-0:2379,etcd-1:2379",
                "etcd_user": "heavywater",
            },
            "redis": {"secretName": "redis-access", "clientCertificate": True},
            "etcd": {"secretName": "etcd-access", "password": True},
        },
        "worker": {"groups": 3, "ranks": 2, "config": {"cache_failover_ms": 30000}},
        "networkPolicy": {"extraEgress": [{"ports": [{"port": port, "protocol": "TCP"} for port in (2379, 6380)]}]},
    },
    "hpa": {**LWS, "autoscaling": {"type": "hpa"}},
    "keda": {**LWS, "autoscaling": {"type": "keda"}},
    "ipv6": {"ipFamily": "IPv6", "worker": {"ranks": 2}},
    "monitored": {
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        }
    },
    "everything_else": {
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]},
        "serviceAccount": {"name": "inference", "annotations": {"a": "b"}},
        "cache": {
            "config": {"redis_address": "redis:6379", "disk_bytes": 1 << 40, "tier_high_percent": 80},
            "disk": {"storage": "2Ti", "storageClassName": "fast", "accessModes": ["ReadWriteOncePod"]},
            "resources": {"limits": {"memory": "20Gi"}},
            "preStopSeconds": 3,
            "terminationGracePeriodSeconds": 90,
            "priorityClassName": "high",
            "nodeSelector": {"pool": "memory"},
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]
                    }
                }
            },
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "inference"},
            "extraEnv": [{"name": "GRPC_VERBOSITY", "value": "info"}],
        },
        "worker": {
            "priorityClassName": "high",
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "inference"},
            "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
        "service": {"annotations": {"a": "b"}},
        "networkPolicy": {"extraEgress": [{"ports": [{"port": 6379, "protocol": "TCP"}]}]},
    },
    "bare": {
        "serviceAccount": {"create": False},
        "networkPolicy": {"enabled": False},
        "cache": {"podDisruptionBudget": {"enabled": False}, "keepState": False, "disk": {"enabled": False}},
        "worker": {"podDisruptionBudget": {"enabled": False}, "preStopSeconds": 0},
        "monitoring": {"dashboards": {"enabled": False}, "alerts": {"enabled": False}},
    },
}


def render_text(values: Manifest | None = None, name: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """File of the chart -> what it renders to; those that render to nothing are left out."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values or {}, name=name, namespace=namespace)
    return {
        Path(path).name: text
        for path, text in sorted(files.items())
        if path.endswith(".yaml") and any(yaml.safe_load_all(text))
    }


def render(values: Manifest | None = None) -> list[Manifest]:
    texts = render_text(values).values()
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def find(manifests: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The one manifest of this kind whose name ends so."""
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} manifests of kind {kind} named *{suffix}"
    return found[0]


def pod_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Name of the workload -> pod template."""
    templates = {}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "StatefulSet":
            templates[manifest["metadata"]["name"]] = spec["template"]
        elif manifest["kind"] == "LeaderWorkerSet":
            templates[manifest["metadata"]["name"]] = spec["leaderWorkerTemplate"]["workerTemplate"]
    return templates


def container(template: Manifest) -> Manifest:
    assert len(template["spec"]["containers"]) == 1
    return dict(template["spec"]["containers"][0])


def args(template: Manifest) -> dict[str, str]:
    """Flag -> value."""
    return dict(arg.removeprefix("--").split("=", 1) for arg in container(template)["args"])


def config(manifests: list[Manifest], part: str) -> Manifest:
    """The typed configuration: `part` is "cache" or "worker"."""
    return dict(yaml.safe_load(find(manifests, "ConfigMap", f"-{part}")["data"][f"{part}.yaml"]))
