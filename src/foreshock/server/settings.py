"""The service's settings: FORESHOCK_* variables, or FORESHOCK_*_FILE naming a file that holds the secret."""

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
_SECRETS = ("token", "tokens", "database_url", "notify_slack_url", "notify_webhook_url")
ALL_SCOPES: tuple[Scope, ...] = ("ingest", "read", "act", "delete", "admin")


class Token(BaseModel):
    """Who may do what. Only the hash of the secret is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(min_length=1, max_length=64, description="recorded in the audit trail and the log")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="hex SHA-256 of the secret")
    scopes: tuple[Scope, ...] = Field(
        min_length=1, description="ingest, read, act (commands, webhooks, notes), delete (runs), admin (all)"
    )
    run_prefix: str = Field(default="", description="the token reaches only runs whose name begins so")

    @classmethod
    def of(cls, name: str, secret: str, scopes: tuple[Scope, ...], run_prefix: str = "", **more: Any) -> Self:
        """The entry for a secret."""
        digest = hashlib.sha256(secret.encode()).hexdigest()
        return cls(name=name, sha256=digest, scopes=scopes, run_prefix=run_prefix, **more)


def _host(given: str) -> str:
    if not _HOST.fullmatch(given):  # one that no request can name would shut everybody out
        raise ValueError(f"{given!r} is not a host name; use a name such as foreshock.example.org")
    return given


def _network(given: str) -> str:
    try:
        ipaddress.ip_network(given)
    except ValueError:
        raise ValueError(f"{given!r} is no address or network; give such as 10.0.0.7 or 10.0.0.0/24") from None
    return given


def _page(given: str) -> str:
    if given and not names_a_host(given):
        raise ValueError("give http:// or https:// and the name of a machine, such as https://foreshock.example.org")
    return given


class Settings(BaseSettings):
    """Settings of the service. It refuses a misspelt FORESHOCK_ variable."""

    model_config = SettingsConfigDict(env_prefix="FORESHOCK_", extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", description="address to listen on; anything but loopback needs a token")
    port: int = Field(default=8765, ge=0, le=65535, description="0 takes a free port")
    allowed_hosts: tuple[Annotated[str, AfterValidator(_host)], ...] = Field(
        default=(), description="Host names to answer to; empty: loopback names without a token, any with one"
    )
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = Field(
        default=(), description="addresses or networks whose X-Forwarded-For and X-Forwarded-Proto are believed"
    )
    database_url: str = Field(  # may hold a password: never shown
        default="sqlite:///foreshock-data/foreshock.db", repr=False, description="sqlite:/// or postgresql://"
    )
    migrate: bool | None = Field(default=None, description="bring the schema up to date at start; default: SQLite only")

    token: SecretStr | None = Field(default=None, description="a secret that may do everything")
    tokens: tuple[Token, ...] = Field(default=(), description="JSON list of hashed, scoped tokens")

    run_batches_per_second: float = Field(default=1000.0, gt=0, description="per token and run; above it 429")
    max_series: int = Field(default=50_000, ge=100, description="series in /metrics; the rest is dropped and counted")
    retention_seconds: float | None = Field(
        default=90 * 86_400.0,
        gt=0,
        description="runs silent for longer are deleted, none with inf; the audit trail stays",
    )

    verify_steps: int = Field(
        default=1000, ge=0, description="steps after a switch at which it is verified; 0 verifies none"
    )
    notify_slack_url: SecretStr | None = Field(default=None, description="an incoming webhook of Slack, or compatible")
    notify_webhook_url: SecretStr | None = Field(default=None, description="gets {message, event, incidents} as JSON")
    notify_hosts: tuple[str, ...] = Field(
        default=("hooks.slack.com",), description="hosts that the two URLs above may name; https only"
    )
    public_url: Annotated[str, AfterValidator(_page)] = Field(
        default="",
        max_length=512,
        description="address of the page, for links in notifications; with https:// the session cookie is Secure",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    # Fixed, since nobody can choose it with a reason. Tests make some of it small (server.testing).
    max_body_bytes: ClassVar[int] = MAX_BATCH_BYTES + 2**20
    """Largest request body: the largest batch of the wire, and room for what stands round it."""
    requests_at_once: ClassVar[int] = 4096
    """Of all callers: a token gets half of them, all clients without one a quarter, then 429."""
    request_seconds: ClassVar[float] = 60.0
    """In which a request must come whole: the largest batch over 5 Mbit/s."""
    ingest_queue_batches: ClassVar[int] = 64
    """Batches of a token that wait to be written, then 429: more would be answered after the agents' deadline."""
    body_bytes_at_once: ClassVar[int] = 128 * 2**20
    """Bytes of the bodies that a token sends at once, the waiting ones included, then 429: four of the largest."""
    commit_batches: ClassVar[int] = 128
    """Batches written by one commit at most: those who wait for a full group stay within the agents' deadline."""
    stream_ping_seconds: ClassVar[float] = 15.0
    """A quiet stream says so often that it lives, and looks whether its session does: proxies close what is silent."""
    stream_queue_events: ClassVar[int] = 256
    """Events waiting for a slow client, then it is cut off: it comes back, and resumes from the log."""
    worst_heads: ClassVar[int] = 16
    """Heads of each run that /metrics shows one by one: more than a board lists; the page shows every head."""
    metrics_seconds: ClassVar[float] = 1.0
    """Scrapes within this time get the same snapshot: less than any scrape interval."""
    finished_run_seconds: ClassVar[float] = 900.0
    """A finished run leaves /metrics after this: every scraper has seen its end by then."""
    silent_run_seconds: ClassVar[float] = 86_400.0
    """A run gone silent leaves /metrics after a day: until then its alert asks somebody to look."""
    command_expiry_seconds: ClassVar[float] = 3600.0
    """For commands that name no expiry: an order is not carried out when nobody expects it any more."""
    webhook_cooldown_seconds: ClassVar[float] = 300.0
    """Between two switches of a run by a machine, so at most twelve an hour: what a switch did shows by then."""
    notify_gather_seconds: ClassVar[float] = 5.0
    """News wait so long for more, and go out in one message: the heads of one incident warn within seconds."""
    session_seconds: ClassVar[float] = 43_200.0
    """Life of the page's session cookie: a working day."""

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
        refuse_misspelt()  # first: a name in lower case is read, and its value may be wrong too
        return given

    @classmethod
    def variables(cls) -> list[str]:
        """Every variable that is read."""
        plain = [f"FORESHOCK_{name.upper()}" for name in cls.model_fields]
        return [*plain, *(f"FORESHOCK_{name.upper()}_FILE" for name in _SECRETS)]

    @property
    def all_tokens(self) -> tuple[Token, ...]:
        """Every token, the plain one hashed.

        Raises ValueError with a sentence for a secret that is too short, and for names that stand twice.
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
        """Arguments win over variables, variables over *_FILE."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, _secrets_in_files())


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _secrets_in_files() -> dict[str, Any]:
    """What the files hold that FORESHOCK_TOKEN_FILE=/run/secrets/token and the like name, as container engines do.

    Raises UnusableSettingsError for one that cannot be read.
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
    """The service cannot start with what was set. The message says why and holds no value: it may be a secret."""


def settings_of(**given: Any) -> Settings:
    """The settings of the environment, with `given` on top. Raises UnusableSettingsError."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise UnusableSettingsError("\n".join(sentences(error))) from None
    except SettingsError as error:  # says the field and the source, and what it says of the value stays with its cause
        name = str(error).partition('"')[2].partition('"')[0].upper()
        raise UnusableSettingsError(f'FORESHOCK_{name} is not valid JSON; give a list such as ["a", "b"]') from None
