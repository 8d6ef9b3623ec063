"""What people watch today, as signals over a recorded run, to be scored beside our detectors.

A signal is a number that rises with the danger; it warns when it passes a threshold. Loss and gradient norm are read at
every step, the others at every sample or probe. Where the source names a threshold, it is the default; the others have
none but what `foreshock lab score` calibrates on the tuning set. What the accessible text of a source leaves open was
assumed as written here, in favour of the baseline where there was a choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.lab.recording.trace import Trace, readings
from foreshock.lab.scoring.four_conditions import followed

_ALPHA: Final = 0.97
_WARMUP: Final = 25
_Z_CLIP: Final = 2.5


@dataclass(frozen=True, slots=True)
class Signal:
    """One monitored number of one run; NaN where nothing is known yet."""

    step: npt.NDArray[np.int64]
    value: Floats


@dataclass(frozen=True, slots=True)
class Baseline:
    """A monitor of today. `signal` gives None for a trace that did not record what it reads."""

    name: str
    threshold: float | None
    """as published; None where the source names none"""
    source: str
    signal: Callable[[Trace], Signal | None]


def _z_score(step: npt.NDArray[np.int64], values: Floats) -> Signal | None:
    """(value - mean) / deviation, of exponential averages of the values before it, as ZClip (arXiv 2504.02507).

    The first 25 values give the first mean and variance. A value beyond 2.5 enters the averages clipped to
    mean + 2.5^2 / z * deviation (ZClip's reciprocal clipping), so that a spike does not hide the next. Infinite for a
    value that is not finite.
    """
    if np.isnan(values).all() or len(values) <= _WARMUP:
        return None
    scores = np.full(len(values), np.nan)
    first = values[:_WARMUP][np.isfinite(values[:_WARMUP])]
    mean, variance = (float(first.mean()), float(first.var())) if len(first) else (0.0, 0.0)
    for place, value in enumerate(values[_WARMUP:].tolist(), start=_WARMUP):
        if not np.isfinite(value):
            scores[place] = np.inf
            continue
        deviation = max(variance**0.5, 1e-6)
        z = scores[place] = (value - mean) / deviation
        kept = mean + _Z_CLIP**2 / z * deviation if z > _Z_CLIP else value
        variance = _ALPHA * variance + (1 - _ALPHA) * (kept - mean) ** 2
        mean = _ALPHA * mean + (1 - _ALPHA) * kept
    return Signal(step, scores)


def _spike(window: int, in_a_row: int) -> Callable[[Trace], Signal | None]:
    """Signal: the least of `in_a_row` losses in a row over the mean of the `window` losses before each of them.

    Infinite for a loss that is not finite, unknown where none of those before it is. A loss that was an outlier enters
    the mean as any other does.
    """

    def signal(trace: Trace) -> Signal | None:
        step, loss = trace.steps.step, trace.steps.loss
        if np.isnan(loss).all() or len(loss) < window + in_a_row:
            return None
        finite = np.where(np.isfinite(loss), loss, 0.0)
        sums = np.concatenate(([0.0], np.cumsum(finite)))
        counts = np.concatenate(([0], np.cumsum(np.isfinite(loss))))
        with np.errstate(divide="ignore", invalid="ignore"):
            before = (sums[window:-1] - sums[: -window - 1]) / (counts[window:-1] - counts[: -window - 1])
            ratio = np.where(np.isfinite(loss[window:]), loss[window:] / before, np.inf)
        least = np.lib.stride_tricks.sliding_window_view(ratio, in_a_row).min(axis=1)
        return Signal(step[window + in_a_row - 1 :], least)

    return signal


def _loss_z(trace: Trace) -> Signal | None:
    return _z_score(trace.steps.step, trace.steps.loss)


def _grad_norm_z(trace: Trace) -> Signal | None:
    return _z_score(trace.steps.step, trace.steps.grad_norm)


def _largest_of(rows: Sequence[tuple[int, Floats | None]]) -> Signal | None:
    """The largest value of each row that knows one."""
    known = [(step, float(np.nanmax(v))) for step, v in rows if v is not None and not np.isnan(v).all()]
    if not known:
        return None
    return Signal(np.array([step for step, _ in known]), np.array([value for _, value in known]))


def _largest_score(trace: Trace) -> Signal | None:
    return _largest_of([(r.step, r.largest_score) for r in readings(trace)])


def _score_beside_peers(trace: Trace) -> Signal | None:
    rows = []
    for reading in readings(trace):
        scores = reading.largest_score
        rows.append((reading.step, scores / np.nanmedian(scores) if np.isfinite(scores).any() else None))
    return _largest_of(rows)


def _query_norm(trace: Trace) -> Signal | None:
    norms = [(sample.step, sample.query_norm) for sample in trace.samples]
    return _largest_of([(step, None if each is None else each.numpy().astype(np.float64)) for step, each in norms])


def _probed(trace: Trace, name: str) -> list[tuple[int, Floats | None]]:
    return [(probe.step, probe.values[name]) for probe in trace.probes if name in probe.values]


def _four_conditions(trace: Trace) -> Signal | None:
    return _largest_of(list(followed(trace)))


def _sign_share(trace: Trace) -> Signal | None:
    return _largest_of(_probed(trace, "sign_share"))


def _decline(name: str) -> Callable[[Trace], Signal | None]:
    """Signal: the largest share of its own highest value so far that any head has lost."""

    def signal(trace: Trace) -> Signal | None:
        rows = _probed(trace, name)
        if not rows:
            return None
        values = np.stack([row for _, row in rows if row is not None])
        highest = np.fmax.accumulate(values, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = 1.0 - values / highest
        return _largest_of([(step, row) for (step, _), row in zip(rows, lost, strict=True)])

    return signal


BASELINES: Final = (
    Baseline(
        "four conditions",
        1.0,
        "lab/scoring/four_conditions.py: the simplest rule that does as well on all runs known on 2026-11-23, frozen",
        _four_conditions,
    ),
    Baseline(
        "loss z-score",
        3.0,
        "the z-score of ZClip on the loss, threshold 3 of Weights & Biases' automations; assumed: the same averages",
        _loss_z,
    ),
    Baseline(
        "loss spike of Lightning",
        3.0,
        "Lightning 2.6 SpikeDetection: relative difference of 2 or more from the mean of the last 10 losses",
        _spike(10, 1),
    ),
    Baseline(
        "loss spike of llm-foundry",
        2.0,
        "llm-foundry KillLossSpike: five losses in a row of over twice the mean of the last 100; assumed: the mean "
        "goes on while they come, and the cap of 10 on the loss is left out",
        _spike(100, 5),
    ),
    Baseline(
        "gradient-norm z-score",
        _Z_CLIP,
        "ZClip, arXiv 2504.02507: exponential average 0.97, 25 steps of warm-up, threshold 2.5",
        _grad_norm_z,
    ),
    Baseline(
        "largest score of the model",
        100.0,
        "Megatron-LM's max_attention_logit; threshold 100 of its QK-clip",
        _largest_score,
    ),
    Baseline(
        "largest score of a head, beside its peers",
        None,
        "per-head largest score (asked for in flash-attention issue 1876); assumed: over the median of all heads",
        _score_beside_peers,
    ),
    Baseline(
        "W_Q norm", None, "arXiv 2510.04212, section 3.2: spectral norm of a head's W_Q; no threshold", _query_norm
    ),
    Baseline(
        "stable rank",
        None,
        "MSign, arXiv 2602.01734: decline of ||W||_F^2 / ||W||_2^2; assumed: of a head's W_Q, against its own highest",
        _decline("stable_rank"),
    ),
    Baseline(
        "Spectral Alignment",
        None,
        "arXiv 2510.04202: collapse of the sign diversity of x . v; assumed: share of tokens on one side, worst of "
        "W_Q, W_K and feed-forward matrix of any layer, no bias, 4 sequences of fixed text",
        _sign_share,
    ),
    Baseline(
        "update entropy, since the start",
        None,
        "arXiv 2606.28116: spectral entropy of the first-order term of the change of W_Q^T W_K; assumed: energies s^2, "
        "per head, first weights as Q and K, a decline against its own highest",
        _decline("entropy_start"),
    ),
    Baseline(
        "update entropy, since the last probe",
        None,
        "the same with the weights of the probe before as Q and K",
        _decline("entropy_last"),
    ),
)
