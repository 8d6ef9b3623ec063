"""What the user may set. Every field can also come from the environment as FORESHOCK_<NAME>."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import secrets
import time
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from foreshock.contract.environment import refuse_misspelt
from foreshock.contract.modes import DEFAULT_MITIGATION, check_served, parse_mode
from foreshock.contract.wire import Identifier, ModeName, Policy
from foreshock.monitor.detect.detectors import DetectorConfig
from foreshock.monitor.mirror import parts_of_mirror
from foreshock.monitor.policy import SwitchScope

Numerics = Literal["auto", "kernel", "float32", "paper", "float64"]
Served = Literal["auto", "kernels", "keep"]


def _default_spool_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "foreshock" / "spool"


class AgentConfig(BaseSettings):
    """Settings of one agent. A wrong one raises ValueError in `attach`, never later."""

    model_config = SettingsConfigDict(
        env_prefix="FORESHOCK_",
        extra="forbid",
        use_attribute_docstrings=True,
        frozen=True,
        populate_by_name=True,
        hide_input_in_errors=True,
        env_ignore_empty=True,
    )

    run: Identifier = Field(default="", validate_default=False)
    """Name of the run; every rank and every restart of one run must give the same. Made up for a single process; of
    several, taken from torchrun's --rdzv-id or Slurm's job where there is one."""
    labels: dict[Identifier, str] = Field(default_factory=dict, max_length=32)
    """Free text shown beside the run: {"team": "vision"}."""

    url: str | None = None
    """Address of the service, such as http://127.0.0.1:8765. None: detect and act locally, send nothing."""
    token: SecretStr | None = None
    """Bearer token of the service."""
    token_file: Path | None = None
    """File that holds the token where `token` gives none. It is read again when the service refuses the token, so that
    tokens can be exchanged while the run goes on."""

    rank: int = Field(default=0, ge=0, lt=10**6, validation_alias=AliasChoices("rank", "FORESHOCK_RANK", "RANK"))
    """Number of this process among the run's processes."""
    world_size: int = Field(
        default=1, ge=1, le=10**6, validation_alias=AliasChoices("world_size", "FORESHOCK_WORLD_SIZE", "WORLD_SIZE")
    )
    """Processes of the run."""

    mirror: str | None = None
    """Experiment tracker that is told the agent's few numbers too (worst score offset, largest score, active warnings,
    switched heads; of the first process): "wandb", "mlflow" or "trackio", whose run the program has opened before the
    first step, or "tensorboard:FOLDER". None: no tracker."""

    policy: Policy = "observe"
    """observe: warn only. approve: propose a switch to the people. auto: switch the head at the next step boundary."""
    mitigation: ModeName = DEFAULT_MITIGATION
    """The mode that a head is switched to."""
    switch_scope: SwitchScope = "model"
    """What a warning switches under approve and auto: the head that it names, its layer, or all heads of this process.
    In the laboratory (lab/NOTEBOOK.md) one head alone held a run for as long as each later warning switched the next one;
    all heads at the first warning left less drift behind."""
    numerics: Numerics = "auto"
    """How attention is rounded. auto never rounds more than the model asks for: kernel where its operands have 16 bits
    (autocast counted in), float32 for fp32, float64 for float64. By name for every call: kernel (a real
    FlashAttention-2; rounds fp32 to bf16), float32, paper (arXiv 2510.04212; rounds as well) or float64."""

    attention: Served = "auto"
    """What serves the attention. keep: what serves it now (cuDNN, FlashAttention, ...), of which a sample is measured;
    a switch moves a layer onto foreshock's kernels. kernels: those, which count every row of every step, where they
    serve a call; other calls are kept. auto: keep on a CPU; on a GPU the first steps compare foreshock's kernels with
    each layer's own attention, and layers where they agree within rounding go to the kernels. "foreshock" is an old
    name of kernels."""
    probe_every_steps: int = Field(default=10, ge=1, le=10**6)
    """Where attention is kept: a step is measured after this many steps, and every step while a warning is fresh."""
    probe_rows: int = Field(default=32, ge=1, le=2**20)
    """Where attention is kept: rows of each head that are measured in such a step, drawn anew each time."""
    probe_heads: int = Field(default=0, ge=0, le=1024)
    """Where attention is kept: heads of each layer that are measured in such a step, in turn; 0 means all."""

    sample_every_steps: int = Field(default=10, ge=1, le=10**6)
    """A sample is taken at multiples of this many steps, doubled as often as `sample_every_seconds` asks."""
    sample_every_seconds: float = Field(default=1.0, ge=0, le=3600)
    """Least time between two samples. By doubling the steps ranks sample the same steps without talking."""
    close_watch_steps: int = Field(default=200, ge=0, le=10**6)
    """After a warning is raised every step is sampled for this many steps."""
    norms_every_steps: int = Field(default=100, ge=0, le=10**6)
    """Spectral norms of W_Q and W_K ride on the first sample after this many steps; 0 turns them off."""

    detectors: DetectorConfig = DetectorConfig()
    """When a head is warned about."""

    first_layer: int = Field(default=0, ge=0)
    """Global number of this rank's first attention layer (pipeline parallelism)."""
    layers: dict[str, int] = Field(default_factory=dict)
    """Global numbers of attention layers by module name, where those of a rank do not follow each other (interleaved
    pipeline stages): {"layers.0.attention": 8}."""
    first_head: int = Field(default=0, ge=0)
    """Global number of this rank's first head in every layer, where the model's own modules hold a part of the heads.
    Tensor parallelism by PyTorch's parallelize_module is seen, and needs no number."""
    heads: dict[str, int] = Field(default_factory=dict)
    """If the number of heads of an attention module cannot be inferred, pass it, by its name: {"blocks.0.attn": 8}."""

    spool_directory: Path | None = Field(default_factory=_default_spool_directory)
    """Where unsent batches outlive the process; under the XDG cache by default. None: memory only."""
    spool_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Most bytes of unsent batches on disk, per process."""
    queue_bytes: int = Field(default=8 * 2**20, ge=2**16)
    """Most bytes of events waiting in memory; samples beyond it are dropped and counted."""
    send_every_seconds: float = Field(default=0.5, gt=0, le=1)
    """How often events are gathered into a batch, spooled and sent. A SIGKILL loses at most this much."""
    heartbeat_seconds: float = Field(default=5.0, gt=0, le=3600)
    """Without events the agent reports its health this often, and fetches commands with it."""
    request_seconds: float = Field(default=10.0, gt=0, le=300)
    """Total deadline of one request, from connecting to the last byte of the answer."""
    close_seconds: float = Field(default=2.0, ge=0, le=60)
    """Most seconds that `close` waits for unsent batches."""

    quiet: bool = False
    """Do not print the table of what was found."""
    strict: bool = False
    """Raise the agent's own faults instead of containing them. For tests."""

    @field_validator("attention", mode="before")
    @classmethod
    def _old_name_of_attention(cls, value: object) -> object:
        return "kernels" if value == "foreshock" else value

    @field_validator("mitigation")
    @classmethod
    def _mitigation_is_known(cls, value: str) -> str:
        if value == "plain":
            raise ValueError("mitigation 'plain' changes nothing; to change nothing give policy='observe'")
        check_served(parse_mode(value))
        return value

    @field_validator("mirror")
    @classmethod
    def _mirror_is_installed(cls, value: str | None) -> str | None:
        if value is not None:
            tracker, _ = parts_of_mirror(value)
            if importlib.util.find_spec(tracker) is None:
                raise ValueError(f"mirror needs {tracker}, which is not installed: pip install {tracker}")
        return value

    @field_validator("url")
    @classmethod
    def _url_is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("url must start with http:// or https://, such as http://127.0.0.1:8765")
        if value is not None and "@" in value:
            raise ValueError("url must carry no user name or password; give token=... or set FORESHOCK_TOKEN")
        return value

    @model_validator(mode="after")
    def _token_is_known(self) -> Self:
        if self.token is None and self.token_file is not None:
            token_in(self.token_file)
        return self

    @model_validator(mode="after")
    def _nothing_misspelt(self) -> Self:
        refuse_misspelt()
        return self

    @model_validator(mode="after")
    def _ranks_agree(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} needs a world_size of at least {self.rank + 1}, got {self.world_size}")
        if not self.run and self.world_size > 1 and _launcher_run() is None:
            raise ValueError(
                f"{self.world_size} processes need one name for their run: give run=... or set FORESHOCK_RUN on all"
            )
        return self


