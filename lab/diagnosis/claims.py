"""The paper's claims one by one, as numbers from recorded runs and from checkpoints, and whether each one holds.

A claim is met by a run when a stated number passes a stated bound; every arm says in how many of its seeds. Where the
claim speaks of a head, it is the one that drifted farthest in that run.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Floats
from foreshock.lab.diagnosis.anatomy import Examined
from foreshock.lab.diagnosis.examination import checkpoint_run, examine_patient, lab_patient
from foreshock.lab.diagnosis.head_anatomy import HeadAnatomy, head_anatomy
from foreshock.lab.recording.history import History, recorded
from foreshock.lab.recording.trace import read_trace

Excess = Callable[[Floats, Floats], npt.NDArray[np.bool_]]
"""Whether a run's values are off its twin's, both [T]."""
_LAST: Final = 8
"""Blocks of steps, of about a hundred, that make the end of a run."""
_STAYS: Final = 3
"""Blocks in a row that a signal must be off its twin."""


@dataclass(slots=True)
class Run:
    """One arm and seed of a recipe: its trace, what its checkpoints say by layer, or both."""

    recipe: str
    arm: str
    seed: str
    history: History | None = None
    exact: bool = False
    """delta was exact in every head from the first step on"""
    branched: bool = False
    """it began as another run's checkpoint"""
    examined: dict[int, list[Examined]] = field(default_factory=lambda: defaultdict(list))
    _anatomy: HeadAnatomy | None = None

    @property
    def head(self) -> tuple[int, int] | None:
        """The head whose offset is largest at the end."""
        if self.history is not None:
            history = self.history
            return max(history.heads, key=lambda head: abs(_end(history, "head.score_offset", head)))
        offsets = {
            (layer, head): abs(float(offset))
            for layer, batches in self.examined.items()
            for head, offset in enumerate(torch.stack([each.offset for each in batches]).mean(0))
        }
        return max(offsets, key=lambda head: offsets[head], default=None)

    def anatomy(self) -> HeadAnatomy | None:
        """The tensors of that head over all checkpoints; None without any."""
        head = self.head
        if self._anatomy is None and head is not None and head[0] in self.examined:
            self._anatomy = head_anatomy(*head, self.examined[head[0]])
        return self._anatomy


def gather(paths: Iterable[Path], batches: int) -> list[Run]:
    """Traces (.gz) and laboratory checkpoints (other files), joined by recipe, arm and seed.

    Every checkpoint is run on `batches` batches. Raises ValueError for a file that is neither.
    """
    runs: dict[tuple[str, str, str], Run] = {}
    for path in sorted(paths):
        if path.name.endswith(".gz"):
            trace = read_trace(path)
            key = (str(trace.header["recipe"]), str(trace.header.get("arm", "?")), str(trace.header.get("seed", "?")))
            run = runs.setdefault(key, Run(*key))
            run.history = recorded(trace)
            modes = [sample.modes.numpy() for sample in trace.samples if sample.modes is not None]
            run.branched = trace.samples[0].since_step > 0
            run.exact = not run.branched and bool(modes) and all((each & Mode.EXACT_DELTA).all() for each in modes)
        else:
            recipe, arm, seed = checkpoint_run(path)
            key = recipe.name, arm.name, str(seed)
            with lab_patient(path) as patient:
                for layer, measured in examine_patient(patient, batches, None)[1].items():
                    runs.setdefault(key, Run(*key)).examined[layer] += measured
    return list(runs.values())


@dataclass(frozen=True, slots=True)
class Claim:
    """One number for one claim."""

    claim: str
    number: str
    """what is measured"""
    bound: str
    """when the claim is met"""
    measure: Callable[[Run, Sequence[Run]], float | None]
    """the number of a run, given all runs; None where there is nothing to measure it by"""
    met: Callable[[float], bool]


def _end(history: History, metric: str, head: tuple[int, int], until: float = np.inf) -> float:
    """The mean of the last blocks before step `until`."""
    steps, values = history.blocks(metric, head)
    values = values[steps <= until]
    return float(values[-_LAST:].mean()) if len(values) else 0.0


def _twin(run: Run, runs: Sequence[Run], fits: Callable[[Run], bool]) -> Run | None:
    of_seed = (other for other in runs if (other.recipe, other.seed) == (run.recipe, run.seed) and other is not run)
    return next((other for other in of_seed if other.history is not None and fits(other)), None)


def _control(run: Run, runs: Sequence[Run]) -> Run | None:
    return _twin(run, runs, lambda other: other.history is not None and other.history.numerics == "float32")


