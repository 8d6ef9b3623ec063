"""Settings of the agent. Every field can also be set in the environment as FORESHOCK_<NAME>."""

import functools
import importlib.metadata
import os
import platform
import re
import secrets
import time
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, TypedDict

from pydantic import AliasChoices, Field, PositiveInt, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from foreshock.contract.environment import (
    as_header_carries,
    names_a_host,
    refuse_misspelt,
    token_in,
    why_removed,
)
from foreshock.contract.modes import DEFAULT_MITIGATION, parse_mode
from foreshock.contract.orders import SwitchScope
from foreshock.contract.wire import Identifier, ModeName, Policy
from foreshock.monitor.detect.detectors import DetectorConfig
from foreshock.monitor.mirror import parts_of_mirror

Numerics = Literal["auto", "kernel", "float32", "paper", "float64"]
Served = Literal["keep", "kernels"]
ClipWhen = Literal["never", "warned", "always"]
"""When QK-Clip scales weights (docs/score-growth.md)."""


def _default_spool_directory() -> Path | None:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "foreshock" / "spool"
    except RuntimeError:  # HOME is not set and the user does not have a passwd entry, as in many containers
        return None


class AgentConfig(BaseSettings):
    """Settings of one agent. Wrong settings raise ValueError in `attach`, never later."""

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
    """Name of the run, the same for every rank and every restart. Default: a new name, or torchrun's --rdzv-id or
    Slurm's job number for several processes."""
    labels: dict[Identifier, str] = Field(default_factory=dict, max_length=32)
    """Free text shown next to the run: {"team": "vision"}."""

    url: str | None = None
    """Address of the service, such as http://127.0.0.1:8765. None: send nothing."""
    token: SecretStr | None = None
    """Token of the service, with the scope `ingest`."""
    token_file: Path | None = None
    """File with the token. The agent reads it again when the service refuses the token."""

    rank: int = Field(default=0, ge=0, lt=10**6, validation_alias=AliasChoices("FORESHOCK_RANK", "RANK", "rank"))
    """Number of this process among the run's processes."""
    world_size: int = Field(
        default=1, ge=1, le=10**6, validation_alias=AliasChoices("FORESHOCK_WORLD_SIZE", "WORLD_SIZE", "world_size")
    )
    """Number of processes of the run."""

    mirror: str | None = None
    """Tracker that also receives the first process's warnings, worst score offset, largest |score|, largest attention
    logit, lowest entropy, switched heads and QK-Clip's actions: "wandb", "mlflow", "trackio", "tensorboard:FOLDER", or
    "otlp" for an OpenTelemetry collector (every process, with loss and gradient norm)."""

    policy: Policy = "observe"
    """observe: only warn. approve: propose a switch to a person. auto: switch at the next step boundary."""
    mitigation: ModeName = DEFAULT_MITIGATION
    """The mode that a warning switches heads to."""
    switch_scope: SwitchScope = "model"
    """Which heads a warning switches under approve and auto: the head that it names (head), its layer (layer), or all
    heads of this process (model)."""
    replace_wrong_attention: bool = False
    """Under the policy auto, a layer whose own attention computes wrong rows or gradients moves to foreshock's kernels,
    with all of its heads in the mode `mitigation`."""
    save_on_warning: bool = True
    """Ask the trainer for a checkpoint when a warning opens an incident (in a plain loop `agent.should_save` is then
    true once), and protect the last clean one from the trainer's retention rule by hard links."""
    qk_clip: ClipWhen = "never"
    """QK-Clip, for scores that grow: after each optimizer step, scale W_Q and W_K of heads whose largest score passed
    `qk_clip_threshold`. It changes weights and cannot be undone. always: from the first step. warned: from the first
    warning about score growth. With either, attention is "kernels" by default. Use the same setting on every
    process."""
    qk_clip_threshold: float = Field(default=100.0, gt=0, allow_inf_nan=False)
    """QK-Clip does not change heads up to this largest score."""
    numerics: Numerics = "auto"
    """How foreshock's attention rounds. auto: as the operands do (kernel for 16 bits, also under autocast). Any other
    value applies to every call: kernel rounds as FlashAttention-2 does, paper as arXiv 2510.04212 does, float32,
    float64."""

    attention: Served = "keep"
    """Who computes the attention. keep: the model's own attention runs unchanged, and a sample of its rows is measured;
    only a switch moves a layer onto foreshock's kernels. kernels: these compute and count every row; unsupported calls
    run natively."""
    probe_rows: int = Field(default=4096, ge=1, le=2**20)
    """Rows of each head that the agent measures in a sampled step, with native attention."""

    # at most 1000: for a head whose scores double in 1,000 steps, this still gives a warning before 512
    sample_every_steps: int | None = Field(default=None, ge=1, le=1000)
    """Steps between two samples, at most 1000. Default: 10, doubled until samples are a second apart. The agent samples
    every step for a while after a warning and while the cause of a drift is undecided."""
    norms_every_steps: int = Field(default=100, ge=0, le=10**6)
    """Steps between two measurements of the spectral norms of W_Q and W_K. 0 turns them off."""

    detectors: DetectorConfig = DetectorConfig()
    """The thresholds that decide when a head is warned about."""

    first_layer: int | dict[str, int] = 0
    """Global number of this rank's first attention layer (pipeline parallelism). If the layers of a rank are not
    consecutive: of the first attention layer in each module, such as {"stages.0": 0, "stages.1": 8}; layers outside
    these modules follow the largest number."""
    first_head: int = Field(default=0, ge=0)
    """Global number of this rank's first head in every layer, if the modules hold only some heads. Tensor parallelism
    by parallelize_module is recognised."""
    heads: dict[str, PositiveInt] = Field(default_factory=dict)
    """Numbers of heads by module name, such as {"blocks.0.attn": 8}, if they cannot be inferred."""

    spool_directory: Path | None = Field(default_factory=_default_spool_directory)
    """Folder for unsent batches, which only you may write to. Default: in the user's cache. None: memory only."""
    spool_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Largest size of unsent samples on disk, for each process; other events may take as much again."""

    quiet: bool = False
    """Do not print the table of the attention that was found."""
    strict: bool = False
    """Raise the agent's own errors instead of logging them, also for a model without supported attention."""

    # Constants that users do not need to choose. Tests change some of them.
    sampled_steps: ClassVar[int] = 10
    """Steps between two samples unless `sample_every_steps` is set; few enough that warnings are not late."""
    sampled_seconds: ClassVar[float] = 1.0
    """Shortest time between two samples unless `sample_every_steps` is set; a shorter one would only cost time."""
    qk_clip_every_steps: ClassVar[int] = 10
    """With native attention and QK-Clip, one step in this many computes all scores and scales heads. With foreshock's
    kernels, every step does."""
    close_watch_steps: ClassVar[int] = 200
    """After a warning is raised, every step is sampled for this many steps: enough to see whether a switch helps."""
    queue_bytes: ClassVar[int] = 8 * 2**20
    """Largest size of the events that wait in memory for the sender's next turn. Samples beyond it are dropped and
    counted."""
    send_every_seconds: ClassVar[float] = 0.5
    """How often events are gathered into a batch, written to disk and sent. A SIGKILL loses at most this much time."""
    heartbeat_seconds: ClassVar[float] = 5.0
    """When there are no events, the agent reports its health this often. Orders come with the response, so this is
    also how long a user may wait for an order to arrive."""
    request_seconds: ClassVar[float] = 10.0
    """Longest time for one request, from connecting to the last byte of the response. Failed requests are retried."""
    close_seconds: ClassVar[float] = 2.0
    """Longest time that `close` waits for unsent batches. The rest stays in the spool for the next process."""

    @property
    def stride(self) -> int:
        """Steps between two samples, unless `sampled_seconds` requires more."""
        return self.sample_every_steps or self.sampled_steps

    @property
    def must_watch(self) -> bool:
        """Whether a model without supported attention is an error, because a setting asks for more than observing."""
        return self.strict or self.policy != "observe" or self.qk_clip != "never"

    @property
    def shows(self) -> bool:
        """Whether this process prints tables and addresses."""
        return self.rank == 0 and not self.quiet

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[Any, ...]:
        """Return the sources of settings in order of precedence: arguments, the nearest launcher, other variables."""

        def variables() -> dict[str, Any]:  # without values such as RANK=gold, which belong to another program
            found = env_settings()
            return {name: value for name, value in found.items() if name in os.environ or _is_ours(name, value)}

        return init_settings, _of_the_nearest_launcher, variables

    @field_validator("mitigation")
    @classmethod
    def _mitigation_is_known(cls, value: str) -> str:
        if value == "plain":
            raise ValueError("mitigation 'plain' changes nothing; to only warn, set policy='observe'")
        parse_mode(value)
        return value

    @field_validator("mirror")
    @classmethod
    def _mirror_is_installed(cls, value: str | None) -> str | None:
        if value is not None:
            parts_of_mirror(value)
        return value

    @field_validator("url")
    @classmethod
    def _url_is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("url must start with http:// or https://, for example http://127.0.0.1:8765")
        if value is not None and not names_a_host(value):
            raise ValueError("url must name a host, and a port as a number, for example http://127.0.0.1:8765")
        if value is not None and "@" in value:
            raise ValueError("url must not contain a user name or password; pass token=... or set FORESHOCK_TOKEN")
        return value

    @field_validator("token")
    @classmethod
    def _token_fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else SecretStr(as_header_carries(value.get_secret_value()))

    @field_validator("first_layer", mode="before")
    @classmethod
    def _first_layer_is_counted_from_0(cls, value: Any) -> Any:
        by_name = value if isinstance(value, dict) else {"": value}
        integers = all(isinstance(number, int) and not isinstance(number, bool) for number in by_name.values())
        if not all(isinstance(name, str) for name in by_name) or not integers or min(by_name.values(), default=0) < 0:
            raise ValueError(
                "first_layer must be an integer of at least 0, or one for each module, such as "
                '{"stages.0": 0, "stages.1": 8}'
            )
        return value

    @model_validator(mode="after")
    def _token_is_known(self) -> Self:
        if self.token is None and self.token_file is not None:
            token_in(self.token_file)
        return self

    @model_validator(mode="before")
    @classmethod
    def _nothing_misspelt(cls, given: Any) -> Any:
        refuse_misspelt()  # first, because names in lower case are read too, and their values may be wrong
        return given

    @model_validator(mode="before")
    @classmethod
    def _clip_takes_kernels(cls, given: dict[str, Any]) -> dict[str, Any]:
        clips = given.get("qk_clip", "never") != "never" and "attention" not in given
        return given | {"attention": "kernels"} if clips else given

    @model_validator(mode="after")
    def _ranks_agree(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} needs a world_size of at least {self.rank + 1}, got {self.world_size}")
        if not self.run and self.world_size > 1 and _launcher_run() is None:
            raise ValueError(
                f"{self.world_size} processes need one name for their run: pass run=... or set FORESHOCK_RUN on all"
            )
        return self


