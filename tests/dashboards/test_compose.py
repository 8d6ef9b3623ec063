"""docker-compose.yml is safe as shipped (promise S8), and refers only to existing files and secrets."""

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.running import absent
from tests.overrides import set_environment

from foreshock.server.settings import Settings

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = COMPOSE["services"]

every_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())

# The first versions without the vulnerabilities that were known when these images were chosen.
SAFE_FROM = {
    "prom/prometheus": (3, 11, 3),  # CVE-2026-42154, CVE-2026-40179
    "prom/alertmanager": (0, 31, 1),
    "grafana/grafana": (13, 2, 0),  # CVE-2026-17183
    "postgres": (18, 4),  # CVE-2026-6473 and ten more
    "victoriametrics/victoria-metrics": (1, 136, 1),
}


def secrets_folder(path: Path, *options: str) -> Path:
    """A folder of secrets created by the script."""
    subprocess.run([REPOSITORY / "scripts/compose-secrets", *options, path], check=True, capture_output=True)
    return path


RECEIVERS = {
    "slack": "slack_url",
    "pagerduty": "pagerduty_key",
    "webhook": "people_webhook_url",
    "email": "email_password",
    "dead-mans-switch": "dead_mans_switch_url",
}
"""The name of the secret that the script creates for each receiver."""


@pytest.mark.promise("S8")
@every_service
def test_container_has_minimal_privileges_and_a_pinned_safe_image(
    service: dict[str, Any],
) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "network_mode", "ipc", "userns_mode"} & set(service)
    assert "docker.sock" not in str(service)
    assert service["healthcheck"]["test"][0] == "CMD"
    assert re.fullmatch(r"[1-9]\d*[mg]", service["mem_limit"]), "memory must be limited"
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), "ports must be published on loopback only"
    if "build" not in service:
        image, _, tag = service["image"].partition(":")
        version = tuple(int(part) for part in tag.removeprefix("v").split("."))
        assert len(version) >= len(SAFE_FROM[image]), "the full version must be pinned"
        assert version >= SAFE_FROM[image]


@pytest.mark.promise("S8")
def test_secrets_are_files_from_a_required_folder() -> None:
    for name, secret in COMPOSE["secrets"].items():
        assert secret["file"] == f"${{FORESHOCK_SECRETS:?run scripts/compose-secrets first}}/{name}"
    for service in SERVICES.values():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|SECRET", variable):
                assert variable.endswith("_FILE"), variable
                assert value.removeprefix("/run/secrets/") in service["secrets"]
    assert not re.search(r"(?i)(password|secret|token)\S*: +[^/$\[\s{]\S*$", TEXT), "a literal secret"


@pytest.mark.promise("S8")
def test_database_is_internal_and_admin_features_are_disabled() -> None:
    assert "ports" not in SERVICES["postgres"]
    assert SERVICES["postgres"]["networks"] == ["back"]
    assert COMPOSE["networks"]["back"] == {"internal": True}
    for flag in ("enable-admin-api", "enable-lifecycle", "enable-remote-write-receiver", "enable-otlp-receiver"):
        assert flag not in TEXT
    environment = SERVICES["grafana"]["environment"]
    for off in (
        "USERS_ALLOW_SIGN_UP",
        "AUTH_ANONYMOUS_ENABLED",
        "SNAPSHOTS_ENABLED",
        "SNAPSHOTS_EXTERNAL_ENABLED",
        "PUBLIC_DASHBOARDS_ENABLED",
        "ANALYTICS_REPORTING_ENABLED",
        "ANALYTICS_CHECK_FOR_UPDATES",
    ):
        assert environment[f"GF_{off}"] == "false"
    assert environment["GF_SECURITY_DISABLE_GRAVATAR"] == "true"
    assert environment["GF_SECURITY_ADMIN_USER"] != "admin"


