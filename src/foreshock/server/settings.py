"""The service's settings: FORESHOCK_* variables, or FORESHOCK_*_FILE with the path of a file with the secret."""

import hashlib
import ipaddress
import json
import os
import re
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from foreshock.contract.environment import as_header_carries, names_a_host, refuse_misspelt, sentences
from foreshock.contract.wire import MAX_BATCH_BYTES
from foreshock.server.outgoing import OutgoingError, allowed

Scope = Literal["ingest", "read", "act", "delete", "admin"]
_TOKEN_CHARACTERS = 16
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]+)?", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}")
_SECRETS = ("token", "tokens", "database_url", "notify_slack_url", "notify_webhook_url")
ALL_SCOPES: tuple[Scope, ...] = ("ingest", "read", "act", "delete", "admin")


def _digest(given: str) -> str:
    if not _SHA256.fullmatch(given):
        raise ValueError("use 64 characters of 0-9 a-f, as `printf %s SECRET | sha256sum` prints them")
    return given


class Token(BaseModel):
    """A token and its permissions. Only the hash of the secret is stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(min_length=1, max_length=64, description="recorded in the audit trail and the log")
    sha256: Annotated[str, AfterValidator(_digest)] = Field(description="hex SHA-256 of the secret")
    scopes: tuple[Scope, ...] = Field(
        min_length=1, description="ingest, read, act (commands, webhooks, notes), delete (runs), admin (all)"
    )
    run_prefix: str = Field(default="", description="the token has access only to runs whose names begin with this")

    @classmethod
    def of(cls, name: str, secret: str, scopes: tuple[Scope, ...], run_prefix: str = "", **more: Any) -> Self:
        """Create the entry for a secret."""
        digest = hashlib.sha256(secret.encode()).hexdigest()
        return cls(name=name, sha256=digest, scopes=scopes, run_prefix=run_prefix, **more)


def _host(given: str) -> str:
    if not _HOST.fullmatch(given):  # an impossible name would lock everybody out
        raise ValueError(f"{given!r} is not a host name; use a name such as foreshock.example.org")
    return given


def _network(given: str) -> str:
    try:
        ipaddress.ip_network(given)
    except ValueError:
        raise ValueError(f"{given!r} is not an address or network; use one such as 10.0.0.7 or 10.0.0.0/24") from None
    return given


def _page(given: str) -> str:
    if given and not names_a_host(given):
        raise ValueError("use http:// or https:// and the name of a host, such as https://foreshock.example.org")
    return given


class Settings(BaseSettings):
    """Settings of the service. A misspelt FORESHOCK_ variable is an error."""

    model_config = SettingsConfigDict(env_prefix="FORESHOCK_", extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", description="address to listen on; anything but loopback needs a token")
    port: int = Field(default=8765, ge=0, le=65535, description="0 takes a free port")
    allowed_hosts: tuple[Annotated[str, AfterValidator(_host)], ...] = Field(
        default=(), description="Host names to answer to; empty: loopback names without a token, any with one"
    )
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = Field(
        default=(), description="addresses or networks whose X-Forwarded-For and X-Forwarded-Proto are trusted"
    )
    database_url: str = Field(  # never shown, because it may contain a password
        default="sqlite:///foreshock-data/foreshock.db", repr=False, description="sqlite:/// or postgresql://"
    )
    migrate: bool | None = Field(default=None, description="bring the schema up to date at start; default: SQLite only")

    token: SecretStr | None = Field(default=None, description="a secret with all rights")
    tokens: tuple[Token, ...] = Field(default=(), description="JSON list of hashed, scoped tokens")

    max_series: int = Field(default=50_000, ge=100, description="series in /metrics; the rest is dropped and counted")
    retention_seconds: float | None = Field(
        default=90 * 86_400.0,
        gt=0,
        description="runs silent for longer are deleted, never with inf; the audit trail stays",
    )

    verify_steps: int = Field(
        default=1000, ge=0, description="steps after a switch at which it is verified; 0 turns verification off"
    )
    notify_slack_url: SecretStr | None = Field(default=None, description="an incoming webhook of Slack, or compatible")
    notify_webhook_url: SecretStr | None = Field(default=None, description="gets {message, event, incidents} as JSON")
    notify_hosts: tuple[str, ...] = Field(
        default=("hooks.slack.com",), description="allowed hosts of the two URLs above; https only"
    )
    public_url: Annotated[str, AfterValidator(_page)] = Field(
        default="",
        max_length=512,
        description="address of the page, for links in notifications; with https:// the session cookie is Secure",
    )

    # Constants, because users have no reason to change them. Tests reduce some of them (server.testing).
    max_body_bytes: ClassVar[int] = MAX_BATCH_BYTES + 2**20
    """Largest request body: the largest batch of the wire format, and some room for its JSON."""
    requests_at_once: ClassVar[int] = 4096
    """Concurrent requests; a token may use half of them, all clients without a token a quarter, else 429."""
    run_batches_per_second: ClassVar[float] = 1000.0
    """Batches a second of a token for one run, else 429: about as many as two cores store."""
    request_seconds: ClassVar[float] = 60.0
    """Time to receive a whole request: enough for the largest batch over 5 Mbit/s."""
    ingest_queue_batches: ClassVar[int] = 64
    """Waiting batches of a token, else 429: further ones would be answered after the agents' deadline."""
    body_bytes_at_once: ClassVar[int] = 128 * 2**20
    """Bytes of a token's request bodies in flight, including waiting ones, else 429: four of the largest."""
    commit_batches: ClassVar[int] = 128
    """Maximum number of batches in one commit, so that even a full group is answered within the agents' deadline."""
    stream_ping_seconds: ClassVar[float] = 15.0
    """Interval of pings and session checks in an idle stream; without pings, proxies close it."""
    stream_queue_events: ClassVar[int] = 256
    """Events queued for a slow client before it is disconnected; it reconnects and resumes from the log."""
    worst_heads: ClassVar[int] = 16
    """Heads of each run in /metrics: more than a board lists; the page shows every head."""
    metrics_seconds: ClassVar[float] = 1.0
    """Scrapes within this time get the same snapshot; shorter than any scrape interval."""
    finished_run_seconds: ClassVar[float] = 900.0
    """Time until a finished run disappears from /metrics; every scraper has seen its end by then."""
    silent_run_seconds: ClassVar[float] = 86_400.0
    """Time until a silent run disappears from /metrics; until then its alert fires."""
    command_expiry_seconds: ClassVar[float] = 3600.0
    """Default expiry of commands, so that an order is not carried out long after anybody expects it."""
    webhook_cooldown_seconds: ClassVar[float] = 300.0
    """Time between two automatic switches of a run; by then the effect of the first one is visible."""
    notify_gather_seconds: ClassVar[float] = 5.0
    """Time to wait for further events before sending one message; the heads of an incident warn within seconds."""
    session_seconds: ClassVar[float] = 43_200.0
    """Lifetime of the page's session cookie: a working day."""

    @model_validator(mode="after")
    def _safe_to_bind(self) -> Self:
        elsewhere = self.public_url and not _is_loopback(urlsplit(self.public_url).hostname or "")
        opens = {
            f"host {self.host} can be reached from other machines": not _is_loopback(self.host),
            "FORESHOCK_ALLOWED_HOSTS is set, so others reach the service through a proxy": self.allowed_hosts,
            "FORESHOCK_TRUSTED_PROXIES is set, so others reach the service through a proxy": self.trusted_proxies,
            "FORESHOCK_PUBLIC_URL is set, so others reach the service through a proxy": elsewhere,
        }
        if not self.all_tokens and (why := next((one for one, there in opens.items() if there), None)):
            raise ValueError(
                f"{why}, and no token is set: anyone there could switch kernels in a training run. Set FORESHOCK_TOKEN "
                f"({_TOKEN_CHARACTERS} characters or more), FORESHOCK_TOKEN_FILE or FORESHOCK_TOKENS_FILE, or listen "
                "on 127.0.0.1 without a proxy"
            )
        for url in (self.notify_slack_url, self.notify_webhook_url):
            if url is not None:
                try:
                    allowed(url.get_secret_value(), [host.lower() for host in self.notify_hosts])
                except OutgoingError as error:
                    raise ValueError(f"a notification URL cannot be used: {error}") from None
        return self

    @model_validator(mode="before")
    @classmethod
    def _nothing_misspelt(cls, given: Any) -> Any:
        refuse_misspelt()  # before the values, because pydantic also reads a name in lower case
        return given

    @classmethod
    def variables(cls) -> list[str]:
        """Return the names of all environment variables that are read."""
        plain = [f"FORESHOCK_{name.upper()}" for name in cls.model_fields]
        return [*plain, *(f"FORESHOCK_{name.upper()}_FILE" for name in _SECRETS)]

    @property
    def all_tokens(self) -> tuple[Token, ...]:
        """All tokens, including a hash of FORESHOCK_TOKEN.

        Raises ValueError for a secret that is too short, and for repeated names or secrets.
        """
        secret = "" if self.token is None else self.token.get_secret_value().strip()
        if self.token is not None and len(secret) < _TOKEN_CHARACTERS:
            raise ValueError(f"FORESHOCK_TOKEN needs {_TOKEN_CHARACTERS} characters or more")
        secret = secret and as_header_carries(secret)
        found = (*((Token.of("token", secret, ALL_SCOPES),) if secret else ()), *self.tokens)
        if len({one.name for one in found}) != len(found):
            raise ValueError("two tokens have the same name; the audit trail could not distinguish them")
        for one, other in combinations(found, 2):
            if one.sha256 == other.sha256:
                raise ValueError(f"tokens {one.name} and {other.name} have the same secret; give each its own")
        return found

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Give arguments precedence over variables, and variables over *_FILE."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, _secrets_in_files())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _secrets_in_files() -> dict[str, Any]:
    """Read the files named by variables such as FORESHOCK_TOKEN_FILE=/run/secrets/token, as container engines set them.

    Raises UnusableSettingsError if one cannot be read.
    """
    found: dict[str, Any] = {}
    for name in _SECRETS:
        variable = f"FORESHOCK_{name.upper()}_FILE"
        if (path := os.environ.get(variable)) is None:
            continue
        try:
            text = Path(path).read_text("utf-8").strip()
            found[name] = json.loads(text) if name == "tokens" else text
        except (OSError, ValueError) as error:
            raise UnusableSettingsError(f"{variable} names {path}, which cannot be read: {error}") from None
    return found


class UnusableSettingsError(ValueError):
    """The service cannot start with these settings. The message never contains a value, which may be a secret."""


def settings_of(**given: Any) -> Settings:
    """Return the settings of the environment, overridden by `given`. Raises UnusableSettingsError."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise UnusableSettingsError("\n".join(sentences(error))) from None
    except SettingsError as error:  # its message names the field; only its cause contains the value
        name = str(error).partition('"')[2].partition('"')[0].upper()
        raise UnusableSettingsError(f'FORESHOCK_{name} is not valid JSON; use a list such as ["a", "b"]') from None
