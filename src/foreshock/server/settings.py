"""The service's settings: FORESHOCK_* variables, or FORESHOCK_*_FILE naming a file that holds the secret."""

import hashlib
import ipaddress
import os
import re
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from foreshock.contract.environment import as_header_carries, refuse_misspelt, sentences
from foreshock.contract.wire import MAX_BATCH_BYTES
from foreshock.server.outgoing import OutgoingError, allowed

Scope = Literal["ingest", "read", "act", "delete", "admin"]
_TOKEN_CHARACTERS = 16
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:[0-9]+)?", re.ASCII)
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


class Settings(BaseSettings):
    """Settings of the service. It refuses a misspelt FORESHOCK_ variable."""

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

    token: SecretStr | None = Field(default=None, description="a secret that may do everything")
    tokens: tuple[Token, ...] = Field(default=(), description="JSON list of hashed, scoped tokens")

    connections: int = Field(
        default=2000, ge=8, description="connections at once; beyond, the one that is idle longest is closed"
    )
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
    public_url: str = Field(
        default="",
        max_length=512,
        description="address of the page, for links in notifications; with https:// the session cookie is Secure",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    # Fixed, since nobody can choose it with a reason. Tests make some of it small (server.testing).
    max_body_bytes: ClassVar[int] = MAX_BATCH_BYTES + 2**20
    """Largest request body: the largest batch of the wire, and room for what stands round it."""
    header_seconds: ClassVar[float] = 10.0
    """In which the headers of a request must come: a slow network needs one, whoever holds connections takes more."""
    body_seconds: ClassVar[float] = 60.0
    """In which the body of a request must come: the largest batch over 5 Mbit/s."""
    ingest_queue_batches: ClassVar[int] = 64
    """Batches of a token that wait to be written, then 429: more would be answered after the agents' deadline."""
    ingest_queue_bytes: ClassVar[int] = 128 * 2**20
    """Bytes of them, and of the bodies that a token sends at once, then 429: four of the largest batches."""
    commit_batches: ClassVar[int] = 128
    """Batches written by one commit at most: those who wait for a full group stay within the agents' deadline."""
    stream_clients: ClassVar[int] = 1024
    """Streams at once: half of the connections, so that agents keep the others."""
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
        if not self.all_tokens and not self.loopback:
            raise ValueError(
                f"host {self.host} can be reached from other machines, and no token is set: anyone there could switch "
                "kernels in a training run. Set FORESHOCK_TOKEN (16 characters or more) or FORESHOCK_TOKEN_FILE, or "
                "listen on 127.0.0.1"
            )
        if not self.all_tokens and (passed_on := self._passed_on()):
            raise ValueError(
                f"FORESHOCK_{passed_on.upper()} is set, so others reach the service through a proxy, and no token is "
                "set: anyone there could switch kernels in a training run. Set FORESHOCK_TOKEN (16 characters or "
                f"more), FORESHOCK_TOKEN_FILE or FORESHOCK_TOKENS_FILE, or leave FORESHOCK_{passed_on.upper()} out"
            )
        for url in (self.notify_slack_url, self.notify_webhook_url):
            if url is not None:
                try:
                    allowed(url.get_secret_value(), [host.lower() for host in self.notify_hosts])
                except OutgoingError as error:
                    raise ValueError(f"a notification URL cannot be used: {error}") from None
        return self

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_can_be_named(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:  # one that no request can name would shut everybody out, an empty one let those in without
            if not _HOST.fullmatch(each):
                raise ValueError(f"{each!r} is not a host name; use a name such as foreshock.example.org")
        return given

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_can_be_recognised(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            try:
                ipaddress.ip_network(each)
            except ValueError:
                raise ValueError(f"{each!r} is no address or network; give such as 10.0.0.7 or 10.0.0.0/24") from None
        return given

    @field_validator("public_url")
    @classmethod
    def _links_can_be_followed(cls, given: str) -> str:
        try:
            whole = not given or (given.startswith(("http://", "https://")) and urlsplit(given).hostname)
        except ValueError:
            whole = False
        if not whole:
            raise ValueError(
                "give http:// or https:// and the name of a machine, such as https://foreshock.example.org"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _nothing_misspelt(cls, given: Any) -> Any:
        refuse_misspelt()  # first: a name in lower case is read, and its value may be wrong too
        return given

    @classmethod
    def variables(cls) -> list[str]:
        """Every variable that is read."""
        plain = [f"FORESHOCK_{name.upper()}" for name in cls.model_fields]
        return [*plain, *(f"FORESHOCK_{name.upper()}_FILE" for name in _SecretFiles.NAMES)]

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach the address."""
        return _is_loopback(self.host)

    def _passed_on(self) -> str | None:
        """The setting by which a proxy gives others the service, if one is set."""
        for name in ("allowed_hosts", "trusted_proxies"):
            if getattr(self, name):
                return name
        return "public_url" if self.public_url and not _is_loopback(urlsplit(self.public_url).hostname or "") else None

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
        return (init_settings, env_settings, _SecretFiles(settings_cls))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _secret_in_file(name: str) -> str | None:
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


def settings_of(kind: type[Settings] = Settings, **given: Any) -> Settings:
    """The settings of the environment, with `given` on top. Raises UnusableSettingsError."""
    try:
        return kind(**given)
    except ValidationError as error:
        raise UnusableSettingsError("\n".join(sentences(error))) from None
    except SettingsError as error:  # says the field and the source, and what it says of the value stays with its cause
        name = str(error).partition('"')[2].partition('"')[0].upper()
        raise UnusableSettingsError(f'FORESHOCK_{name} is not valid JSON; give a list such as ["a", "b"]') from None


class _SecretFiles(PydanticBaseSettingsSource):
    """FORESHOCK_TOKEN_FILE=/run/secrets/token and the like, as container engines hand over secrets."""

    NAMES = (
        "token",
        "tokens",
        "database_url",
        "notify_slack_url",
        "notify_webhook_url",
    )

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        value = _secret_in_file(field_name) if field_name in self.NAMES else None
        return value, field_name, field_name == "tokens"

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, field in self.settings_cls.model_fields.items():
            value, _, is_json = self.get_field_value(field, name)
            if value is not None:
                values[name] = self.decode_complex_value(name, field, value) if is_json else value
        return values
