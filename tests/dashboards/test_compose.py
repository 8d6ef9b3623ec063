"""docker-compose.yml is safe as shipped (promise S8), and names only what exists."""

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
from tests.constants import set_alone
from tests.e2e.running import absent

from foreshock.server.settings import Settings

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = COMPOSE["services"]

every_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())

# The first versions without the holes that were known when these images were chosen.
SAFE_FROM = {
    "prom/prometheus": (3, 11, 3),  # CVE-2026-42154, CVE-2026-40179
    "prom/alertmanager": (0, 31, 1),
    "grafana/grafana": (13, 2, 0),  # CVE-2026-17183
    "postgres": (18, 4),  # CVE-2026-6473 and ten more
    "victoriametrics/victoria-metrics": (1, 136, 1),
}


def secrets_folder(path: Path, *options: str) -> Path:
    """A folder of secrets as the script makes it."""
    subprocess.run([REPOSITORY / "scripts/compose-secrets", *options, path], check=True, capture_output=True)
    return path


RECEIVERS = {
    "slack": "slack_url",
    "pagerduty": "pagerduty_key",
    "webhook": "people_webhook_url",
    "email": "email_password",
    "dead-mans-switch": "dead_mans_switch_url",
}
"""What the script takes for each receiver becomes this secret."""


@pytest.mark.promise("S8")
@every_service
def test_a_container_has_no_more_rights_than_it_needs_and_a_pinned_image_without_known_holes(
    service: dict[str, Any],
) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "network_mode", "ipc", "userns_mode"} & set(service)
    assert "docker.sock" not in str(service)
    assert service["healthcheck"]["test"][0] == "CMD"
    assert re.fullmatch(r"[1-9]\d*[mg]", service["mem_limit"]), "it cannot take the machine's memory"
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), "published on loopback"
    if "build" not in service:
        image, _, tag = service["image"].partition(":")
        version = tuple(int(part) for part in tag.removeprefix("v").split("."))
        assert len(version) >= len(SAFE_FROM[image]), "the whole version is named"
        assert version >= SAFE_FROM[image]


@pytest.mark.promise("S8")
def test_a_secret_is_a_file_from_a_folder_that_must_be_named() -> None:
    for name, secret in COMPOSE["secrets"].items():
        assert secret["file"] == f"${{FORESHOCK_SECRETS:?run scripts/compose-secrets first}}/{name}"
    for service in SERVICES.values():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|TOKEN|SECRET", variable):
                assert variable.endswith("_FILE"), variable
                assert value.removeprefix("/run/secrets/") in service["secrets"]
    assert not re.search(r"(?i)(password|secret|token)\S*: +[^/$\[\s{]\S*$", TEXT), "a literal secret"