class AgentSettings(TypedDict, total=False):
    """Every field of AgentConfig as a keyword of `attach` and of the callbacks, so that editors complete it."""

    run: str
    labels: dict[str, str]
    url: str | None
    token: str | SecretStr | None
    token_file: str | Path | None
    rank: int
    world_size: int
    mirror: str | None
    policy: Policy
    mitigation: str
    switch_scope: SwitchScope
    replace_wrong_attention: bool
    save_on_warning: bool
    qk_clip: ClipWhen
    qk_clip_threshold: float
    numerics: Numerics
    attention: Served
    probe_rows: int
    sample_every_steps: int | None
    norms_every_steps: int
    detectors: DetectorConfig | dict[str, Any]
    first_layer: int | dict[str, int]
    first_head: int
    heads: dict[str, int]
    spool_directory: str | Path | None
    spool_bytes: int
    quiet: bool
    strict: bool


_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "FORESHOCK_RANK"),
    ("PMI_RANK", "PMI_SIZE", "FORESHOCK_RANK"),
)
"""For each launcher, the variables of rank and number of processes, and one that is set if these count the processes of
one run; the nearest launcher first. torchrun, DeepSpeed and Accelerate set all three for each process. The numbers of
mpirun may be those of many runs, unless FORESHOCK_RANK shows that a job scheduler numbered them too."""


