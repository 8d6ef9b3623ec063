"""The Kubernetes manifests match their schemas and the service's settings."""

import socket
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from tests.overrides import set_environment

from foreshock.server.settings import Settings, UnusableSettingsError, settings_of
from foreshock.server.testing import LiveService

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CUSTOM_KINDS = {"ServiceMonitor"}  # defined by the Prometheus Operator, not in Kubernetes' schema


def documents(*names: str) -> list[dict[str, Any]]:
    return [document for name in names for document in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())]


def document(kind: str, *names: str, name: str | None = None) -> dict[str, Any]:
    [found] = [d for d in documents(*names) if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    return found


ALL_FILES = ("common", "secrets.example", "postgresql", "sqlite")
STORES = ("postgresql", "sqlite")


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_manifests_match_the_strict_kubernetes_schema(version: str) -> None:
    checked = [d for d in documents(*ALL_FILES) if d["kind"] not in CUSTOM_KINDS]
    assert len(checked) >= 10
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.promise("S8")
@pytest.mark.parametrize("store", STORES)
def test_network_policy_allows_only_named_namespaces_and_the_service_port(store: str) -> None:
    policy, pod = document("NetworkPolicy", "common")["spec"], document("Deployment", store)["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    [rule] = policy["ingress"]
    [container] = pod["spec"]["containers"]
    assert [port["port"] for port in rule["ports"]] == [port["name"] for port in container["ports"]]
    for peer in rule["from"]:
        [match] = peer["namespaceSelector"]["matchExpressions"]
        assert (match["key"], match["operator"]) == ("kubernetes.io/metadata.name", "In")
        assert match["values"]


@pytest.mark.parametrize("store", STORES)
def test_references_between_manifests_resolve(store: str) -> None:
    deployment, service = document("Deployment", store), document("Service", "common")
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    for selector in (service["spec"]["selector"], deployment["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    monitor = document("ServiceMonitor", "common")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [port] = service["spec"]["ports"]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] in {p["name"] for p in container["ports"]}
    [target] = [rule["replacement"] for rule in endpoint["relabelings"] if rule.get("targetLabel") == "__address__"]
    assert target == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
    [dropped] = [rule["regex"] for rule in endpoint["relabelings"] if rule.get("action") == "labeldrop"]
    assert {"pod", "container"} <= set(dropped.split("|")), (
        "the pods must be one target, so that each run is scraped once"
    )
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["key"] in document("Secret", "secrets.example", name=credentials["name"])["stringData"]
    assert container["envFrom"][0]["configMapRef"]["name"] == document("ConfigMap", "common")["metadata"]["name"]
    mounts, volumes = container["volumeMounts"], pod["spec"]["volumes"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in volumes}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
    assert claims == [d["metadata"]["name"] for d in documents(store) if d["kind"] == "PersistentVolumeClaim"]
    assert {d["metadata"].get("namespace", "foreshock") for d in documents(*ALL_FILES)} == {"foreshock"}


def test_disruption_budget_allows_draining_and_sqlite_has_one_replica() -> None:
    replicated, single = document("Deployment", "postgresql")["spec"], document("Deployment", "sqlite")["spec"]
    assert replicated["replicas"] > document("PodDisruptionBudget", "postgresql")["spec"]["minAvailable"]
    assert (single["replicas"], single["strategy"]["type"]) == (1, "Recreate")


@pytest.mark.parametrize("store", STORES)
def test_pod_meets_the_restricted_pod_security_standard(store: str) -> None:
    pod = document("Deployment", store)["spec"]["template"]["spec"]
    [container] = pod["containers"]
    security = container["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    user = f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert user in (ROOT / "Dockerfile").read_text()


def environment(folder: Path) -> dict[str, str]:
    """The variables of the pod, its secrets in `folder`."""
    data: dict[str, str] = document("ConfigMap", "common")["data"]
    for key, value in document("Secret", "secrets.example", name="foreshock")["stringData"].items():
        (folder / key).write_text(value)
    return {name: value.replace("/run/secrets/foreshock", str(folder)) for name, value in data.items()}


def test_service_accepts_the_settings_and_secrets_of_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment(tmp_path))
    settings = settings_of()
    assert settings.database_url.startswith("postgresql://")
    assert all(set(token.sha256) in ({"0"}, {"1"}) for token in settings.tokens), (
        "the example must not contain a real secret"
    )
    assert {token.name: token.scopes for token in settings.tokens} == {"prometheus": ("read",), "team-a": ("ingest",)}
    assert settings.public_url == f"https://{document('Ingress', 'common')['spec']['rules'][0]['host']}"
    container = document("Deployment", "sqlite")["spec"]["template"]["spec"]["containers"][0]
    assert [port["containerPort"] for port in container["ports"]] == [settings.port]


@pytest.mark.parametrize("store", STORES)
def test_service_links_are_disabled_because_foreshock_port_would_conflict(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert document("Deployment", store)["spec"]["template"]["spec"]["enableServiceLinks"] is False
    port = document("Service", "common")["spec"]["ports"][0]["port"]
    set_environment(monkeypatch, {**environment(tmp_path), "FORESHOCK_PORT": f"tcp://10.0.0.7:{port}"})
    with pytest.raises(UnusableSettingsError):
        settings_of()


def test_ingress_allows_the_largest_body_of_the_service() -> None:
    text = document("Ingress", "common")["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert text.endswith("m")
    assert int(text[:-1]) * 2**20 >= Settings().max_body_bytes


def test_probes_succeed_without_a_token_by_pod_address(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    variables |= {"FORESHOCK_DATABASE_URL_FILE": "", "FORESHOCK_DATABASE_URL": f"sqlite:///{tmp_path}/x.db"}
    variables = {name: value for name, value in variables.items() if value} | {"FORESHOCK_PORT": "0"}
    [container], [other] = (document("Deployment", store)["spec"]["template"]["spec"]["containers"] for store in STORES)
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert [container[probe] for probe in probes] == [other[probe] for probe in probes]
    with LiveService(tmp_path, variables) as service:
        host = f"{socket.gethostbyname('localhost')}:{service.url.rpartition(':')[2]}"
        with httpx.Client(base_url=f"http://{host}", headers={"host": "10.1.2.3:8765"}, trust_env=False) as client:
            for probe in probes:
                answer = client.get(container[probe]["httpGet"]["path"], timeout=30)
                assert answer.status_code == 200, (probe, answer.text)
            endpoint = document("ServiceMonitor", "common")["spec"]["endpoints"][0]
            assert client.get(endpoint["path"]).status_code == 401


def test_kustomize_config_map_contains_every_board_with_the_sidecar_label() -> None:
    folder = ROOT / "src/foreshock/dashboards"
    [generator] = yaml.safe_load((folder / "kustomization.yaml").read_text())["configMapGenerator"]
    boards = {f"generated/boards/{path.name}" for path in (folder / "generated/boards").iterdir()}
    assert set(generator["files"]) == boards
    assert generator["options"]["labels"] == {"grafana_dashboard": "1"}
    assert sum((folder / name).stat().st_size for name in boards) < 2**20, "the size limit of a ConfigMap"