@pytest.mark.promise("S8")
def test_database_prometheus_and_grafana_offer_no_way_in() -> None:
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
def test_the_services_own_check_asks_it_directly_whatever_proxy_docker_sets(status: int, healthy: bool) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        [_, _, option, program] = SERVICES["foreshock"]["healthcheck"]["test"]
        own = program.replace("8765", str(server.server_port))
        environment = {**os.environ, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
        ended = subprocess.run([sys.executable, option, own], env=environment, capture_output=True, text=True)
    assert (ended.returncode == 0, ended.stderr) == (healthy, "")


def mounts(services: dict[str, Any]) -> list[tuple[str, str]]:
    """(source, target) of every volume."""
    volumes = [volume for service in services.values() for volume in service.get("volumes", [])]
    parts = [re.match(r"((?:\$\{[^}]*\}|[^:])+):([^:]+)", volume) for volume in volumes]
    return [(part[1], part[2]) for part in parts if part]


def test_what_is_mounted_exists_where_each_program_looks_for_it_and_its_secrets_belong_to_it() -> None:
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


def test_the_secrets_that_the_script_makes_are_those_that_are_asked_for(tmp_path: Path) -> None:
    folder, script = tmp_path / "secrets", REPOSITORY / "scripts/compose-secrets"
    said = subprocess.run([script, folder], capture_output=True, text=True, check=True).stdout
    assert "NOBODY IS WOKEN" in said
    assert "no --dead-mans-switch was given" in said
    made = {file.name for file in folder.iterdir()}
    assert made == {*COMPOSE["secrets"], "alertmanager.yml", "compose.env", ".gitignore"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / ".gitignore").read_text() == "*\n"
    values = [(folder / name).read_text() for name in COMPOSE["secrets"] if name not in RECEIVERS.values()]
    assert len(set(values)) == len(values)
    assert all(len(value) >= 24 for value in values)
    again = subprocess.run([script, folder], capture_output=True, text=True)
    assert (again.returncode, "exists" in again.stderr) == (1, True)
    assert (folder / "foreshock_token").read_text() in values, "no secret is made twice"


@pytest.mark.parametrize("options", [[], ["--postgres"]], ids=["sqlite", "postgres"])
def test_the_service_accepts_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    folder = secrets_folder(tmp_path / "secrets", *options)
    given = SERVICES["foreshock"]["environment"]
    set_alone(monkeypatch, {name: value.replace("/run/secrets", str(folder)) for name, value in given.items()})
    settings = Settings()
    assert settings.migrate is True
    assert settings.database_url.startswith("postgresql://" if options else "sqlite:////data/")
    scopes = {token.name: token.scopes for token in settings.tokens}
    assert scopes == {"prometheus": ("read",), "alertmanager": ("act",)}
    if options:
        assert (folder / "postgres_password").read_text() in settings.database_url


SAID = {
    "slack": "https://hooks.slack.com/services/T1/B2/x&y|z",
    "pagerduty": "0123456789abcdef",
    "webhook": "https://pager.example/hook?key=1",
    "email": "smtp://ops@example.org:pa:ss@wd&x@smtp.example.org:587?from=foreshock@example.org&to=on-call@example.org",
    "dead-mans-switch": "https://hc-ping.com/5ec1",
}


@pytest.mark.servers
@pytest.mark.parametrize("kinds", [["slack"], ["dead-mans-switch"], list(SAID)], ids="+".join)
def test_one_secret_each_makes_a_receiver_of_its_kind(tmp_path: Path, kinds: list[str]) -> None:
    options: list[str] = []
    for kind in kinds:
        (tmp_path / kind).write_bytes(f"{SAID[kind]}\r\n".encode())  # as an editor of Windows leaves it
        options += [f"--{kind}", str(tmp_path / kind)]
    folder = secrets_folder(tmp_path / "secrets", *options)
    text = (folder / "alertmanager.yml").read_text()
    receivers = {receiver.pop("name"): receiver for receiver in yaml.safe_load(text)["receivers"]}
    assert set(receivers["people"]) == {f"{kind}_configs" for kind in kinds if kind != "dead-mans-switch"}
    assert bool(receivers["dead-mans-switch"]) == ("dead-mans-switch" in kinds)
    for kind in kinds:
        value = (folder / RECEIVERS[kind]).read_text()
        assert value == ("pa:ss@wd&x" if kind == "email" else SAID[kind])
        assert value not in text, "a secret stays in its file"
        assert f"/run/secrets/{RECEIVERS[kind]}" in text
    if "email" in kinds:
        [mail] = receivers["people"]["email_configs"]
        assert (mail["to"], mail["from"]) == ("on-call@example.org", "foreshock@example.org")
        assert (mail["smarthost"], mail["auth_username"]) == ("smtp.example.org:587", "ops@example.org")
    # Debian's Alertmanager is older than the image, and reads the address of a webhook from no file yet.
    older = tmp_path / "older.yml"
    older.write_text(text.replace("url_file: /run", "url: https://x/run").replace("api_url: https:/", "api_url_file: "))
    checked = subprocess.run(["amtool", "check-config", older], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (None, "takes a file that holds its secret"),
        ("\nsmtp://on-the-second-line", "takes a file that holds its secret in the first line"),
        ("\r\n", "takes a file that holds its secret in the first line"),
        ("ops@example.org", "smtp://USER"),
    ],
)
def test_a_receiver_without_its_secret_is_refused_before_anything_is_made(
    tmp_path: Path, written: str | None, words: str
) -> None:
    if written:
        (tmp_path / "mail").write_text(written)
    options: list[str | Path] = ["--email", tmp_path / "mail", tmp_path / "secrets"]
    said = subprocess.run([REPOSITORY / "scripts/compose-secrets", *options], capture_output=True, text=True)
    assert said.returncode == 2
    assert words in said.stderr
    assert not (tmp_path / "secrets").exists()