def _of_the_nearest_launcher() -> dict[str, str]:
    """Return rank and number of processes from the launcher that started this process.

    These take precedence over FORESHOCK_RANK, because all processes of a node inherit the value that a job scheduler
    set for the launcher.
    """
    for names in _LAUNCHERS:
        if all(os.environ.get(name, "").isdecimal() for name in names):
            return {"FORESHOCK_RANK": os.environ[names[0]], "FORESHOCK_WORLD_SIZE": os.environ[names[1]]}
    return {}


def _is_ours(name: str, value: Any) -> bool:
    return name not in ("FORESHOCK_RANK", "FORESHOCK_WORLD_SIZE") or value.isdecimal()


_PLAIN_NAME: Final = "run-%Y%m%d-%H%M%S-"


def new_run_name(world_size: int = 1) -> str:
    """Return a default name of a run, such as run-20260102-030405-9f3a; for several processes, the launcher's name."""
    launched = _launcher_run() if world_size > 1 else None
    return launched or time.strftime(_PLAIN_NAME, time.gmtime()) + secrets.token_hex(2)


def _launcher_run() -> str | None:
    """Return the name of this run in torchrun or Slurm, which is the same on every rank and after a restart."""
    for launcher, variable in (("torchrun", "TORCHELASTIC_RUN_ID"), ("slurm", "SLURM_JOB_ID")):
        name = re.sub(r"[^A-Za-z0-9_.:-]", "-", os.environ.get(variable, ""))[:100]
        if name not in ("", "none"):  # "none" is torchrun's default
            return f"{launcher}-{name}"
    return None


