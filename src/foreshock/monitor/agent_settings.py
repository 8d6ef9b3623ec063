"""The keywords of `attach` and of the callbacks, so that editors complete them: the fields of AgentConfig."""

from pathlib import Path
from typing import Any, TypedDict

from pydantic import SecretStr

from foreshock.contract.orders import SwitchScope
from foreshock.contract.wire import Policy
from foreshock.monitor.config import ClipWhen, Numerics, Served
from foreshock.monitor.detect.detectors import DetectorConfig


class AgentSettings(TypedDict, total=False):
    """Every field of AgentConfig, which explains them; docs/reference/settings.md lists them."""

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
    qk_clip_every_steps: int
    numerics: Numerics
    attention: Served
    probe_rows: int
    sample_every_steps: int
    sample_every_seconds: float
    norms_every_steps: int
    detectors: DetectorConfig | dict[str, Any]
    first_layer: int
    layers: dict[str, int]
    first_head: int
    heads: dict[str, int]
    spool_directory: str | Path | None
    spool_bytes: int
    quiet: bool
    strict: bool
