"""The variants in which a recipe can be run."""

from dataclasses import dataclass
from typing import Final, Literal

from foreshock.contract.modes import MODES
from foreshock.contract.wire import ModeName, Policy

Numerics = Literal["kernel", "paper", "float32"]
Backend = Literal["flash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a recipe; all variants start from the same weights and see the same batches."""

    name: str
    numerics: Numerics = "kernel"
    policy: Policy = "observe"
    mode: ModeName = "plain"
    """Mode of all heads from the first step."""
    key_bias: bool = True
    """False removes the bias of the keys, which does not change the exact probabilities."""
    backend: Backend | None = None
    """Force PyTorch's native attention to this kernel, watched with the default settings of the agent."""

    @property
    def cured(self) -> bool:
        """Whether the variant prevents a failure by rounding from the first step."""
        return self.numerics == "float32" or self.mode != "plain" or not self.key_bias


UNTREATED = Variant(name="untreated")
CONTROL = Variant(name="control", numerics="float32")


def shown_name(name: str) -> str:
    """Return the display name of a variant: `untreated` is called the baseline (docs/glossary.md)."""
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
    """Return the variant with this name. Raises ValueError, with the allowed names, if it does not exist."""
    if name not in VARIANTS:
        raise ValueError(f"variant {name!r} does not exist; allowed are {', '.join(VARIANTS)}")
    return VARIANTS[name]
