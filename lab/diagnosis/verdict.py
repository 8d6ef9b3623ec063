"""The first answer to a failing run: is it attention, which head, is it this rounding or something else, what to do.

In the head that fails by rounding all scores of a row move together, with one sign over all rows: the part that
softmax cannot see, so that no exact gradient asks for it. Scores that only grew apart, as a learning rate that is too
high makes them, are another trouble, which no switch of numerics mends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.anatomy import Examined
from foreshock.lab.diagnosis.names import some

_SHIFTED_NATS: Final = 10.0
"""A head's scores lie away as a whole from here on: three times the level from which detectors look at a drift."""
_ONE_SIGN: Final = 0.75
"""Least mean over RMS of the common part. Drifting heads of fast-biases had 0.70 to 0.97, heads that a learning rate of
high-rate blew up 0.17 to 0.81, those with the other sign of offset; healthy heads with a large RMS have 0.1."""
_LARGE_SCORE: Final = 256.0
"""As a critical warning: rounding q and k to bf16 moves such a score by half."""
_GROWTH: Final = 1.2


@dataclass(slots=True)
class Vitals:
    """What running one checkpoint showed beside its attention."""

    origin: str
    losses: list[float] = field(default_factory=list)
    bad_weights: list[str] = field(default_factory=list)
    """names of the parameters with values that are not finite"""
    broken: dict[int, str] = field(default_factory=dict)
    """layer to what was not finite there"""
    notes: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean over the batches; NaN if one of them was not finite."""
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadState:
    """One head of one checkpoint, over its batches."""

    origin: str
    layer: int
    head: int
    common: float
    """nats, the mean score of a row, mean over rows"""
    common_rms: float
    offset: float
    largest: float
    output_error: float

    @property
    def shift(self) -> float:
        """By how much all scores lie away together; 0 where the mean of a row is that of some keys only."""
        if self.common * self.offset <= 0 or abs(self.common) < _ONE_SIGN * self.common_rms:
            return 0.0
        return min(self.common, self.offset, key=abs)

    @property
    def apart(self) -> float:
        """Largest |score| less what all scores share."""
        return self.largest - abs(self.shift)

    def __str__(self) -> str:
        return f"layer {self.layer} head {self.head}"


def head_states(examined: dict[int, list[Examined]]) -> list[HeadState]:
    """Every head of every checkpoint, in the order of the checkpoints."""
    states = []
    for layer, batches in sorted(examined.items()):
        for origin in dict.fromkeys(each.origin for each in batches):
            own = [each for each in batches if each.origin == origin]
            common, rms, offset, error = (
                torch.stack([getattr(each, name) for each in own]).mean(0).tolist()
                for name in ("common_score", "common_rms", "offset", "output_error")
            )
            largest = torch.stack([each.largest_score for each in own]).amax(0).tolist()
            states += [
                HeadState(
                    origin=origin, layer=layer, head=head, common=common[head], common_rms=rms[head],
                    offset=offset[head], largest=largest[head], output_error=error[head],
                )
                for head in range(len(offset))
            ]  # fmt: skip
    return states


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is the matter: `kind` for programs, sentences for people, and the head to look at first."""

    kind: str
    """not finite, out of range, rounding, shifted, settled, came back, float32, sharp or other"""
    words: list[str]
    advice: list[str]
    head: tuple[int, int] | None = None


def judge(vitals: Sequence[Vitals], examined: dict[int, list[Examined]]) -> Verdict:
    """The verdict on the last checkpoint, beside the others where there are several."""
    last = vitals[-1]
    if last.bad_weights:
        return Verdict(
            "not finite",
            [
                f"It cannot be told from {last.origin}: {len(last.bad_weights)} of its parameters hold values that are "
                f"not finite, {some(last.bad_weights)} among them. What made them has spread since."
            ],
            ["Give the last checkpoint whose weights are finite, and one from well before."],
        )
    if last.broken:
        layer, what = min(last.broken.items())
        return Verdict(
            "out of range",
            [
                f"The weights of {last.origin} are finite, but {what} in layer {layer}, the first of "
                f"{len(last.broken)}. Values this far out of range are no drift of rounding any more."
            ],
            ["Look at the learning rate and at what comes before that layer; go back to an earlier checkpoint."],
        )
    states = head_states(examined)
    here = [state for state in states if state.origin == last.origin]
    shifted = sorted((s for s in here if abs(s.shift) >= _SHIFTED_NATS), key=lambda s: -abs(s.shift))
    sharp = sorted((s for s in here if s.apart >= _LARGE_SCORE), key=lambda s: -s.apart)
    if shifted and not (sharp and sharp[0].apart > abs(shifted[0].shift)):
        return _of_a_shift(shifted, states, next(iter(examined.values()))[-1].as_run)
    return _of_sharp_scores(sharp) if sharp else _of_neither(here, last.loss)