@pytest.mark.promise("A27")
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_health_check_bypasses_the_proxy_that_docker_sets(status: int, healthy: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        [_, _, option, program] = SERVICES["foreshock"]["healthcheck"]["test"]
        check = program.replace("8765", str(server.server_port))
        environment = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
        finished = subprocess.run([sys.executable, option, check], env=environment, capture_output=True, text=True)
    assert (finished.returncode == 0, finished.stderr) == (healthy, "")


def mounts(services: dict[str, Any]) -> list[tuple[str, str]]:
    """(source, target) of every volume."""
    volumes = [volume for service in services.values() for volume in service.get("volumes", [])]
    parts = [re.match(r"((?:\$\{[^}]*\}|[^:])+):([^:]+)", volume) for volume in volumes]
    return [(part[1], part[2]) for part in parts if part]


def test_mounts_exist_at_the_expected_paths_and_secrets_match_their_use() -> None:
    for source, _ in mounts(SERVICES):
        if source.startswith("./"):
            assert (REPOSITORY / source).exists(), source
        elif not source.startswith(("/dev/null", "${FORESHOCK_SECRETS")):
            assert source in COMPOSE["volumes"]
    targets = [target for _, target in mounts(SERVICES)]
    provisioning = REPOSITORY / "src/foreshock/dashboards/provisioning"
    assert yaml.safe_load((provisioning / "prometheus.yml").read_text())["rule_files"][0] in targets
    assert "/etc/alertmanager/alertmanager.yml" in targets
    [provider] = yaml.safe_load((provisioning / "grafana/dashboards/boards.yml").read_text())["providers"]
    assert provider["options"]["path"] in targets
    for service, files in {
        "prometheus": ["prometheus.yml", "prometheus-victoriametrics.yml"],
        "alertmanager": ["alertmanager.yml", "receivers/*.yml"],
    }.items():
        text = "".join(path.read_text() for file in files for path in provisioning.glob(file))
        assert set(re.findall(r"/run/secrets/(\w+)", text)) == set(SERVICES[service]["secrets"])


def test_script_creates_the_required_secrets_once(tmp_path: Path) -> None:
    folder, script = tmp_path / "secrets", REPOSITORY / "scripts/compose-secrets"
    output = subprocess.run([script, folder], capture_output=True, text=True, check=True).stdout
    assert "NOBODY IS WOKEN" in output
    assert "no --dead-mans-switch was given" in output
    created = {file.name for file in folder.iterdir()}
    assert created == {*COMPOSE["secrets"], "alertmanager.yml", "compose.env", ".gitignore"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / ".gitignore").read_text() == "*\n"
    values = [(folder / name).read_text() for name in COMPOSE["secrets"] if name not in RECEIVERS.values()]
    assert len(set(values)) == len(values)
    assert all(len(value) >= 24 for value in values)
    again = subprocess.run([script, folder], capture_output=True, text=True)
    assert (again.returncode, "exists" in again.stderr) == (1, True)
    assert (folder / "foreshock_token").read_text() in values, "existing secrets must not be replaced"


@pytest.mark.parametrize("options", [[], ["--postgres"]], ids=["sqlite", "postgres"])
def test_service_accepts_the_created_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    folder = secrets_folder(tmp_path / "secrets", *options)
    shipped = SERVICES["foreshock"]["environment"]
    set_environment(monkeypatch, {name: value.replace("/run/secrets", str(folder)) for name, value in shipped.items()})
    settings = Settings()
    assert settings.migrate is True
    assert settings.database_url.startswith("postgresql://" if options else "sqlite:////data/")
    scopes = {token.name: token.scopes for token in settings.tokens}
    assert scopes == {"prometheus": ("read",), "alertmanager": ("act",)}
    if options:
        assert (folder / "postgres_password").read_text() in settings.database_url


SECRETS = {
    "slack": "https://hooks.slack.com/services/T1/B2/x&y|z",
    "pagerduty": "0123456789abcdef",
    "webhook": "https://pager.example/hook?key=1",
    "email": "smtp://ops@example.org:pa:ss@wd&x@smtp.example.org:587?from=foreshock@example.org&to=on-call@example.org",
    "dead-mans-switch": "https://hc-ping.com/5ec1",
}


@pytest.mark.servers
@pytest.mark.parametrize("kinds", [["slack"], ["dead-mans-switch"], list(SECRETS)], ids="+".join)
def test_each_receiver_secret_adds_a_receiver(tmp_path: Path, kinds: list[str]) -> None:
    options: list[str] = []
    for kind in kinds:
        (tmp_path / kind).write_bytes(f"{SECRETS[kind]}\r\n".encode())  # as a Windows editor saves it
        options += [f"--{kind}", str(tmp_path / kind)]
    folder = secrets_folder(tmp_path / "secrets", *options)
    text = (folder / "alertmanager.yml").read_text()
    receivers = {receiver.pop("name"): receiver for receiver in yaml.safe_load(text)["receivers"]}
    assert set(receivers["people"]) == {f"{kind}_configs" for kind in kinds if kind != "dead-mans-switch"}
    assert bool(receivers["dead-mans-switch"]) == ("dead-mans-switch" in kinds)
    for kind in kinds:
        value = (folder / RECEIVERS[kind]).read_text()
        assert value == ("pa:ss@wd&x" if kind == "email" else SECRETS[kind])
        assert value not in text, "the secret must only be in its file"
        assert f"/run/secrets/{RECEIVERS[kind]}" in text
    if "email" in kinds:
        [mail] = receivers["people"]["email_configs"]
        assert (mail["to"], mail["from"]) == ("on-call@example.org", "foreshock@example.org")
        assert (mail["smarthost"], mail["auth_username"]) == ("smtp.example.org:587", "ops@example.org")
    # Debian's Alertmanager is older than the image and cannot read a webhook's address from a file.
    older = tmp_path / "older.yml"
    older.write_text(text.replace("url_file: /run", "url: https://x/run").replace("api_url: https:/", "api_url_file: "))
    checked = subprocess.run(["amtool", "check-config", older], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "takes a file that holds its secret"),
        ("\nsmtp://on-the-second-line", "takes a file that holds its secret in the first line"),
        ("\r\n", "takes a file that holds its secret in the first line"),
        ("ops@example.org", "smtp://USER"),
    ],
)
def test_invalid_receiver_secret_is_rejected_before_any_file_is_created(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content:
        (tmp_path / "mail").write_text(content)
    options: list[str | Path] = ["--email", tmp_path / "mail", tmp_path / "secrets"]
    result = subprocess.run([REPOSITORY / "scripts/compose-secrets", *options], capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "secrets").exists()


def test_image_contains_only_the_service_and_runs_as_an_unprivileged_user() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--)(.*)$", dockerfile, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    assert all((REPOSITORY / name).exists() for name in copied)
    removed = re.search(r"^RUN rm -r (.*?) \\$", dockerfile, re.MULTILINE)
    assert removed
    packages = {path.parent.name for path in (REPOSITORY / "src/foreshock").glob("*/__init__.py")}
    removed_packages = {name.removeprefix("src/foreshock/") for name in removed[1].split()}
    assert packages - removed_packages == {"cli", "contract", "dashboards", "server"}
    assert '".[server]"' in dockerfile
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [requirement for requirement in extras["server"] if re.match(r"torch|triton|foreshock\[", requirement)]
    assert re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE) == [("10001", "10001")]


