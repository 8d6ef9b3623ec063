"""Variants: what differs between two runs of one recipe."""

from dataclasses import dataclass
from typing import Final, Literal

from foreshock.contract.modes import MODES
from foreshock.contract.wire import ModeName, Policy

Numerics = Literal["kernel", "paper", "float32"]
Backend = Literal["flash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What differs between two runs of one recipe."""

    name: str
    numerics: Numerics = "kernel"
    policy: Policy = "observe"
    mode: ModeName = "plain"
    """The mode of every head from the first step on."""
    key_bias: bool = True
    """False takes the bias off the keys, which changes no probability."""
    backend: Backend | None = None
    """Attention is PyTorch's own, forced to this kernel, and watched by an agent with its default settings."""

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
        *(Variant(name=each.name.replace("_", "-"), mode=each.name) for each in MODES),
        Variant(name="flash-untreated", backend="flash"),
        Variant(name="flash-rescued", policy="auto", backend="flash"),
    )
}


def find_variant(name: str) -> Variant:
    """The variant of that name. Raises ValueError with the names that exist."""
    if name not in VARIANTS:
        raise ValueError(f"variant {name!r} does not exist; allowed are {', '.join(VARIANTS)}")
    return VARIANTS[name]
