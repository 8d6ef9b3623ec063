"""The first answer to a failing run: is it attention, which head, is it this rounding or something else, what to do.

In the head that fails by rounding all scores of a row move together, with one sign over all rows: the part that
softmax cannot see, so that no exact gradient asks for it. Scores that only grew apart, as a learning rate that is too
high makes them, are another trouble, which no switch of numerics mends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.anatomy import Examined
from foreshock.lab.diagnosis.weights import some

_SHIFTED_NATS: Final = 10.0
"""A head's scores lie away as a whole from here on: three times the level from which detectors look at a drift."""
_ONE_SIGN: Final = 0.75
"""Least mean over RMS of the common part. Drifting heads of fast-biases had 0.70 to 0.97, heads that a learning rate of
high-rate blew up 0.17 to 0.81, those with the other sign of offset; healthy heads with a large RMS have 0.1."""
_LARGE_SCORE: Final = 256.0
"""As a critical warning: rounding q and k to bf16 moves a score of this size by half."""
_GROWTH: Final = 1.2
_ELSEWHERE: Final = "Look at the learning rate, the data and the optimizer first."
_AGAIN: Final = (
    f"Resume from the last checkpoint before the growth with every head on {DEFAULT_MITIGATION}: "
    f'agent.set_mode(agent.modes(), "{DEFAULT_MITIGATION}", reason="diagnosis") before the first step.'
)
_CONFIRM: Final = (
    "To confirm, resume twice from one checkpoint, without and with that line; save both after some hundred steps, "
    "and diagnose --state START --state WITHOUT --state WITH. It is rounding if only WITH stays where START is."
)


@dataclass(slots=True)
class Vitals:
    """What running one checkpoint showed beside its attention."""

    origin: str
    bad_weights: list[str] = field(default_factory=list)
    """names of the parameters with values that are not finite"""
    broken: dict[int, str] = field(default_factory=dict)
    """layer to what was not finite there"""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadState:
    """One head of one checkpoint, over its batches."""

    origin: str
    layer: int
    head: int
    shift: float
    """nats by which all scores lie away together; 0 where the mean of a row is that of some keys only"""
    largest: float
    """largest |score|"""
    output_error: float

    @property
    def apart(self) -> float:
        """Largest |score| less what all scores share."""
        return self.largest - abs(self.shift)

    def __str__(self) -> str:
        return f"layer {self.layer} head {self.head}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is the matter: `kind` for programs, a sentence or two and advice for people, and the head to look at."""

    kind: str
    """not finite, out of range, rounding, shifted, settled, came back, float32, sharp or other"""
    words: str
    advice: list[str]
    head: tuple[int, int] | None = None


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
            for head in range(len(offset)):
                together = common[head] * offset[head] > 0 and abs(common[head]) >= _ONE_SIGN * rms[head]
                shift = min(common[head], offset[head], key=abs) if together else 0.0
                states.append(
                    HeadState(
                        origin=origin,
                        layer=layer,
                        head=head,
                        shift=shift,
                        largest=largest[head],
                        output_error=error[head],
                    )
                )
    return states


def judge(vitals: Sequence[Vitals], examined: dict[int, list[Examined]]) -> Verdict:
    """The verdict on the last checkpoint, beside the others where there are several."""
    last = vitals[-1]
    if last.bad_weights:
        words = (
            f"It cannot be judged from {last.origin}: {len(last.bad_weights)} of its parameters hold values that are "
            f"not finite, {some(last.bad_weights)} among them."
        )
        return Verdict(
            "not finite", words, ["Give the last checkpoint whose weights are finite, and one from well before."]
        )
    if last.broken:
        layer, what = min(last.broken.items())
        words = (
            f"The weights of {last.origin} are finite, but {what} in layer {layer}, the first of {len(last.broken)}."
        )
        return Verdict(
            "out of range", words, ["Look at the learning rate and at what comes before that layer; go back further."]
        )
    states = head_states(examined)
    here = [state for state in states if state.origin == last.origin]
    shifted = sorted((s for s in here if abs(s.shift) >= _SHIFTED_NATS), key=lambda s: -abs(s.shift))
    sharp = sorted((s for s in here if s.apart >= _LARGE_SCORE), key=lambda s: -s.apart)
    if shifted and not (sharp and sharp[0].apart > abs(shifted[0].shift)):
        return _of_a_shift(shifted, states, next(iter(examined.values()))[-1].as_run)
    if sharp:
        worst = sharp[0]
        words = (
            f"Attention, but something else than this rounding: scores of {worst} reach {worst.largest:.0f} and grew "
            f"apart from each other; they share {worst.shift:+.1f} nats.{_others(sharp[1:])}"
        )
        advice = f"{_ELSEWHERE} A norm of queries and keys, or a cap on the scores, holds them; a switch of numerics "
        return Verdict("sharp", words, [advice + "would not help."], (worst.layer, worst.head))
    top, off = max(here, key=lambda s: s.largest), max(here, key=lambda s: s.output_error)
    words = (
        f"Not this rounding: no head has large scores, or scores that moved as a whole. The largest |score| of "
        f"{len(here)} heads is {top.largest:.1f} ({top}). Attention is {off.output_error:.2%} off its float64 truth at "
        f"most ({off}): two implementations may differ by as much."
    )
    return Verdict("other", words, [f"Run the same steps with attention in float32; if they fail too: {_ELSEWHERE}"])


def _of_a_shift(shifted: Sequence[HeadState], states: Sequence[HeadState], as_run: str) -> Verdict:
    worst = shifted[0]
    shift = f"the scores of {worst} lie {worst.shift:+.1f} nats away as a whole.{_others(shifted[1:])}"
    course = [state for state in states if (state.layer, state.head) == (worst.layer, worst.head)]
    sizes = [abs(each.shift) for each in course]
    shifts = ", ".join(f"{each.shift:+.1f} nats in {each.origin}" for each in course)
    if as_run in ("float32", "float64"):
        kind = "float32"
        words = (
            f"Attention is shifted, but as it was run here not by this rounding: it runs in {as_run}. Still, {shift}"
        )
        advice = ["Run the model under the autocast, or in the dtype, of your training, and diagnose again."]
    elif len(course) == 1:
        kind = "shifted"
        words = f"Attention, with the mark of this rounding: {shift} One checkpoint cannot say whether it grows."
        advice = [
            f"Add an earlier checkpoint: --state EARLIER --state THIS. If the shift does not grow: {_ELSEWHERE}",
            _AGAIN,
            _CONFIRM,
        ]
    elif sizes[-1] >= _GROWTH * sizes[0]:
        kind, advice = "rounding", [_AGAIN, _CONFIRM]
        words = f"Attention, most likely this rounding: {shift} It grew: {shifts}."
    elif max(sizes) >= _GROWTH * sizes[0]:
        kind, advice = "came back", [_AGAIN, _ELSEWHERE]
        words = (
            f"Attention: {shift} It grew and is back: {shifts}. If the last one was trained with the switch and the "
            "one before without, it is this rounding."
        )
    else:
        kind, advice = "settled", [_ELSEWHERE]
        words = f"Attention is shifted, but does not grow: {shifts}. Still, {shift} Models may carry a shift unharmed."
    return Verdict(kind, words, advice, (worst.layer, worst.head))


def _others(heads: Iterable[HeadState]) -> str:
    named = list(map(str, heads))
    return f" So do those of {some(named)}." if named else ""