def compose_tool() -> list[str]:
    """`docker compose` or `docker-compose`; skips the test if neither is installed."""
    for tool in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(tool[0]) and subprocess.run([*tool, "version"], capture_output=True).returncode == 0:
            return tool
    absent("docker compose")


def supported_by(tool: list[str], file: Path, folder: Path) -> Path:
    """The file, without the two keys that docker-compose 1 (Debian 12 has 1.29) does not support."""
    version = subprocess.run([*tool, "version", "--short"], capture_output=True, text=True, check=True).stdout.strip()
    if not version.startswith("1."):
        return file
    data = yaml.safe_load(file.read_text())
    data.pop("name", None)
    for service in data["services"].values():
        for condition in service.get("depends_on", {}).values():
            condition.pop("required", None)
    older = folder / file.name
    older.write_text(yaml.safe_dump(data))
    return older


@pytest.mark.servers
@pytest.mark.promise("S8")
def test_docker_compose_accepts_the_file_and_requires_the_secrets_folder(tmp_path: Path) -> None:
    tool = compose_tool()
    folder = secrets_folder(tmp_path / "secrets", "--postgres", "--victoriametrics")
    main = supported_by(tool, REPOSITORY / "docker-compose.yml", tmp_path)
    base = [*tool, "--project-directory", str(REPOSITORY), "--file", str(main)]
    command = [*base, "--env-file", str(folder / "compose.env"), "config"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = dict(line.split("=", 1) for line in (folder / "compose.env").read_text().splitlines())
    assert lines["COMPOSE_PROFILES"].split(",") == ["postgres", "victoriametrics"]
    assert f"/etc/prometheus/{lines['FORESHOCK_PROMETHEUS_CONFIG']}" in [target for _, target in mounts(SERVICES)]
    parsed = yaml.safe_load(result.stdout)
    assert set(SERVICES) - set(parsed["services"]) <= {"postgres", "victoriametrics"}
    assert all(str(folder) in secret["file"] for secret in parsed["secrets"].values())
    without = {name: value for name, value in os.environ.items() if name != "FORESHOCK_SECRETS"}
    result = subprocess.run([*base, "config"], capture_output=True, text=True, env=without)
    assert result.returncode != 0
    assert "run scripts/compose-secrets first" in result.stderr


@pytest.mark.promise("S8")
def test_containers_limit_memory_and_the_service_has_one_limit_everywhere() -> None:
    limits = {name: service["mem_limit"] for name, service in SERVICES.items()}
    assert all(re.fullmatch(r"[1-9]\d*[mg]", limit) for limit in limits.values())
    unit = (REPOSITORY / "deploy/systemd/foreshock.service").read_text()
    [unit_gigabytes] = re.findall(r"^MemoryMax=(\d+)G$", unit, re.MULTILINE)
    for store in ("sqlite", "postgresql"):
        manifests = yaml.safe_load_all((REPOSITORY / f"deploy/kubernetes/{store}.yaml").read_text())
        [deployment] = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["memory"] == f"{unit_gigabytes}Gi"
    assert limits["foreshock"] == f"{unit_gigabytes}g"