def _largest_offset(history: History, until: float) -> float:
    return max(abs(_end(history, "head.score_offset", head, until)) for head in history.heads)


def _taken_by_exact_delta(run: Run, runs: Sequence[Run]) -> float | None:
    if run.history is None or run.exact or run.branched:
        return None
    numerics = run.history.numerics
    twin = _twin(run, runs, lambda each: each.exact and each.history is not None and each.history.numerics == numerics)
    if twin is None or twin.history is None:
        return None
    until = min(run.history.steps[-1], twin.history.steps[-1])  # of a run that was cut short, the common part
    return 1 - _largest_offset(twin.history, until) / _largest_offset(run.history, until)


def first_off(run: Run, control: Run, metric: str, excess: Excess) -> float | None:
    """The step from which the run's head is off its twin for some blocks; None when it never is."""
    assert run.history is not None
    assert control.history is not None
    assert run.head is not None
    steps, values = run.history.blocks(metric, run.head)
    other_steps, others = control.history.blocks(metric, run.head)
    if not len(others):
        return None
    off = excess(values, np.interp(steps, other_steps, others))
    for place in range(len(off) - _STAYS + 1):
        if off[place : place + _STAYS].all():
            return float(steps[place])
    return None


def _steps_of(metric: str, excess: Excess) -> Callable[[Run, Sequence[Run]], float | None]:
    def measure(run: Run, runs: Sequence[Run]) -> float | None:
        control = _control(run, runs)
        if run.history is None or control is None or run.history.numerics == "float32":
            return None
        step = first_off(run, control, metric, excess)
        return np.inf if step is None else step

    return measure


_offset_off = _steps_of("head.score_offset", lambda own, twin: np.abs(own) > np.abs(twin) + 2.0)
_ties_off = _steps_of("head.tied_rows_bf16", lambda own, twin: own > np.maximum(1.5 * twin, twin + 0.02))
_norm_off = _steps_of("head.query_norm", lambda own, twin: own > 1.25 * twin)


def _lead(run: Run, runs: Sequence[Run]) -> float | None:
    offset, ties = _offset_off(run, runs), _ties_off(run, runs)
    if offset is None or ties is None:
        return None
    return -np.inf if ties == np.inf else offset - ties


def _bias(run: Run, runs: Sequence[Run]) -> float | None:
    if run.history is None or run.head is None:
        return None
    shares = run.history.blocks("head.delta_bias", run.head)[1]
    return float(shares.mean() / (shares.std() / np.sqrt(len(shares)))) if len(shares) > 1 else None


def _norm_over_others(run: Run, _: Sequence[Run]) -> float | None:
    if run.history is None or run.head is None:
        return None
    norms = {head: _end(run.history, "head.query_norm", head) for head in run.history.heads}
    others = statistics.median(norm for head, norm in norms.items() if head != run.head)
    return norms[run.head] / others if others > 0 else None


def _of_tensors(read: Callable[[HeadAnatomy], float | None]) -> Callable[[Run, Sequence[Run]], float | None]:
    def measure(run: Run, _: Sequence[Run]) -> float | None:
        anatomy = run.anatomy()
        return None if anatomy is None else read(anatomy)

    return measure


_SOURCE: Final = "delta is the source"
_SEVERAL: Final = "several maxima lead"
_SIGNED: Final = "the bias is one-signed, upwards"
_ALIKE: Final = "similar low-rank directions add up"
_FEW: Final = "W_Q of a few heads"

