"""What the demo trains, and in words what that starts from."""

from dataclasses import dataclass, replace
from typing import Final

from foreshock.lab.training.arm import CONTROL, RESCUED, UNTREATED, Arm, Numerics
from foreshock.lab.training.recipes import Recipe, find_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """One failure beside what would have been without it. The agent that watches has its shipped settings."""

    recipe: Recipe
    starts_from: str
    """What is not as in most people's training, in a sentence or two."""
    seed: int
    """Of weights and batches, unless another is named."""
    numerics: Numerics = "kernel"
    """How attention is rounded where it is."""
    without: Arm = CONTROL
    """The same without what makes it fail."""
    without_is: str = "the same with attention in float32"

    @property
    def untreated(self) -> Arm:
        """Left alone."""
        return replace(UNTREATED, numerics=self.numerics)

    @property
    def rescued(self) -> Arm:
        """The same until its warning; its agent then switches."""
        return replace(RESCUED, numerics=self.numerics)

    @property
    def control(self) -> Arm:
        """What the untreated arm is held against."""
        return self.without if self.without == CONTROL else replace(self.without, numerics=self.numerics)


NO_KEY_BIAS: Final = Arm(name="no-key-bias", model={"key_bias": False})
_WITHOUT_ITS_BIAS: Final = "the same, and rounded the same, with no bias on its keys"
_ROUNDS_AS_THE_PAPER: Final = (
    "One thing is as on no GPU: attention rounds as in the paper's reference, where scores, row sums and output are in "
    "BF16. It drifts sooner so; with the rounding of GPU kernels the warning comes thousands of steps later."
)
ON_CPU: Final = Show(
    recipe=find_recipe("key-bias-small"),
    starts_from=_ROUNDS_AS_THE_PAPER,
    seed=8,
    numerics="paper",
    without=NO_KEY_BIAS,
    without_is=_WITHOUT_ITS_BIAS,
)
"""Anywhere."""
ON_GPU: Final = Show(
    recipe=find_recipe("shared-values"),
    starts_from="It starts from values that share a large part; of three seeds one explodes: 2, which is shown.",
    seed=2,
)
"""Where there is a GPU."""