def make_config(config: AgentConfig | None, overrides: dict[str, Any]) -> AgentConfig:
    """Return `config` with `overrides` applied, both validated. Raises ValueError with one sentence per mistake."""
    if config is not None and not isinstance(config, AgentConfig):
        raise ValueError(
            f"config must be an AgentConfig, got {type(config).__name__}; pass settings by name, as run=..."
        )
    given = config.model_dump(include=config.model_fields_set) if config is not None else {}
    try:
        return AgentConfig(**{**given, **overrides})
    except ValidationError as error:
        raise ValueError("; ".join(_sentence(dict(e)) for e in error.errors(include_input=False))) from None
    except SettingsError as error:  # raised for a variable whose setting is a dictionary
        example = 'FORESHOCK_LABELS={"team": "vision"}'
        raise ValueError(f"{error}: such a variable contains JSON, as {example}") from None


def _sentence(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        whose, fields = "the agent", AgentConfig.model_fields
        if why := why_removed(where):
            return f"{where} is no longer a setting: {why}"
        if error["loc"][0] == "detectors":
            whose, fields = "the detectors", DetectorConfig.model_fields
        return f"{where} is not a setting of {whose}; settings are {', '.join(fields)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, PyTorch, foreshock, transformers and triton, if installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "foreshock", "transformers", "triton"):
        try:
            found[package] = importlib.metadata.version(package)[:64]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
