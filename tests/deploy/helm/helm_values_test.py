"""A wrong value is refused in words that say what and where."""

from __future__ import annotations

import helm_python
import pytest
from helm_chart import Manifest, render


def _stores(**secrets: Manifest) -> Manifest:
    return {
        "cache": {"config": {"redis_address": "redis:6379", "etcd_endpoints": "etcd:2379"}, **secrets},
        "networkPolicy": {"extraEgress": [{}]},
    }


WRONG: list[tuple[Manifest, list[str]]] = [
    ({"worker": {"ranks": 0}}, ["/worker/ranks", "got 0, want 1"]),
    ({"worker": {"ranks": "four"}}, ["/worker/ranks", "got string, want integer"]),
    ({"worker": {"config": {"backend": "gpu"}}}, ["/worker/config/backend", "'cpu', 'reference', 'cuda'"]),
    ({"worker": {"model": {"path": ""}}}, ["/worker/model/path"]),
    ({"cache": {"config": {"host_byte": 5}}}, ["/cache/config", "host_byte"]),
    ({"cache": {"config": {"listen_address": "0.0.0.0:1"}}}, ["/cache/config", "listen_address"]),
    ({"cache": {"config": {"drain_ms": -1}}}, ["/cache/config/drain_ms", "got -1, want 0"]),
    ({"cache": {"disk": {"storage": "lots"}}}, ["/cache/disk/storage", "lots"]),
    ({"sharedMemory": {"mode": "hostIPC"}}, ["/sharedMemory/mode", "'hostPath', 'none'"]),
    ({"security": {"runAsUser": 0}}, ["/security/runAsUser", "got 0, want 1"]),
    ({"image": {"digest": "sha256:12"}}, ["/image/digest"]),
    ({"caches": {}}, ["caches"]),
    (
        {"worker": {"terminationGracePeriodSeconds": 10}},
        ["worker.terminationGracePeriodSeconds is 10, want more than 35", "drain_ms"],
    ),
    ({"autoscaling": {"type": "hpa"}}, ["autoscaling.type", "want worker.workload LeaderWorkerSet"]),
    (
        {
            "autoscaling": {"type": "keda"},
            "worker": {"workload": "LeaderWorkerSet"},
            "cache": {"perGroup": True},
        },
        ["cache.perGroup is true"],
    ),
    (
        {"autoscaling": {"type": "hpa", "minGroups": 5}, "worker": {"workload": "LeaderWorkerSet"}},
        ["minGroups is 5 and maxGroups is 4"],
    ),
    ({"cache": {"config": {"redis_address": "redis:6379"}}}, ["redis:6379", "want networkPolicy.extraEgress"]),
    ({"cache": {"config": {"etcd_endpoints": "etcd:2379"}}}, ["etcd:2379", "want networkPolicy.extraEgress"]),
    ({"cache": {"redis": {"secretName": "s"}}}, ["cache.redis.secretName", "redis_address is empty"]),
    (_stores(redis={"secretName": "s", "tls": False}), ["to redis:6379 in plaintext", "want cache.redis.tls true"]),
    (
        {
            "cache": {"config": {"redis_address": "redis:6379", "redis_password_file": "/x"}},
            "networkPolicy": {"extraEgress": [{}]},
        },
        ["redis has no TLS", "want cache.config.redis_ca_file"],
    ),
    (
        _stores(etcd={"secretName": "s", "tls": False, "clientCertificate": True}),
        ["cache.etcd.clientCertificate is true", "want cache.etcd.tls true"],
    ),
    (_stores(etcd={"secretName": "s", "password": True}), ["cache.config.etcd_user is empty"]),
    (_stores(redis={"passwd": "s"}), ["/cache/redis", "passwd"]),
    ({"worker": {"config": {"cache_failover_ms": 10}}}, ["/worker/config/cache_failover_ms", "got 10, want 1,000"]),
    ({"tls": {"enabled": True}}, ["tls.secretName is empty"]),
    ({"tokens": {"secretName": "tokens"}}, ["tls.enabled is false", "want tls.enabled true"]),
    ({"cache": {"config": {"allow_plaintext": True}}}, ["/cache/config", "allow_plaintext"]),
    (
        {"ipFamily": "IPv6", "monitoring": {"serviceMonitor": {"enabled": True}}},
        ["ipFamily is IPv6", "serviceMonitor"],
    ),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=[words[0] for _, words in WRONG])
def test_a_wrong_value_is_refused(values: Manifest, words: list[str]) -> None:
    with pytest.raises((helm_python.HelmValuesError, helm_python.HelmRenderError)) as refused:
        render(values)
    for word in words:
        assert word in str(refused.value)
