"""Settings of the service: required tokens, validation at startup, and secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.overrides import set_environment

from foreshock.server.settings import Settings, Token, UnusableSettingsError, settings_of

ROOT = Path(__file__).parents[2]
SECRET = "a-secret-of-sixteen-or-more"


@pytest.mark.promise("S7")
@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "training.example"])
def test_host_reachable_by_others_requires_token(host: str) -> None:
    with pytest.raises(ValidationError, match="no token is set"):
        Settings(host=host)
    assert all(Settings(host=own).all_tokens == () for own in ("127.0.0.1", "localhost", "::1", "127.9.9.9"))
    assert Settings(host=host, token=SECRET).all_tokens[0].scopes == ("ingest", "read", "act", "delete", "admin")  # type: ignore[arg-type]


BEHIND_A_PROXY = {
    "FORESHOCK_ALLOWED_HOSTS": '["foreshock.example.org"]',
    "FORESHOCK_TRUSTED_PROXIES": '["127.0.0.1"]',
    "FORESHOCK_PUBLIC_URL": "https://foreshock.example.org",
}


@pytest.mark.promise("S18")
@pytest.mark.parametrize("name", BEHIND_A_PROXY)
def test_proxy_settings_require_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, BEHIND_A_PROXY[name])
    with pytest.raises(ValidationError, match=f"{name} is set, .* no token is set.*FORESHOCK_TOKENS_FILE"):
        Settings()
    assert Settings(token=SECRET).all_tokens  # type: ignore[arg-type]


@pytest.mark.promise("S18")
def test_shipped_settings_without_tokens_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = (ROOT / "deploy" / "systemd" / "foreshock.env").read_text().splitlines()
    lines = dict(line.split("=", 1) for line in shipped if not line.startswith("#"))
    del lines["FORESHOCK_TOKENS_FILE"]
    set_environment(monkeypatch, lines)
    with pytest.raises(UnusableSettingsError, match=r"FORESHOCK_ALLOWED_HOSTS is set, .* no token is set"):
        settings_of()
    monkeypatch.setenv("FORESHOK_TOKENS_FILE", "/etc/foreshock/tokens.json")
    with pytest.raises(UnusableSettingsError, match=r"did you mean FORESHOCK_TOKENS_FILE\?"):
        settings_of()


A_TOKEN = '{"name": "a", "sha256": "%s", "scopes": ["read"]}' % ("0" * 64)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("FORESHOCK_TRUSTED_PROXIES", '["proxy.example.org"]', "'proxy.example.org' is not an address or network"),
        ("FORESHOCK_TRUSTED_PROXIES", '["10.0.0.0/33"]', "'10.0.0.0/33' is not an address or network"),
        ("FORESHOCK_TRUSTED_PROXIES", '["10.0.0.5/8"]', "'10.0.0.5/8' is not an address or network"),
        ("FORESHOCK_TRUSTED_PROXIES", '["*"]', "'*' is not an address or network"),
        ("FORESHOCK_ALLOWED_HOSTS", '["https://foreshock.example.org"]', "is not a host name"),
        ("FORESHOCK_ALLOWED_HOSTS", '["foreshock.example.org/"]', "is not a host name"),
        ("FORESHOCK_ALLOWED_HOSTS", '["*.example.org"]', "is not a host name"),
        ("FORESHOCK_ALLOWED_HOSTS", '[""]', "is not a host name"),
        ("FORESHOCK_ALLOWED_HOSTS", '["a.example.org, b.example.org"]', "is not a host name"),
        ("FORESHOCK_PUBLIC_URL", "foreshock.example.org", "http:// or https://"),
        ("FORESHOCK_PUBLIC_URL", "javascript:alert(1)", "http:// or https://"),
        ("FORESHOCK_PUBLIC_URL", "https://", "http:// or https://"),
        ("FORESHOCK_PUBLIC_URL", "https://[::1", "http:// or https://"),
        *(("FORESHOCK_TOKEN", short, "16 characters or more") for short in ("short", " " * 20, "a" * 15 + " ")),
        ("FORESHOCK_TOKENS", f"[{A_TOKEN}, {A_TOKEN}]", "two tokens have the same name"),
        ("FORESHOCK_TOKEN", "ein-überlanges-Geheimnis", "printable ASCII"),
        ("FORESHOCK_TOKEN", "sixteen-characters\a-and-a-bell", "printable ASCII"),
    ],
)
def test_invalid_setting_is_refused_at_startup(
    name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORESHOCK_TOKEN", SECRET)
    monkeypatch.setenv(name, value)
    with pytest.raises(UnusableSettingsError) as refused:
        settings_of()
    assert sentence in str(refused.value)
    assert "items after validation" not in str(refused.value)
    if name == "FORESHOCK_TOKEN":
        assert value not in str(refused.value)


@pytest.mark.promise("S7")
def test_two_tokens_with_the_same_secret_are_refused() -> None:
    """Otherwise a read token would have the scopes of the other token."""
    own = Token.of("everything", SECRET, ("admin",))
    with pytest.raises(ValidationError, match="tokens look and everything have the same secret"):
        Settings(tokens=(Token.of("look", SECRET, ("read",)), own))
    with pytest.raises(ValidationError, match="have the same secret"):
        Settings(token=SECRET, tokens=(own,))  # type: ignore[arg-type]


def test_secrets_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.setenv("FORESHOCK_TOKEN_FILE", str(tmp_path / "token"))
    assert Settings().all_tokens == Settings(token=SECRET).all_tokens  # type: ignore[arg-type]
    (tmp_path / "tokens").write_text(f"[{A_TOKEN}]")
    monkeypatch.setenv("FORESHOCK_TOKENS_FILE", str(tmp_path / "tokens"))
    assert [token.name for token in Settings().all_tokens] == ["token", "a"]
    monkeypatch.setenv("FORESHOCK_TOKEN_FILE", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="cannot be read"):
        Settings()


def test_database_password_is_never_shown(tmp_path: Path) -> None:
    url = "postgresql://foreshock:a-secret-word@127.0.0.1:1/foreshock"
    settings = Settings(database_url=url)
    assert "a-secret-word" not in repr(settings) + str(settings)
    environment = {**os.environ, "FORESHOCK_DATABASE_URL": url, "FORESHOCK_PORT": "0"}
    finished = subprocess.run(
        [sys.executable, "-P", "-m", "foreshock.server"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith("the database cannot be used: ")
    assert "Traceback" not in finished.stderr
    assert "a-secret-word" not in finished.stdout + finished.stderr
