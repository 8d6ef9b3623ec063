"""A note, which stands for nothing and opens no incident: heads whose largest score passed what is worth knowing."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.levels import SCORE

_LEVELS = BY_KEY["head.score_max"].levels
NOTED_SCORE: Final = 100.0 if _LEVELS is None or _LEVELS.watch is None else _LEVELS.watch
"""From where on boards and page mark a largest score; QK-Clip's usual threshold."""
_NAMED: Final = 4


class Notes:
    """Told when the first head passes, and whenever twice as many have: 1, 2, 4, 8 heads. A note for each head came 23
    to 80 times in 6,000 steps of GPT-2 small (lab/traces/paper). A run that is resumed goes on with the heads that
    passed before."""

    def __init__(self, heads: Sequence[wire.HeadRef]) -> None:
        self._heads: Final = heads
        self.noted: set[wire.HeadRef] = set()

    def of(self, step: int, largest: Floats, warned: Iterable[wire.Verdict]) -> wire.Verdict | None:
        """A note of the heads whose largest score [N] has come to `NOTED_SCORE` for the first time; None where none
        has, or not twice as many as were told of. A head that is warned about needs no note, nor one past a level."""
        noted = (largest >= NOTED_SCORE) & (largest < SCORE)
        passed = {self._heads[row]: float(largest[row]) for row in np.flatnonzero(noted).tolist()}
        silent = self.noted | {(each.layer, each.head) for each in warned}
        before = len(self.noted)
        self.noted |= passed.keys()
        new = [(head, score) for head, score in passed.items() if head not in silent]
        if not new or len(self.noted).bit_length() == before.bit_length():
            return None
        count = f", as those of {before} heads before" if before else ""
        named = ", ".join(f"layer {layer} head {head} ({score:.0f})" for (layer, head), score in new[:_NAMED])
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        return wire.Verdict(
            id=f"note-{step}",
            step=step,
            state="cleared",
            severity="info",
            cause="score growth",
            signal="score",
            evidence={"score": max(score for _, score in new)},
            sentence=f"Note: the largest score of {named}{more} passed {NOTED_SCORE:g} for the first time{count}. "
            "Healthy heads do so too; if it keeps growing, lower the learning rate or set qk_clip='warned'.",
        )