def _of_sharp_scores(sharp: Sequence[HeadState]) -> Verdict:
    worst = sharp[0]
    return Verdict(
        "sharp",
        [
            f"Attention, but something else than this rounding: scores of {worst} reach {worst.largest:.0f}. They grew "
            f"apart from each other, which softmax sees; they share {worst.shift:+.1f} nats."
            + _others(sharp[1:], "As large are those of")
        ],
        [
            "Look at the learning rate, its warm-up and the data first. A norm of queries and keys, or a cap on the "
            "scores, holds them; a switch of numerics would not help."
        ],
        (worst.layer, worst.head),
    )


def _of_neither(here: Sequence[HeadState], loss: float) -> Verdict:
    top, common = max(here, key=lambda s: s.largest), max(here, key=lambda s: abs(s.common))
    error = max(here, key=lambda s: s.output_error)
    return Verdict(
        "other",
        [
            f"Not this rounding: no head has large scores, or scores that moved as a whole. Of {len(here)} heads in "
            f"{len({s.layer for s in here})} layers the largest |score| is {top.largest:.1f} ({top}), and the largest "
            f"common part {common.common:+.1f} nats ({common}). If the loss ({loss:.3f} here) is bad, its cause is "
            "another."
        ],
        [
            "Run the same steps with attention in float32: if they fail too, look at the learning rate, the data and "
            f"the optimizer. Attention here is {error.output_error:.2%} off its float64 truth at most ({error}): two "
            "implementations may differ by as much."
        ],
    )


def _of_a_shift(shifted: Sequence[HeadState], states: Sequence[HeadState], as_run: str) -> Verdict:
    worst = shifted[0]
    name = (worst.layer, worst.head)
    said = (
        f"the scores of {worst} lie {worst.shift:+.1f} nats away as a whole, in most rows to one side. Softmax does "
        "not see this part, and exact gradients do not feed it." + _others(shifted[1:], "Others are shifted too:")
    )
    course = [state for state in states if (state.layer, state.head) == name]
    sizes = [abs(each.shift) for each in course]
    told = ", ".join(f"{each.shift:+.1f} nats in {each.origin}" for each in course)
    elsewhere = "Look at the learning rate, the data and the optimizer first."
    again = (
        f"Resume from the last checkpoint before the growth with every head on {DEFAULT_MITIGATION}: "
        f'agent.set_mode(agent.modes(), "{DEFAULT_MITIGATION}", reason="diagnosis") before the first step.'
    )
    confirm = (
        "To confirm, resume twice from one checkpoint, without and with that line; save both after some hundred steps, "
        "and diagnose --state START --state WITHOUT --state WITH. It is rounding if only WITH stays where START is."
    )
    if as_run in ("float32", "float64"):
        return Verdict(
            "float32",
            [f"Attention is shifted, but as it was run here not by this rounding: it runs in {as_run}. Still, {said}"],
            ["Run the model under the autocast, or in the dtype, of your training, and diagnose again."],
            name,
        )
    if len(course) == 1:
        return Verdict(
            "shifted",
            [f"Attention, with the mark of this rounding: {said} One checkpoint cannot say whether it grows."],
            [
                f"Add an earlier checkpoint: --state EARLIER --state THIS. If the shift does not grow: {elsewhere}",
                again,
                confirm,
            ],
            name,
        )
    if sizes[-1] >= _GROWTH * sizes[0]:
        return Verdict(
            "rounding", [f"Attention, most likely this rounding: {said} It grew: {told}."], [again, confirm], name
        )
    if max(sizes) >= _GROWTH * sizes[0]:
        return Verdict(
            "came back",
            [
                f"Attention: {said} It grew and is back: {told}. If the last one was trained with the switch and the "
                "one before without, it is this rounding; otherwise the head came back by itself."
            ],
            [again, elsewhere],
            name,
        )
    return Verdict(
        "settled",
        [f"Attention is shifted, but does not grow: {told}. Still, {said} Models may carry a shift unharmed."],
        [elsewhere],
        name,
    )


def _others(heads: Sequence[HeadState], begin: str) -> str:
    return f" {begin} {some([str(head) for head in heads])}." if heads else ""