def test_the_image_holds_the_service_and_nothing_of_training_and_runs_as_nobody_special() -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--)(.*)$", dockerfile, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    assert all((REPOSITORY / name).exists() for name in copied)
    removed = re.search(r"^RUN rm -r (.*?) \\$", dockerfile, re.MULTILINE)
    assert removed
    rooms = {path.parent.name for path in (REPOSITORY / "src/foreshock").glob("*/__init__.py")}
    gone = {name.removeprefix("src/foreshock/") for name in removed[1].split()}
    assert rooms - gone == {"cli", "contract", "dashboards", "server"}
    assert '".[server]"' in dockerfile
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [needed for needed in extras["server"] if re.match(r"torch|triton|foreshock\[", needed)]
    assert re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE) == [("10001", "10001")]


def compose_tool() -> list[str]:
    """`docker compose`, or a `docker-compose` of its own. Skips where there is neither."""
    for tool in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(tool[0]) and subprocess.run([*tool, "version"], capture_output=True).returncode == 0:
            return tool
    absent("docker compose")


def known_to(tool: list[str], file: Path, folder: Path) -> Path:
    """The file, without the two keys that docker-compose 1 (Debian 12 has 1.29) does not know yet."""
    said = subprocess.run([*tool, "version", "--short"], capture_output=True, text=True, check=True).stdout.strip()
    if not said.startswith("1."):
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
def test_docker_compose_reads_it(tmp_path: Path) -> None:
    tool = compose_tool()
    folder = secrets_folder(tmp_path / "secrets", "--postgres", "--victoriametrics")
    main = known_to(tool, REPOSITORY / "docker-compose.yml", tmp_path)
    base = [*tool, "--project-directory", str(REPOSITORY), "--file", str(main)]
    command = [*base, "--env-file", str(folder / "compose.env"), "config"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = dict(line.split("=", 1) for line in (folder / "compose.env").read_text().splitlines())
    assert lines["COMPOSE_PROFILES"].split(",") == ["postgres", "victoriametrics"]
    assert f"/etc/prometheus/{lines['FORESHOCK_PROMETHEUS_CONFIG']}" in [target for _, target in mounts(SERVICES)]
    read = yaml.safe_load(result.stdout)
    assert set(SERVICES) - set(read["services"]) <= {"postgres", "victoriametrics"}
    assert all(str(folder) in secret["file"] for secret in read["secrets"].values())
    without = {name: value for name, value in os.environ.items() if name != "FORESHOCK_SECRETS"}
    result = subprocess.run([*base, "config"], capture_output=True, text=True, env=without)
    assert result.returncode != 0
    assert "run scripts/compose-secrets first" in result.stderr


@pytest.mark.promise("S8")
def test_no_container_takes_the_memory_of_the_machine_and_the_service_has_the_same_everywhere() -> None:
    limits = {name: service["mem_limit"] for name, service in SERVICES.items()}
    assert all(re.fullmatch(r"[1-9]\d*[mg]", limit) for limit in limits.values())
    unit = (REPOSITORY / "deploy/systemd/foreshock.service").read_text()
    [of_unit] = re.findall(r"^MemoryMax=(\d+)G$", unit, re.MULTILINE)
    for store in ("sqlite", "postgresql"):
        manifests = yaml.safe_load_all((REPOSITORY / f"deploy/kubernetes/{store}.yaml").read_text())
        [deployment] = [one for one in manifests if one["kind"] == "Deployment"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["memory"] == f"{of_unit}Gi"
    assert limits["foreshock"] == f"{of_unit}g"
