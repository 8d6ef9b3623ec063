"""What the demo trains, and in words what that starts from."""

from dataclasses import dataclass, field, replace
from typing import Final

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.contract.wire import ModeName
from foreshock.lab.training.arm import CONTROL, RESCUED, UNTREATED, Arm, Numerics
from foreshock.lab.training.recipes import Recipe, find_recipe
from foreshock.monitor.detect.detectors import DetectorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """One failure beside what would have been without it."""

    recipe: Recipe
    starts_from: str
    """What is not as in most people's training, in a sentence or two."""
    seed: int
    """Of weights and batches, unless another is named."""
    numerics: Numerics = "kernel"
    """How attention is rounded where it is."""
    mitigation: ModeName = DEFAULT_MITIGATION
    """What the agent switches to."""
    detectors: DetectorConfig = field(default_factory=DetectorConfig)
    """When the agent warns."""

    @property
    def untreated(self) -> Arm:
        """Left alone."""
        return replace(UNTREATED, numerics=self.numerics)

    @property
    def rescued(self) -> Arm:
        """The same until its warning; its agent then switches."""
        return replace(RESCUED, numerics=self.numerics, mitigation=self.mitigation)

    @property
    def control(self) -> Arm:
        """Attention in float32: the same mathematics, nothing rounded to 16 bits."""
        return CONTROL


_ROUNDS_AS_THE_PAPER: Final = (
    "It starts from ordinary random weights. What is not ordinary: attention rounds as in the paper's reference "
    "(scores, row sums and output in bf16). A key bias adds one number to all scores of a row, which softmax cannot "
    "see: in exact arithmetic it would never move. Nothing fails in minutes on a CPU, so the agent is told to warn of "
    "a drift however far off the quality loss is (horizon_lives); by default it would wait."
)
_HOWEVER_FAR: Final = DetectorConfig(horizon_lives=None)
ON_CPU: Final = Show(
    recipe=find_recipe("key-bias-small"),
    starts_from=_ROUNDS_AS_THE_PAPER,
    seed=8,
    numerics="paper",
    mitigation="centred_keys",
    detectors=_HOWEVER_FAR,
)
"""Anywhere."""
ON_GPU: Final = Show(
    recipe=find_recipe("shared-values"),
    starts_from="It starts from values that share a large part; of three seeds one explodes: 2, which is shown.",
    seed=2,
)
"""Where there is a GPU."""
SHOWS: Final = {
    show.recipe.name: show
    for show in (
        ON_CPU,
        Show(
            recipe=find_recipe("fast-biases"),
            starts_from=f"{_ROUNDS_AS_THE_PAPER} And biases learn several times as fast as matrices.",
            seed=8,
            numerics="paper",
            mitigation="centred_keys",
            detectors=_HOWEVER_FAR,
        ),
        ON_GPU,
    )
}
"""What may be measured, by recipe; the first is the CPU's, the second may take its place once it is measured."""
