"""What a cluster would be told, held against the schemas, the code and good practice."""

import functools
import re

import jsonschema
import kubernetes_validate
import pytest
import yaml
from manifests import (
    CRDS,
    OVERLAYS,
    POOL_GROUPS,
    containers,
    deployment_yaml,
    group_of,
    needs_kubectl,
    of_kind,
    pod_templates,
    render,
)

from cluster.worker_slot import SlotOptions
from core.config import parse_config
from router.server import SHUTDOWN_GRACE_S

pytestmark = [needs_kubectl, pytest.mark.parametrize("overlay", OVERLAYS)]

CUSTOM = {"RayCluster": "ray.io_rayclusters.yaml",
          "PodMonitor": "prometheus-operator-v0.93.0_podmonitors.yaml"}  # fmt: skip


def built_in(overlay):
    return [o for o in render(overlay) if o["kind"] not in CUSTOM]


def test_every_built_in_object_is_valid(overlay):
    version = kubernetes_validate.latest_version()
    assert {o["kind"] for o in built_in(overlay)} >= {
        "Deployment", "Service", "ConfigMap", "ServiceAccount", "NetworkPolicy",
        "PodDisruptionBudget", "HorizontalPodAutoscaler", "Namespace",
    }  # fmt: skip
    for item in built_in(overlay):
        kubernetes_validate.validate(item, version, strict=True)


def test_every_pod_template_is_a_valid_pod(overlay):
    """Strictly: the schemas of custom resources let unknown keys of pods pass."""
    version = kubernetes_validate.latest_version()
    for name, template in pod_templates(render(overlay)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
               "spec": template["spec"]}  # fmt: skip
        kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.skipif(not CRDS.is_dir(), reason="no CRDs: set PDSERVE_CRDS to their folder")
def test_every_custom_resource_is_valid(overlay):
    for item in of_kind(render(overlay), *CUSTOM):
        jsonschema.validate(item, schema_of(item["kind"], item["apiVersion"].partition("/")[2]))


@functools.cache
def schema_of(kind, version):
    (definition,) = yaml.safe_load_all((CRDS / CUSTOM[kind]).read_text())
    (schema,) = [
        v["schema"]["openAPIV3Schema"]
        for v in definition["spec"]["versions"]
        if v["name"] == version
    ]
    return closed(schema)