CLAIMS: Final = (
    Claim("a head drifts", "largest final offset of a head, nats", ">= 3",
          lambda run, _: None if run.history is None else _largest_offset(run.history, np.inf), lambda x: x >= 3),
    Claim(_SOURCE, "share of the largest final offset that is gone with exact delta from step 1", ">= 0.5",
          _taken_by_exact_delta, lambda x: x >= 0.5),
    Claim(_SOURCE, "share of dW_Q's squared error that is gone with exact delta, one step", ">= 0.5",
          _of_tensors(lambda a: a.delta_share_of_weight_error), lambda x: x >= 0.5),
    Claim(_SOURCE, "share of the squared sum of dK over keys (zero in truth) that is gone with it, one step", ">= 0.5",
          _of_tensors(lambda a: a.delta_share_of_key_shift), lambda x: x >= 0.5),
    Claim(_SOURCE, "descent along the sum of dK moves all keys further along their mean, standard errors over batches",
          ">= 3", _of_tensors(lambda a: a.push_plain), lambda x: x >= 3),
    Claim(_SOURCE, "the same with exact delta", "< 3", _of_tensors(lambda a: a.push_exact), lambda x: x < 3),
    Claim(_SEVERAL, "steps from rows with several bf16 maxima leaving the float32 twin to the offset leaving it", "> 0",
          _lead, lambda x: x > 0),
    Claim(_SEVERAL, "share of the size of delta's error in rows with several P = 1", ">= 0.5",
          _of_tensors(lambda a: a.tied_share_of_error), lambda x: x >= 0.5),
    Claim(_SEVERAL, "O rounded away from zero in those rows, share of its error's size", "> 0",
          _of_tensors(lambda a: a.outward_tied), lambda x: x > 0),
    Claim(_SIGNED, "delta_lp - delta_hp over the run, standard errors", ">= 3", _bias, lambda x: x >= 3),
    Claim(_SIGNED, "the same in the batches of the checkpoints", ">= 3", _of_tensors(lambda a: a.bias_z),
          lambda x: x >= 3),
    Claim(_ALIKE, "mean cosine between (PK)[T]^T X[T] of tokens of one step", ">= 0.5",
          _of_tensors(lambda a: a.similarity), lambda x: x >= 0.5),
    Claim(_ALIKE, "the same between steps", ">= 0.5", _of_tensors(lambda a: a.similarity_across), lambda x: x >= 0.5),
    Claim(_ALIKE, "mean cosine between rows of PK alone", ">= 0.5",
          _of_tensors(lambda a: a.similarity_mixed_keys), lambda x: x >= 0.5),
    Claim(_ALIKE, "share of the summed error of dW_Q in one direction", ">= 0.5",
          _of_tensors(lambda a: a.weight_error_rank_one), lambda x: x >= 0.5),
    Claim(_ALIKE, "squared sum of dW_Q's errors of all batches, over that of unrelated errors", ">= 2",
          _of_tensors(lambda a: a.weight_coherence_plain), lambda x: x >= 2),
    Claim(_FEW, "final W_Q norm over the median of the other heads", ">= 1.5", _norm_over_others, lambda x: x >= 1.5),
    Claim(_FEW, "step at which W_Q's norm leaves its float32 twin (1.25 times)", "finite",
          _norm_off, lambda x: x < np.inf),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A claim's number over the seeds of one arm."""

    values: list[float]
    met: int

    def __str__(self) -> str:
        if not self.values:
            return "-"
        ordered = sorted(self.values)
        middle, low, high = (_short(x) for x in (statistics.median_low(ordered), ordered[0], ordered[-1]))
        span = f" ({low} to {high})" if len(ordered) > 1 else ""
        return f"{self.met} of {len(ordered)}: {middle}{span}"


def _short(value: float) -> str:
    if abs(value) == np.inf:
        return "never"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def evaluate(runs: Sequence[Run]) -> dict[str, list[Cell]]:
    """For every arm, in the order of its name, a cell for each of CLAIMS."""
    found = {}
    for arm in sorted({run.arm for run in runs}):
        cells = []
        for claim in CLAIMS:
            measured = [claim.measure(run, runs) for run in runs if run.arm == arm]
            values = [value for value in measured if value is not None and not np.isnan(value)]
            cells.append(Cell(values, sum(claim.met(value) for value in values)))
        found[arm] = cells
    return found


def markdown(runs: Sequence[Run]) -> str:
    """The table: a row for each number, a column for each arm; cells say in how many seeds the bound is met, the median
    and the range. Raises ValueError without runs."""
    if not runs:
        raise ValueError("no run was given; give traces (.gz) and checkpoints of foreshock lab run")
    arms = evaluate(runs)
    counts = {arm: sum(run.arm == arm for run in runs) for arm in arms}
    head = ["claim", "number", "met when", *(f"{arm} ({counts[arm]} runs)" for arm in arms)]
    lines = [head, ["---"] * len(head)]
    for place, claim in enumerate(CLAIMS):
        lines.append([claim.claim, claim.number, claim.bound, *(str(cells[place]) for cells in arms.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lab_claims(paths: Iterable[Path], *, batches: int, report: Path | None = None) -> str:
    """The table of these traces and checkpoints; every number of every arm also goes to `report`, as JSON."""
    runs = gather(paths, batches)
    table = markdown(runs)
    if report is not None:
        rows = [
            {**{name: getattr(claim, name) for name in ("claim", "number", "bound")}, "arm": arm, **asdict(cell)}
            for arm, cells in evaluate(runs).items()
            for claim, cell in zip(CLAIMS, cells, strict=True)
        ]
        for row in rows:
            row["values"] = [value if np.isfinite(value) else None for value in row["values"]]
        report.write_text(json.dumps({"claims": rows}, indent=2) + "\n")
    return table