def token_in(file: Path) -> SecretStr:
    """The token that a file holds. Raises ValueError for a file that cannot be read or holds none."""
    try:
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token_file {file} cannot be read: {type(error).__name__}") from None
    if not found:
        raise ValueError(f"token_file {file} is empty; it must hold the token")
    return SecretStr(found)


_PLAIN_NAME: Final = "run-%Y%m%d-%H%M%S-"


def new_run_name(world_size: int = 1) -> str:
    """A name for a run that was given none, such as run-20260102-030405-9f3a; for several processes, the launcher's."""
    launched = _launcher_run() if world_size > 1 else None
    return launched or time.strftime(_PLAIN_NAME, time.gmtime()) + secrets.token_hex(2)


def _launcher_run() -> str | None:
    """What torchrun or Slurm call this run, the same on every rank and after a restart."""
    for launcher, variable in (("torchrun", "TORCHELASTIC_RUN_ID"), ("slurm", "SLURM_JOB_ID")):
        name = re.sub(r"[^A-Za-z0-9_.:-]", "-", os.environ.get(variable, ""))[:100]
        if name not in ("", "none"):  # torchrun's default says none
            return f"{launcher}-{name}"
    return None


def make_config(config: AgentConfig | None, overrides: dict[str, Any]) -> AgentConfig:
    """`config` with `overrides` on top, both validated. Raises ValueError with one sentence per mistake."""
    given = config.model_dump(include=config.model_fields_set) if config is not None else {}
    try:
        return AgentConfig(**{**given, **overrides})
    except ValidationError as error:
        raise ValueError("; ".join(_sentence(dict(e)) for e in error.errors(include_input=False))) from None


def _sentence(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where} is not a setting of the agent; settings are {', '.join(AgentConfig.model_fields)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def versions() -> dict[str, str]:
    """Of Python, PyTorch and what the agent works with."""
    found = {"python": platform.python_version()}
    for package in ("torch", "foreshock", "transformers", "triton"):
        try:
            found[package] = importlib.metadata.version(package)[:64]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
