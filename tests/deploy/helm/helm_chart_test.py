"""What the chart renders: valid for several versions of Kubernetes, and right where a schema
cannot tell."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import helm_chart
import helm_python
import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
from helm_chart import VARIANTS, Manifest, args, config, container, find, pod_templates, render

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = ("1.28", "1.31", "1.34", "1.37")  # the chart's kubeVersion to the newest

# It would read the definitions of a version, a megabyte, for each manifest.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


@functools.cache
def validate_strictly(manifest_json: str) -> None:
    """Each distinct manifest once, against all versions, or against a schema of our own."""
    manifest = json.loads(manifest_json)
    own = SCHEMAS / f"{manifest['kind'].lower()}.json"
    if own.exists():
        jsonschema.validate(manifest, json.loads(own.read_text()))
    if manifest["kind"] == "LeaderWorkerSet":
        template = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        manifest = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "p"}, "template": template}
    elif own.exists():
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("variant", helm_chart.VARIANTS)
def test_what_is_rendered_is_valid_strictly(variant: str) -> None:
    manifests = render(helm_chart.VARIANTS[variant])
    assert manifests
    for manifest in manifests:
        validate_strictly(json.dumps(manifest, sort_keys=True))


def test_validation_is_strict() -> None:
    cache = find(render(), "StatefulSet", "-cache")
    container(cache["spec"]["template"])["livenessProbe"]["grpc"]["services"] = "liveness"
    with pytest.raises(kubernetes_validate.ValidationError, match="services"):
        validate_strictly(json.dumps(cache))
    workers = find(render(helm_chart.LWS), "LeaderWorkerSet")
    workers["spec"]["leaderWorkerTemplate"]["replicas"] = 3
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        validate_strictly(json.dumps(workers))


def test_helm_lint_finds_nothing_but_the_missing_icon() -> None:
    report = helm_python.lint(helm_chart.CHART, strict=True)
    findings = [message["error"] for message in report["messages"]]
    assert report["errors"] == []
    assert findings == ["icon is recommended"]


@pytest.mark.parametrize("variant", helm_chart.VARIANTS)
def test_no_two_manifests_have_one_name(variant: str) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in render(helm_chart.VARIANTS[variant])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("variant", helm_chart.VARIANTS)
def test_every_selector_selects_the_pods_it_is_for(variant: str) -> None:
    manifests = render(helm_chart.VARIANTS[variant])
    # Set on each pod by the controllers.
    by_controller = {"apps.kubernetes.io/pod-index": "0", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    pods = [{**t["metadata"]["labels"], **by_controller} for t in pod_templates(manifests).values()]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            labels = spec["selector"]
        elif manifest["kind"] == "NetworkPolicy":
            labels = spec["podSelector"]["matchLabels"]
        elif manifest["kind"] in ("StatefulSet", "PodDisruptionBudget"):
            labels = spec["selector"]["matchLabels"]
        else:
            continue
        assert any(labels.items() <= pod.items() for pod in pods), manifest["metadata"]["name"]


def test_statefulsets_select_pods_of_their_own_group_alone() -> None:
    templates = pod_templates(render({"worker": {"groups": 2}}))
    labels = [templates[f"hw-heavywater-worker-{group}"]["metadata"]["labels"] for group in (0, 1)]
    assert labels[0] != labels[1]


def test_service_monitors_select_the_services_with_metrics() -> None:
    manifests = render(helm_chart.VARIANTS["monitored"])
    monitors = [m for m in manifests if m["kind"] == "ServiceMonitor"]
    assert len(monitors) == 2
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"]
        services = [
            m for m in manifests if m["kind"] == "Service" and labels.items() <= m["metadata"]["labels"].items()
        ]
        assert len(services) == 1
        ports = {port["name"] for port in services[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
        assert monitor["spec"]["namespaceSelector"] == {"matchNames": [helm_chart.NAMESPACE]}
    assert not [m for m in render() if m["kind"] == "ServiceMonitor"], "off by default"


@pytest.mark.parametrize("variant", helm_chart.VARIANTS)
def test_pods_run_without_privileges(variant: str) -> None:
    for template in pod_templates(render(helm_chart.VARIANTS[variant])).values():
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container(template)["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert template["spec"]["automountServiceAccountToken"] is False
        for forbidden in ("hostIPC", "hostPID", "hostNetwork"):
            assert forbidden not in template["spec"]


def test_without_shared_memory_nothing_comes_from_the_node() -> None:
    for template in pod_templates(render(helm_chart.VARIANTS["restricted"])).values():
        assert not [volume for volume in template["spec"]["volumes"] if "hostPath" in volume]


def test_cache_service_and_ranks_share_memory_as_one_user() -> None:
    templates = list(pod_templates(render()).values())
    assert len({t["spec"]["securityContext"]["runAsUser"] for t in templates}) == 1, "the slab has mode 0600"
    volumes = [next(v for v in t["spec"]["volumes"] if v["name"] == "shm") for t in templates]
    assert volumes[0] == volumes[1] == {"name": "shm", "hostPath": {"path": "/dev/shm", "type": "Directory"}}
    for template in templates:
        assert {"name": "shm", "mountPath": "/dev/shm"} in container(template)["volumeMounts"]


def test_memory_of_the_cache_service_holds_its_host_tier() -> None:
    cache = find(render({"cache": {"config": {"host_bytes": 1 << 36}}}), "StatefulSet", "-cache")
    limit = int(container(cache["spec"]["template"])["resources"]["limits"]["memory"])
    assert limit == (1 << 36) + (1 << 30)


def test_ranks_prefer_or_want_the_node_of_their_cache_service() -> None:
    def affinity(values: Manifest) -> Manifest:
        return dict(pod_templates(render(values))["hw-heavywater-worker-0"]["spec"].get("affinity", {}))

    cache = find(render(), "StatefulSet", "-cache")["spec"]["selector"]["matchLabels"]
    preferred = affinity({})["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == cache
    required = affinity({"worker": {"colocate": "required"}})["podAffinity"]
    assert required == {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    assert affinity({"worker": {"colocate": "none"}}) == {}
    of_group = affinity({"cache": {"perGroup": True}, "worker": {"colocate": "required"}})["podAffinity"]
    labels = of_group["requiredDuringSchedulingIgnoredDuringExecution"][0]["labelSelector"]["matchLabels"]
    assert labels == {**cache, "apps.kubernetes.io/pod-index": "0"}


def test_each_group_has_a_cache_service_where_asked() -> None:
    for workload in ("StatefulSet", "LeaderWorkerSet"):
        manifests = render({"cache": {"perGroup": True}, "worker": {"groups": 3, "workload": workload}})
        assert find(manifests, "StatefulSet", "-cache")["spec"]["replicas"] == 3
        workers = {name: t for name, t in pod_templates(manifests).items() if "worker" in name}
        assert sorted(workers) == [f"hw-heavywater-worker-{group}" for group in range(3)]
        for group in range(3):
            template = workers[f"hw-heavywater-worker-{group}"]
            assert args(template)["cache_address"].startswith("hw-heavywater-cache-$(GROUP_INDEX).")
            assert {"name": "GROUP_INDEX", "value": str(group)} in container(template)["env"]


def test_a_group_goes_on_to_the_next_cache_service_when_its_own_is_lost_and_they_share_what_they_know() -> None:
    shared = {"etcd_endpoints": "etcd:2379", "redis_address": "redis:6379"}
    egress = {"extraEgress": [{"ports": [{"port": port, "protocol": "TCP"} for port in (2379, 6379)]}]}
    for workload in ("StatefulSet", "LeaderWorkerSet"):
        for stores, orders in (
            (shared, ("12", "23", "34", "40", "01")),
            ({"etcd_endpoints": "etcd:2379"}, ("",) * 5),
            ({}, ("",) * 5),
        ):
            cache = {"perGroup": True, "config": stores}
            worker = {"groups": 5, "workload": workload}
            templates = pod_templates(render({"cache": cache, "worker": worker, "networkPolicy": egress}))
            for group, order in enumerate(orders):
                addresses = args(templates[f"hw-heavywater-worker-{group}"])["cache_address"].split(",")
                domain = ".hw-heavywater-cache.inference.svc.cluster.local:7700"
                assert addresses == [f"hw-heavywater-cache-{index}{domain}" for index in ["$(GROUP_INDEX)", *order]]


def test_passwords_and_certificates_of_redis_and_etcd_come_as_secrets_to_the_cache_service_alone() -> None:
    manifests = render(VARIANTS["stores"])
    cache = pod_templates(manifests)["hw-heavywater-cache"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in cache["spec"]["volumes"] if "secret" in v}
    assert secrets == {"redis": "redis-access", "etcd": "etcd-access"}
    mounts = {mount["name"]: mount for mount in container(cache)["volumeMounts"]}
    taken = config(manifests, "cache")
    for store, fields in (
        ("redis", {"password_file": "password", "ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}),
        ("etcd", {"password_file": "password", "ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}),
    ):
        assert mounts[store]["readOnly"]
        for field, key in fields.items():
            assert taken[f"{store}_{field}"] == f"{mounts[store]['mountPath']}/{key}"
    worker = pod_templates(manifests)["hw-heavywater-worker-0"]
    assert not [v for v in worker["spec"]["volumes"] if "secret" in v]


def test_a_gpu_for_each_rank_on_cuda_and_none_else() -> None:
    gpus = helm_chart.LWS | {"worker": helm_chart.LWS["worker"] | {"gpuResource": "example.com/gpu"}}
    for template in [t for name, t in pod_templates(render(gpus)).items() if "worker" in name]:
        assert container(template)["resources"]["limits"]["example.com/gpu"] == 1
    assert "nvidia" not in json.dumps(render())


def test_ranks_start_together_and_are_replaced_together() -> None:
    stateful = find(render(), "StatefulSet", "-worker-0")["spec"]
    assert stateful["podManagementPolicy"] == "Parallel"
    # A rank of another configuration is refused, so one at a time would wait for ever.
    assert stateful["updateStrategy"] == {"type": "OnDelete"}
    lws = find(render(helm_chart.LWS), "LeaderWorkerSet")["spec"]
    assert lws["replicas"] == 2 and lws["leaderWorkerTemplate"]["size"] == 4
    # Rank 0 is ready when all have joined.
    assert lws["startupPolicy"] == "LeaderCreated"
    for name in ("-cache", "-ranks"):
        service = find(render(), "Service", name)["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]


@pytest.mark.parametrize("part", ["cache", "worker"])
@pytest.mark.parametrize("drain_ms", [0, 1, 5_000, 120_001])
def test_termination_takes_longer_than_the_drain(part: str, drain_ms: int) -> None:
    values = {part: {"config": {"drain_ms": drain_ms}, "preStopSeconds": 7}}
    for name, template in pod_templates(render(values)).items():
        if part in name:
            grace = template["spec"]["terminationGracePeriodSeconds"]
            assert grace >= 7 + drain_ms / 1000 + 10
            assert container(template)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]


def test_an_autoscaler_owns_the_number_of_groups() -> None:
    for variant, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        manifests = render(helm_chart.VARIANTS[variant])
        lws = find(manifests, "LeaderWorkerSet")
        assert "replicas" not in lws["spec"]
        target = find(manifests, kind)["spec"]["scaleTargetRef"]
        assert target == {"apiVersion": lws["apiVersion"], "kind": lws["kind"], "name": lws["metadata"]["name"]}


def test_the_network_policy_lets_ranks_clients_and_prometheus_in_and_nobody_else() -> None:
    manifests = render({"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "chat"}}}]}})
    cache = find(manifests, "NetworkPolicy", "-cache")["spec"]
    worker = find(manifests, "NetworkPolicy", "-worker")["spec"]
    ranks = {"podSelector": worker["podSelector"]}
    client = {"podSelector": {"matchLabels": {"app": "chat"}}}
    assert cache["ingress"][0] == {"from": [ranks, client], "ports": [{"port": "grpc", "protocol": "TCP"}]}
    assert worker["ingress"][0] == {"from": [ranks]}, "Gloo and NCCL choose their ports"
    assert worker["ingress"][1] == {"from": [client], "ports": [{"port": "grpc", "protocol": "TCP"}]}
    for policy in (cache, worker):
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["ingress"][-1]["ports"] == [{"port": "metrics", "protocol": "TCP"}]
        assert all("to" in rule or {p["port"] for p in rule["ports"]} == {53} for rule in policy["egress"])


def test_clients_reach_rank_0_of_each_group() -> None:
    for values, label in (
        ({}, "apps.kubernetes.io/pod-index"),
        (helm_chart.LWS, "leaderworkerset.sigs.k8s.io/worker-index"),
    ):
        service = find(render(values), "Service", "hw-heavywater")["spec"]
        assert service["selector"][label] == "0"
        assert "publishNotReadyAddresses" not in service, "a group that is not complete gets no calls"


def test_the_folder_of_the_disk_tier_is_on_its_volume_and_within_its_size() -> None:
    manifests = render()
    cache = find(manifests, "StatefulSet", "-cache")["spec"]
    mount = next(m for m in container(cache["template"])["volumeMounts"] if m["name"] == "disk")
    rendered = helm_chart.config(manifests, "cache")
    paths = {rendered["disk_path"], rendered["state_dir"]}
    assert len(paths) == 2 and all(path.startswith(mount["mountPath"] + "/") for path in paths), "a folder each"
    claim = cache["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert int(claim.removesuffix("Gi")) >= 40, "disk_bytes is 16 GiB, and each page is written twice"
    assert (
        "volumeClaimTemplates"
        not in find(render({"cache": {"disk": {"enabled": False}}}), "StatefulSet", "-cache")["spec"]
    )


def test_what_a_cache_service_keeps_is_of_its_pod_alone() -> None:
    cache = find(render({"cache": {"perGroup": True}, "worker": {"groups": 2}}), "StatefulSet", "-cache")["spec"]
    # Pods of all releases and namespaces share the node's /dev/shm.
    name = args(cache["template"])["slab_name"]
    assert name == "hw-$(POD_NAMESPACE)-$(POD_NAME).slab"
    paths = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container(cache["template"])["env"]}
    assert paths == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}
    # What another service removes as left behind, and a name that begins another's.
    assert not name.startswith("heavywater-slab-") and name.endswith(".slab")


@pytest.mark.parametrize(
    ("values", "keeps"),
    [
        ({}, True),
        ({"cache": {"keepState": False}}, False),
        ({"sharedMemory": {"mode": "none"}}, False),
        ({"cache": {"disk": {"enabled": False}}}, True),
    ],
)
def test_state_is_kept_where_the_slab_outlives_the_pod(values: Manifest, keeps: bool) -> None:
    manifests = render(values)
    rendered = helm_chart.config(manifests, "cache")
    assert bool(rendered["state_dir"]) == keeps
    cache = find(manifests, "StatefulSet", "-cache")["spec"]
    mounts = {mount["mountPath"] for mount in container(cache["template"])["volumeMounts"]}
    assert "/var/lib/heavywater" in mounts, "the root is read-only"
    volumes = {v["name"] for v in cache["template"]["spec"]["volumes"]}
    claims = {c["metadata"]["name"] for c in cache.get("volumeClaimTemplates", [])}
    assert ("disk" in volumes) != ("disk" in claims)


@pytest.mark.parametrize("part", ["cache", "worker"])
def test_with_tls_servers_have_the_secrets_and_probes_that_can_speak_it(part: str) -> None:
    manifests = render(VARIANTS["secured"])
    template = next(t for name, t in pod_templates(manifests).items() if part in name)
    secrets = {v["name"]: v["secret"]["secretName"] for v in template["spec"]["volumes"] if "secret" in v}
    assert secrets == {"tls": "hw-tls", "tokens": "hw-tokens"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(template)["volumeMounts"]}
    taken = config(manifests, part)
    assert "allow_plaintext" not in taken
    for field in ("tls_cert_file", "tls_key_file", "tls_client_ca_file"):
        assert taken[field].startswith(mounts["tls"] + "/")
    assert taken["tokens_file"].startswith(mounts["tokens"] + "/")
    environment = {entry["name"]: entry.get("value", "") for entry in container(template)["env"]}
    assert environment["HEAVYWATER_TLS_CA_FILE"].startswith(mounts["tls"] + "/")
    port = next(p["containerPort"] for p in container(template)["ports"] if p["name"] == "grpc")
    for probe, service in (("startupProbe", []), ("livenessProbe", ["liveness"]), ("readinessProbe", ["readiness"])):
        command = container(template)[probe]["exec"]["command"]
        assert command == ["heavywater-health", f"127.0.0.1:{port}", *service]
        assert "grpc" not in container(template)[probe]


def test_ranks_call_the_cache_service_over_tls_with_their_own_token() -> None:
    taken = config(render(VARIANTS["secured"]), "worker")
    assert taken["tls_ca_file"] == "/etc/heavywater-tls/ca.crt"
    assert taken["tls_server_name"] == "heavywater"
    assert taken["token_file"] == "/etc/heavywater-tokens/worker"


def test_without_tls_plaintext_is_allowed_in_so_many_words() -> None:
    for part in ("cache", "worker"):
        assert config(render(), part)["allow_plaintext"] is True
