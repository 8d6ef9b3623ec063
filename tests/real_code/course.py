"""What came of one training."""

from dataclasses import dataclass, field

from tests.real_code.truth import CallScores
from torch import Tensor

from foreshock.contract import wire


@dataclass(slots=True)
class Course:
    """What one training was. Weights and the random state are those after SWITCH_AT steps."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    random_state: Tensor | None = None
    scores: dict[int, dict[str, CallScores]] = field(default_factory=dict)
    """Without foreshock: by step and module what float64 makes of its calls."""
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """With it: the weights whose norms the sample of a step reports."""
    layers: list[wire.Layer] = field(default_factory=list)
    samples: list[wire.Sample] = field(default_factory=list)
    answers: list[wire.Switched] = field(default_factory=list)
    refused_at_once: str = ""
    """What `set_mode` raised."""
    faults: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Everything that foreshock printed or logged."""
    ended: str = ""
    """Why the training ended before its last step."""
