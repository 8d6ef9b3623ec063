"""How often the verdict on a switch is right, on every recorded run that was switched while it trained.

    python -P -m foreshock.lab.scoring.switch_verdicts [FOLDER]

Each head that had a warning is judged as the service does, 1,000 steps after the switch. The truth is the rest of the
recording, at least 1,000 steps more: a head went on growing if its largest |score| came to 512 there, or if its offset
ended a quarter above its size at the verdict and over the detectors' level of 3 nats.
"""

import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from foreshock.contract import wire
from foreshock.contract.decision import is_active
from foreshock.contract.metrics.catalog import BY_KEY
from foreshock.contract.slots import Floats, Words
from foreshock.contract.switch_verdict import POINTS, SIGNALS, growth_of
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import Trace, read_trace

STEPS: Final = 1000
_FAILED_SCORE: Final = 512.0
_LEVEL: Final = 3.0
_MORE: Final = 1.25


class Judged(NamedTuple):
    """The verdict on one head of a recording, and the truth."""

    trace: str
    head: wire.HeadRef
    warned: bool
    arrested: bool
    grew: bool


def judged(trace: Trace) -> list[Judged]:
    """Every head of a recording that was switched once, from step 1 on, and whose recording goes on long enough."""
    done = [one for one in trace.events if isinstance(one, wire.Switched) and one.outcome == "applied"]
    counted = [(sample.step, words) for sample in trace.samples if (words := sample.words()) is not None]
    if len(done) != 1 or not done[0].step or counted[-1][0] < (verdict_step := done[0].step + STEPS) + STEPS:
        return []
    steps, at = np.array([step for step, _ in counted]), done[0].step
    values = {key: _values(key, [words for _, words in counted]) for key in (*SIGNALS, "head.row_max_abs")}
    warned, windows = _warned(trace, at), ((at - STEPS, at), (at + 1, verdict_step))
    found = []
    for ref in done[0].heads:
        row = trace.heads.index(ref)
        growths = [growth_of(key, *(_points(steps, values[key][:, row], *side) for side in windows)) for key in SIGNALS]
        known = [growth for growth in growths if growth is not None]
        rest, offset = steps > verdict_step, np.abs(values["head.score_offset"][:, row])
        then = np.median(offset[(steps > verdict_step - STEPS // 3) & ~rest])
        end = np.median(offset[steps > steps[-1] - STEPS // 3])
        largest = np.nanmax(np.abs(values["head.row_max_abs"][rest, row]))
        grew = largest >= _FAILED_SCORE or end > max(_LEVEL, _MORE * then)
        if known:
            found.append(Judged(trace.path.name, ref, ref in warned, all(one.arrested for one in known), bool(grew)))
    return found


def _values(key: str, words: list[Words]) -> Floats:
    reading = BY_KEY[key].head
    assert reading is not None
    assert reading.read is not None
    return np.array([reading.read(one) for one in words], dtype=np.float64)


def _points(steps: Floats, values: Floats, first: int, last: int) -> list[float]:
    """The last value of each of POINTS parts of a window, as a curve of the service has them."""
    part = np.floor((steps - first) * POINTS / (last - first + 1))
    inside = (steps >= first) & (steps <= last) & (np.append(part[1:] != part[:-1], True) | (steps == steps[-1]))
    return [float(value) for value in values[inside]]


def _warned(trace: Trace, at: int) -> set[tuple[int | None, int | None]]:
    """Heads with a warning that was active at the switch, or came within the steps after it."""
    active: set[tuple[int | None, int | None]] = set()
    for verdict in verdicts(trace):
        ref = verdict.layer, verdict.head
        if verdict.step > at + STEPS:
            break
        if is_active(verdict):
            active.add(ref)
        elif verdict.step <= at and verdict.severity != "info":
            active.discard(ref)
    return active


def main(folder: Path) -> None:
    """Print the table."""
    found = [one for path in sorted(folder.rglob("*.trace.xz")) for one in judged(read_trace(path))]
    print(f"{len({one.trace for one in found})} recordings, {len(found)} switched heads")
    for words, own in (("with a warning", True), ("without", False)):
        counts = Counter((one.arrested, one.grew) for one in found if one.warned is own)
        missed, held, right, false = (counts[arrested, grew] for arrested, grew in product((True, False), repeat=2))
        print(f"heads {words}: {held + missed} verified, of which {missed} went on growing; "
              f"{false + right} not arrested, of which {false} did not")  # fmt: skip
    for one in found:
        if one.warned and one.arrested == one.grew:
            print(f"  wrong: {one.trace}, layer {one.head[0]} head {one.head[1]}, {one.arrested=}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parents[1] / "traces")