def closed(schema):
    """As the API server has it: a key that the schema does not name is an error."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: closed(value) for key, value in schema.items()}
    keys = schema.get("properties")
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(keys, dict) and keys and schema.get("type") == "object" and not is_open:
        result.setdefault("additionalProperties", False)
    return result


def test_a_wrong_key_of_a_custom_resource_would_be_found(overlay):
    schema = closed({"type": "object", "properties": {"spec": {"type": "object", "properties": {
        "a": {"type": "string"}}}}})  # fmt: skip
    jsonschema.validate({"spec": {"a": "x"}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"spec": {"b": "x"}}, schema)


def test_no_container_has_more_rights_than_it_needs(overlay):
    for name, template in pod_templates(render(overlay)):
        security = template["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert template["spec"]["serviceAccountName"] != "default", name
        needs_token = name == "head"  # of the Ray autoscaler
        assert template["spec"]["automountServiceAccountToken"] is needs_token, name
    for name, container in containers(render(overlay)):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"]["drop"] == ["ALL"], name
        may_lock = overlay.startswith("gpu") and name.endswith("/ray-worker")
        assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if may_lock else []), name


def test_every_container_says_what_it_takes(overlay):
    for name, container in containers(render(overlay)):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), name
        assert resources["limits"]["memory"] == resources["requests"]["memory"], name
        assert re.fullmatch(r"pdserve-(router|worker):[\d.]+", container["image"]), name


def test_every_container_is_probed_and_no_liveness_waits_for_a_model(overlay):
    """V64: a start may take minutes, and no probe that kills looks at anything but the process."""
    for name, container in containers(render(overlay)):
        start = container["startupProbe"]
        assert start["failureThreshold"] * start["periodSeconds"] >= 120, name
        assert "readinessProbe" in container, name
        live = container["livenessProbe"]
        assert live["periodSeconds"] * live["failureThreshold"] >= 60, name
        if "httpGet" in live:
            assert live["httpGet"]["path"] == "/health", name  # /ready depends on others
            assert live["httpGet"].get("scheme") == ("HTTPS" if overlay == "gpu-tls" else None)
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if "httpGet" in live:
                assert probe["httpGet"].get("scheme") == live["httpGet"].get("scheme"), name
            assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports, name


def test_a_pod_has_more_time_to_end_than_its_drain_takes(overlay):
    """V63: preStop, then the grace of what runs, then the end of the process."""
    for name, template in pod_templates(render(overlay)):
        grace = template["spec"]["terminationGracePeriodSeconds"]
        for container in template["spec"]["containers"]:
            command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
            command = command.get("command", [])
            if name == "pdserve-router":
                assert command[0] == "sleep"
                assert grace > int(command[1]) + SHUTDOWN_GRACE_S + 10
            elif name in POOL_GROUPS:
                drain = float(re.search(r"--grace (\d+)", command[-1])[1])
                assert drain == SlotOptions("x").drain_grace_s
                # It may wait for another operation as long again.
                assert grace > 2 * drain + 30


def test_every_selector_finds_what_it_is_meant_for(overlay):
    objects = render(overlay)
    labels = [template["metadata"]["labels"] for _, template in pod_templates(objects)]

    def found(selector):
        return [own for own in labels if selector.items() <= own.items()]

    for service in of_kind(objects, "Service"):
        assert found(service["spec"]["selector"]), service["metadata"]["name"]
    for item in of_kind(objects, "PodDisruptionBudget", "PodMonitor", "Deployment"):
        assert found(item["spec"]["selector"]["matchLabels"]), item["metadata"]["name"]
    for policy in of_kind(objects, "NetworkPolicy"):
        assert found(policy["spec"]["podSelector"].get("matchLabels", {}))
    covered = [
        p["spec"]["podSelector"].get("matchLabels") for p in of_kind(objects, "NetworkPolicy")
    ]
    assert all(any(c and c.items() <= own.items() for c in covered) for own in labels)
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    (deployment,) = of_kind(objects, "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]  # two owners of it would fight at each apply


def test_ports_agree_with_the_yaml_and_services_with_ports(overlay):
    objects = render(overlay)
    config = parse_config(deployment_yaml(objects))
    ports = {
        (name, port["name"]): port["containerPort"]
        for name, container in containers(objects)
        for port in container["ports"]
    }
    assert ports["pdserve-router/router", "http"] == int(config.router.http.rpartition(":")[2])
    assert ports["pdserve-router/router", "grpc"] == int(config.router.grpc.rpartition(":")[2])
    assert config.router.http.startswith("0.0.0.0:")
    (service,) = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == "pdserve"]
    http, grpc = service["spec"]["ports"]
    if config.router.tls is None:
        assert (http["port"], grpc["appProtocol"]) == (80, "kubernetes.io/h2c")
    else:
        assert http["port"] == 443 and "appProtocol" not in grpc  # h2c is HTTP/2 without TLS
    for monitor in of_kind(objects, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint.get("scheme") == "https") == (config.router.tls is not None)
    services = {s["metadata"]["name"]: s for s in of_kind(objects, "Service")}
    named = {port for _, port in ports}
    for service in services.values():
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= named
    for name, container in containers(objects):
        command = container["command"]
        for flag, port_name in (("--port=", "gcs"), ("--node-manager-port=", "raylet")):
            for word in command:
                if word.startswith(flag) and (name, port_name) in ports:
                    assert int(word.removeprefix(flag)) == ports[name, port_name]
        if "--bind" in command:
            bound = command[command.index("--bind") + 1]
            assert bound == f"0.0.0.0:{ports['head/controller', 'controller']}"
        for text in command + container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get(
            "command", []
        ):
            for host, port in re.findall(r"(pdserve-[a-z-]+):(\d+)", text):
                assert int(port) in [p["port"] for p in services[host]["spec"]["ports"]], text


def test_each_pool_has_a_worker_group_whose_pods_hold_one_worker(overlay):
    """Pools with roles share one."""
    objects = render(overlay)
    config = parse_config(deployment_yaml(objects))
    (cluster,) = of_kind(objects, "RayCluster")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    pools = {name: [p for p in config.active_pools if group_of(config, p) == name]
             for name in groups}  # fmt: skip
    assert sum(map(len, pools.values())) == len(config.active_pools)
    for name, group in groups.items():
        assert all({*config.roles_of(pool)} == {*pools[name]} for pool in pools[name])
        wanted = [config.pools.named(pool) for pool in pools[name]]
        replicas = sum(pool.replicas for pool in wanted)
        assert group["minReplicas"] <= replicas <= group["maxReplicas"]
        assert group["replicas"] == replicas
        command = group["template"]["spec"]["containers"][0]["command"]
        offers = {"CPU": number(command, "--num-cpus="), "GPU": number(command, "--num-gpus="),
                  name: 1.0}  # fmt: skip
        for pool in wanted:
            assert pool.resources == {key: amount for key, amount in offers.items() if amount}
        assert group["rayStartParams"]["num-cpus"] == f"{offers['CPU']:g}"
        assert f'--resources={{"{name}": 1}}' in command
        assert group["template"]["metadata"]["labels"]["pdserve/pool"] == name


def number(command, flag):
    return next((float(w.removeprefix(flag)) for w in command if w.startswith(flag)), 0.0)


def test_certificates_come_from_secrets_at_the_paths_that_the_yaml_names(overlay):
    """For every container that reads the configuration, and for the drain of a pod that goes."""
    objects = render(overlay)
    config = parse_config(deployment_yaml(objects))
    assert (config.tls is not None) == (config.router.tls is not None) == (overlay == "gpu-tls")
    if config.tls is None or config.router.tls is None:
        return
    inside = {"PDSERVE_TLS_CA_FILE": config.tls.ca_file,
              "PDSERVE_TLS_CERT_FILE": config.tls.cert_file,
              "PDSERVE_TLS_KEY_FILE": config.tls.key_file}  # fmt: skip
    edge = {config.router.tls.cert_file, config.router.tls.key_file}
    for pod, template in pod_templates(objects):
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            found = set()
            for mount in container["volumeMounts"]:
                secret = volumes[mount["name"]].get("secret")
                if secret is not None:
                    assert mount["readOnly"] and secret["defaultMode"] == 0o440
                    keys = ("ca.crt", "tls.crt", "tls.key")  # as cert-manager names them
                    found |= {f"{mount['mountPath']}/{key}" for key in keys}
            assert set(inside.values()) <= found, container["name"]
            assert (edge <= found) == (pod == "pdserve-router")
            if "preStop" in container.get("lifecycle", {}) and pod != "pdserve-router":
                own = {v["name"]: v.get("value") for v in container["env"]}
                assert inside.items() <= own.items()


def test_what_the_head_knows_outlives_its_pod_and_nodes_wait_for_the_next_one(overlay):
    """V59: with a head that had forgotten them, the nodes of all workers would end."""
    (cluster,) = of_kind(render(overlay), "RayCluster")
    assert cluster["spec"]["gcsFaultToleranceOptions"]["backend"] == "rocksdb"
    for name, container in containers(render(overlay)):
        if name.endswith("/ray-worker"):
            own = {v["name"]: v.get("value") for v in container["env"]}
            assert int(own["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 3600, name


def test_secrets_are_named_and_never_written(overlay):
    assert not of_kind(render(overlay), "Secret")
    for name, container in containers(render(overlay)):
        for variable in container.get("env", []):
            if "TOKEN" in variable["name"]:
                assert "value" not in variable, name
                assert variable["valueFrom"]["secretKeyRef"]["name"] == "pdserve"


def test_mounts_have_volumes_and_writable_ones_are_not_the_image(overlay):
    for name, template in pod_templates(render(overlay)):
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
            assert {m["name"] for m in mounts.values()} <= volumes.keys()
            assert {"/tmp", "/var/lib/pdserve"} <= mounts.keys()
            if name != "pdserve-router":
                shm = volumes[mounts["/dev/shm"]["name"]]
                assert shm["emptyDir"]["medium"] == "Memory"
