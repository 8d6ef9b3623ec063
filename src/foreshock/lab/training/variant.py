"""Variants: what differs between two runs of one recipe. A variant is also made of the name of any mode."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from foreshock.contract.modes import MODES, is_mode
from foreshock.contract.orders import SwitchScope
from foreshock.contract.wire import ModeName, Policy
from foreshock.monitor.config import AgentConfig, ClipWhen

Numerics = Literal["kernel", "paper", "float32"]
Backend = Literal["flash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What differs between two runs of one recipe."""

    name: str
    numerics: Numerics = "kernel"
    policy: Policy = "observe"
    mitigation: ModeName = AgentConfig.model_fields["mitigation"].default
    """What the policy auto switches to."""
    switch_scope: SwitchScope = AgentConfig.model_fields["switch_scope"].default
    """Which heads it switches."""
    mode: ModeName = "plain"
    """The mode of every head from the first step on."""
    key_bias: bool = True
    """False takes the bias off the keys, which changes no probability."""
    backend: Backend | None = None
    """Attention is PyTorch's own, forced to this kernel, and watched by an agent with its default settings."""
    qk_clip: ClipWhen = "never"

    @property
    def cured(self) -> bool:
        """Whether something is done against a failure of rounding from the first step on."""
        return self.numerics == "float32" or self.mode != "plain" or not self.key_bias


UNTREATED = Variant(name="untreated")
CONTROL = Variant(name="control", numerics="float32")


def shown_name(name: str) -> str:
    """What people read for the variant of that name: the untreated one is the baseline (docs/glossary.md)."""
    return "baseline" if name == UNTREATED.name else name


VARIANTS: Final = {
    variant.name: variant
    for variant in (
        UNTREATED,
        Variant(name="rescued", policy="auto"),
        CONTROL,
        Variant(name="paper", numerics="paper"),
        Variant(name="paper-rescued", numerics="paper", policy="auto"),
        Variant(name="paper-no-key-bias", numerics="paper", key_bias=False),
        Variant(name="qk-clip", qk_clip="always"),
        Variant(name="qk-clip-warned", qk_clip="warned"),
        *(Variant(name=each.name.replace("_", "-"), mode=each.name) for each in MODES),
        Variant(name="flash-untreated", backend="flash"),
        Variant(name="flash-rescued", policy="auto", backend="flash"),
    )
}
_PREFIXES: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "rescued-all-": {"policy": "auto", "switch_scope": "model"},
    "rescued-": {"policy": "auto", "switch_scope": "head"},
}


def find_variant(name: str) -> Variant:
    """The variant of that name. A variant is also made of the name of any mode, with dashes, unions joined by +:
    "MODE" from the first step on and on every head, "rescued-MODE" once a head is warned about, "rescued-all-MODE" on
    every head at the first warning; each of these with "paper-" before it under the paper's numerics.

    Raises ValueError with the names that exist.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    for numerics, rest in (("kernel", name), ("paper", name.removeprefix("paper-"))):
        for prefix, settings in _PREFIXES.items():
            if rest.startswith(prefix) and is_mode(mode := rest.removeprefix(prefix).replace("-", "_")):
                field_name = "mitigation" if prefix else "mode"
                return Variant(name=name, **{"numerics": numerics, field_name: mode, **settings})
    raise ValueError(
        f"variant {name!r} does not exist; allowed are {', '.join(VARIANTS)}, modes joined by + such as "
        "exact-delta+paper-softmax, rescued-MODE, rescued-all-MODE, and each of these with paper- before it"
    )
