"""What a run measures only now and then: the newest sample of each process start that has it, and its value.

Most samples lack spectral norms, the entropy of sampled rows, what QK-Clip did and numbers that a training reports
rarely. /metrics shows the last known value of each, since a series that comes and goes draws dots and holds no alert.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, func, select, tuple_

from foreshock.contract.slots import Slot, Words, fitted
from foreshock.contract.wire import PER_HEAD, Sample
from foreshock.server.curves.merging import LIVE_SAMPLES, Axis, MergedSteps, merge
from foreshock.server.store.packing import SCALARS
from foreshock.server.store.schema import boots, samples

_ALWAYS: Final = ""
"""Under this name: the newest sample's step, and what every sample of the process start so far has held."""
_STATES: Final = "states"
_ENTROPY: Final = "entropy"
_ENTROPY_ROWS: Final = Slot.ENTROPY_ROWS
NORMS: Final = ("query_norm", "key_norm", "query_key_norm")
_STEPS_AT_ONCE: Final = 4096
_STARTS: Final = 4
"""Process starts of a rank, the newest first, in which a last measured value is looked for."""
Earlier = tuple[frozenset[str], list[Row[Any]]]
"""Arrays to be read, and samples in the fixed order."""


def with_sample(known: str | None, sample: Sample) -> str:
    """`boots.measured` after one more sample, in whatever order they come."""
    given = {name for name in (*PER_HEAD, *SCALARS) if getattr(sample, name) is not None}
    if sample.states is not None:
        words = fitted(sample.states.numpy())
        given |= {
            name for name, known in ((_STATES, _counted(words)), (_ENTROPY, words[:, _ENTROPY_ROWS])) if known.any()
        }
    steps: dict[str, Any] = json.loads(known) if known else {_ALWAYS: [sample.step, sorted(given)]}
    newest, always = steps[_ALWAYS]
    for name in given.symmetric_difference(always):
        steps[name] = max(steps.get(name, 0), sample.step if name in given else newest)
    steps[_ALWAYS] = [max(newest, sample.step), [name for name in always if name in given]]
    return json.dumps(steps, separators=(",", ":"))


def earlier_samples(
    connection: Connection, newest: Mapping[int, tuple[Axis, Collection[Row[Any]]]]
) -> dict[int, Earlier]:
    """Of each run, given with its newest reading, the other samples in which something was measured last."""
    recency = func.row_number().over(partition_by=(boots.c.run_id, boots.c.rank), order_by=boots.c.id.desc())
    columns = (boots.c.run_id, boots.c.id, boots.c.rank, boots.c.measured, boots.c.until_step, recency.label("recency"))
    known = select(*columns).where(boots.c.run_id.in_(newest), boots.c.measured.is_not(None)).subquery()
    last: dict[tuple[int, int, str], tuple[int, int]] = {}
    for boot in connection.execute(select(known).where(known.c.recency <= _STARTS)):
        for name, step in json.loads(boot.measured).items():
            if name != _ALWAYS and (boot.until_step is None or step <= boot.until_step):
                key = boot.run_id, boot.rank, name
                last[key] = max(last.get(key, (-1, 0)), (step, boot.id))
    names: defaultdict[int, set[str]] = defaultdict(set)
    wanted: dict[tuple[int, int], set[int]] = defaultdict(set)
    for (run_id, _, name), (step, boot_id) in last.items():
        if step != next(iter(newest[run_id][1])).step:
            names[run_id].add(name)
            wanted[run_id, step].add(boot_id)
    rows: dict[int, list[Row[Any]]] = {run_id: [] for run_id in names}
    places = sorted(wanted)
    for first in range(0, len(places), _STEPS_AT_ONCE):  # a statement holds so many numbers at most
        own = tuple_(samples.c.run_id, samples.c.step).in_(places[first : first + _STEPS_AT_ONCE])
        for row in connection.execute(LIVE_SAMPLES.where(own)):
            if row.boot_id in wanted[row.run_id, row.step]:
                rows[row.run_id].append(row)
    return {run_id: (_arrays(names[run_id]), found) for run_id, found in rows.items() if found}


def _arrays(names: set[str]) -> frozenset[str]:
    return frozenset({*(names & PER_HEAD.keys()), *((_STATES,) if names & {_STATES, _ENTROPY} else ())})


def _counted(words: Words) -> npt.NDArray[np.bool_]:
    """Of which heads any row was seen."""
    seen: npt.NDArray[np.bool_] = np.any(words[:, [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS]], axis=1)
    return seen


def _carry_states(reading: MergedSteps, old: Words, known: npt.NDArray[np.bool_]) -> None:
    words, counted = reading.words[-1], reading.counted[-1]
    lacking = known & ~(counted & _counted(words))
    words[lacking], counted[lacking] = old[lacking], True
    no_entropy = known & (words[:, _ENTROPY_ROWS] == 0)
    for slot in (Slot.ENTROPY_SUM, _ENTROPY_ROWS):
        words[no_entropy, slot] = old[no_entropy, slot]


def carry(axis: Axis, reading: MergedSteps, earlier: Earlier) -> int | None:
    """Fill what the newest step of a reading lacks with what was measured last; the step of the norms that it took."""
    names, rows = earlier
    known = merge(axis, rows, names)
    norms_step = None
    for at in reversed(range(len(known.steps))):
        for name in names - {_STATES}:
            now, then = reading.fields[name][-1], known.fields[name][at]
            lacking = np.isnan(now) & ~np.isnan(then)
            now[lacking] = then[lacking]
            if name in NORMS and norms_step is None and lacking.any():
                norms_step = int(known.steps[at])
        if _STATES in names:
            _carry_states(reading, known.words[at], known.counted[at])
        for name, given in known.given.items():
            if given[at] and not reading.given[name][-1]:
                reading.scalars[name][-1], reading.given[name][-1] = known.scalars[name][at], True
    return norms_step
