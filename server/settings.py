"""The service's settings: FORESHOCK_* variables, or FORESHOCK_*_FILE naming a file that holds the secret."""

import hashlib
import ipaddress
import os
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from foreshock.contract.environment import refuse_misspelt, sentences
from foreshock.contract.wire import MAX_BATCH_BYTES
from foreshock.server.outgoing import OutgoingError, Target

Scope = Literal["ingest", "read", "act", "delete", "admin"]
_TOKEN_CHARACTERS = 16
ALL_SCOPES: tuple[Scope, ...] = ("ingest", "read", "act", "delete", "admin")


class Quota(BaseModel):
    """What a token may take at most; what is left out is not limited."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    batches_per_second: float | None = Field(default=None, gt=0, description="of all its runs together, per replica")
    runs: int | None = Field(default=None, ge=1, description="runs in the store that it has sent batches of")
    stored_bytes: int | None = Field(
        default=None, ge=1, description="bytes of batches, as they were sent, of runs that are still in the store"
    )
    series: int | None = Field(default=None, ge=1, description="series of its runs in /metrics")


NO_QUOTA: Final = Quota()


class Token(BaseModel):
    """Who may do what. Only the hash of the secret is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(min_length=1, max_length=64, description="stands in the audit trail and the log")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hex SHA-256 of the secret")
    next_sha256: str | None = Field(
        default=None, pattern="^[0-9a-f]{64}$", description="of a second secret, taken too while the first is replaced"
    )
    scopes: tuple[Scope, ...] = Field(
        min_length=1, description="ingest, read, act (commands, webhooks, notes), delete (runs), admin (all)"
    )
    run_prefix: str = Field(default="", description="the token reaches only runs whose name begins so")
    quota: Quota = Field(default=NO_QUOTA, description="what it may take at most")

    @classmethod
    def of(cls, name: str, secret: str, scopes: tuple[Scope, ...], run_prefix: str = "", **more: Any) -> Self:
        """The entry for a secret."""
        return cls(name=name, sha256=_digest(secret), scopes=scopes, run_prefix=run_prefix, **more)

    @property
    def hashes(self) -> tuple[str, ...]:
        """Of the secrets that are taken: one, two while it is replaced."""
        return (self.sha256,) if self.next_sha256 is None else (self.sha256, self.next_sha256)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def tokens_of(token: SecretStr | None, tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """Every token, the plain one hashed: a secret, or two on lines of their own while it is replaced.

    Raises ValueError with a sentence for secrets that are too short or too many, and for names that stand twice.
    """
    secrets = [line.strip() for line in token.get_secret_value().strip().splitlines()] if token is not None else []
    if token is not None and (not secrets or min(map(len, secrets)) < _TOKEN_CHARACTERS):
        raise ValueError(f"token needs {_TOKEN_CHARACTERS} characters or more besides blanks at its ends")
    if len(secrets) > 2:
        raise ValueError(f"token has {len(secrets)} lines; it takes one secret, or two while the first is replaced")
    after = _digest(secrets[1]) if len(secrets) > 1 else None
    plain = [Token.of("token", secret, ALL_SCOPES, next_sha256=after) for secret in secrets[:1]]
    names = [one.name for one in (*plain, *tokens)]
    if len(set(names)) != len(names):
        raise ValueError("two tokens have the same name; the audit trail could not tell them apart")
    return (*plain, *tokens)


class Settings(BaseSettings):
    """Everything that can be set. A variable that is nearly a setting is refused, those of agents may be there."""

    model_config = SettingsConfigDict(env_prefix="FORESHOCK_", extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", description="address to listen on; anything but loopback needs a token")
    port: int = Field(default=8765, ge=0, le=65535, description="0 takes a free port")
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Host names to answer to; empty: loopback names without a token, any with one"
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(), description="addresses or networks whose X-Forwarded-For and X-Forwarded-Proto are believed"
    )
    database_url: str = Field(  # may hold a password: never shown
        default="sqlite:///foreshock-data/foreshock.db", repr=False, description="sqlite:/// or postgresql://"
    )
    migrate: bool | None = Field(default=None, description="bring the schema up to date at start; default: SQLite only")

    token: SecretStr | None = Field(
        default=None,
        min_length=_TOKEN_CHARACTERS,
        description="a secret that may do everything; a second line holds the next one while it is replaced",
    )
    tokens: tuple[Token, ...] = Field(default=(), description="JSON list of hashed, scoped tokens")
    grafana_hmac_secret: SecretStr | None = Field(
        default=None, min_length=16, description="signs /v1/webhooks/grafana; without it that route is closed"
    )

    max_body_bytes: int = Field(default=MAX_BATCH_BYTES + 2**20, ge=1024, description="largest request body")
    connections: int = Field(
        default=2000, ge=8, description="connections at once; beyond, the one that is idle longest is closed"
    )
    header_seconds: float = Field(default=10.0, gt=0, description="in which the headers of a request must come")
    body_seconds: float = Field(default=60.0, gt=0, description="in which the body of a request must come")
    ingest_queue_batches: int = Field(default=64, ge=1, description="batches taken and not yet committed; then 429")
    ingest_queue_bytes: int = Field(default=128 * 2**20, ge=1024, description="bytes of them; then 429")
    commit_batches: int = Field(default=128, ge=1, description="batches written by one commit at most")
    run_batches_per_second: float = Field(default=1000.0, gt=0, description="per token and run; above it 429")
    stream_clients: int = Field(
        default=1024, ge=1, description="streams at once; beyond, the oldest of whoever holds most is ended"
    )
    stream_queue_events: int = Field(default=256, ge=1, description="events waiting for a slow client; then cut off")

    metrics_seconds: float = Field(default=1.0, ge=0, description="scrapes within this time get the same snapshot")
    worst_heads: int = Field(default=16, ge=0, description="heads of each run that /metrics shows one by one")
    max_series: int = Field(default=50_000, ge=100, description="series in /metrics; the rest is dropped and counted")
    finished_run_seconds: float = Field(default=900.0, ge=0, description="a finished run leaves /metrics after this")
    silent_run_seconds: float = Field(
        default=86_400.0, ge=0, description="a run gone silent leaves /metrics after this"
    )
    retention_seconds: float | None = Field(
        default=90 * 86_400.0, gt=0, description="runs silent for longer are deleted; the audit trail stays"
    )

    command_expiry_seconds: float = Field(default=3600.0, gt=0, description="for commands that name no expiry")
    webhook_cooldown_seconds: float = Field(default=300.0, ge=0, description="between two webhook switches of a run")
    webhook_switches_per_hour: int = Field(default=12, ge=0, description="webhook switches of one run in an hour")
    verify_steps: int = Field(
        default=1000, ge=0, description="a switch is verified so many steps after it; 0 verifies none"
    )
    webhook_window_seconds: float = Field(default=300.0, gt=0, description="how old or early a signature may be")
    notify_slack_url: SecretStr | None = Field(default=None, description="an incoming webhook of Slack, or compatible")
    notify_webhook_url: SecretStr | None = Field(default=None, description="gets {message, event, incidents} as JSON")
    notify_hosts: tuple[str, ...] = Field(
        default=("hooks.slack.com",), description="hosts that the two URLs above may name; https alone, never a number"
    )
    notify_gather_seconds: float = Field(
        default=5.0, ge=0, le=600, description="news wait so long for more, and are told in one message"
    )
    public_url: str = Field(
        default="",
        max_length=512,
        description="address of the page, for links in notifications; with https:// the session cookie is Secure",
    )
    session_seconds: float = Field(default=43_200.0, gt=0, description="life of the page's session cookie")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _safe_to_bind(self) -> Self:
        if not self.all_tokens and not self.loopback:
            raise ValueError(
                f"host {self.host} can be reached from other machines, and no token is set: anyone there could switch "
                "kernels in a training run. Set FORESHOCK_TOKEN (16 characters or more) or FORESHOCK_TOKEN_FILE, or "
                "listen on 127.0.0.1"
            )
        for url in (self.notify_slack_url, self.notify_webhook_url):
            if url is not None:
                try:
                    Target.of(url.get_secret_value(), [host.lower() for host in self.notify_hosts])
                except OutgoingError as error:
                    raise ValueError(f"a notification URL cannot be used: {error}") from None
        return self

    @model_validator(mode="after")
    def _nothing_misspelt(self) -> Self:
        refuse_misspelt()
        return self

    @classmethod
    def variables(cls) -> list[str]:
        """Every variable that is read."""
        plain = [f"FORESHOCK_{name.upper()}" for name in cls.model_fields]
        return [*plain, *(f"FORESHOCK_{name.upper()}_FILE" for name in _SecretFiles.NAMES)]

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def all_tokens(self) -> tuple[Token, ...]:
        """Every token, the plain one hashed."""
        return tokens_of(self.token, self.tokens)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over variables, variables over *_FILE."""
        return (init_settings, env_settings, _SecretFiles(settings_cls))


def secret_in_file(name: str) -> str | None:
    """What the file holds that FORESHOCK_<NAME>_FILE names; None when the variable is not set.

    Raises ValueError with a sentence when the file cannot be read.
    """
    variable = f"FORESHOCK_{name.upper()}_FILE"
    path = os.environ.get(variable)
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable} names {path}, which cannot be read: {error}") from None


class UnusableSettingsError(ValueError):
    """The service cannot start with what was set. The message says why and holds no value: it may be a secret."""


def settings_of(**given: Any) -> Settings:
    """The settings of the environment, with `given` on top. Raises UnusableSettingsError."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise UnusableSettingsError("\n".join(sentences(error))) from None
    except SettingsError as error:  # says the field and the source, and what it says of the value stays with its cause
        name = str(error).partition('"')[2].partition('"')[0].upper()
        raise UnusableSettingsError(f"FORESHOCK_{name} is not the JSON that it must be; see docs/service.md") from None


class _SecretFiles(PydanticBaseSettingsSource):
    """FORESHOCK_TOKEN_FILE=/run/secrets/token and the like, as container engines hand over secrets."""

    NAMES = (
        "token",
        "tokens",
        "grafana_hmac_secret",
        "database_url",
        "notify_slack_url",
        "notify_webhook_url",
    )

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        value = secret_in_file(field_name) if field_name in self.NAMES else None
        return value, field_name, field_name == "tokens"

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, field in self.settings_cls.model_fields.items():
            value, _, is_json = self.get_field_value(field, name)
            if value is not None:
                values[name] = self.decode_complex_value(name, field, value) if is_json else value
        return values
