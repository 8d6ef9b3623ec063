"""What the detectors lose where only one in k blocks of rows is looked at: recorded runs, thinned, and judged anew.

A recording holds the counts of all rows of a sample. Under k a sample is known from a part of them: ties are drawn
without replacement from the rows that were counted, and the sum of delta bias misses its own by a normal error of
variance (k - 1) n s^2, with the variance s^2 of a row that the recording tells. How much rows of one block are alike is
not recorded, so both ends are tried: rows drawn one by one, and blocks of 128 rows that are alike throughout. Of delta
bias a recording tells how alike rows can be at most: the square of its sum is n s^2 on average where they are not at
all, as in nearly all runs.
Offsets and largest scores are those of all rows under any k, as in a training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, Words, looked_at, slot_values
from foreshock.kernels.flash_attention.spec import LOOK_ROWS
from foreshock.lab.recording.trace import Trace, counted, modes_of, reading
from foreshock.lab.scoring.score import Score, asked_lead, score_traces
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.instruments import near_a_warning, thinning_of
from foreshock.monitor.sampling.thinning import LEAST_ROWS, new_cadence

EVERY: Final = (2, 4, 8, 16, 32)
"""The k that are tried."""
POLICIES: Final = ("agent", "always")
_CLOSE_WATCH: Final = int(AgentConfig.model_fields["close_watch_steps"].default)
_SAMPLE_STEPS: Final = int(AgentConfig.model_fields["sample_every_steps"].default)
_TIES: Final = (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_ONE, Slot.SHIFTED_ROWS)
Warned = dict[tuple[int | None, int | None], int]
"""The step of the first warning about every (layer, head); (None, None) is the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinnedRow:
    """One k, over all runs and seeds of the thinning."""

    every: int
    policy: str
    """agent: k as the agent sets it, 1 near a warning. always: k at every step"""
    alike: int
    """rows that are drawn together"""
    runs: int
    warnings: int
    """first warnings about a head, with every row counted; of one seed"""
    moved: float
    """of these, at another step: mean of the seeds"""
    furthest_steps: int
    """largest such move, of any seed"""
    lost: float
    added: float
    in_time: float
    """failures that were warned about in time; mean of the seeds"""
    failures: int
    false_alarms: float
    """heads warned about in healthy runs; mean of the seeds"""
    looked: float
    """share of the rows that were looked at"""


def thin(words: Words, every: Floats, alike: int, alike_bias: Floats, random: np.random.Generator) -> Words:
    """Counts [N, SLOT_COUNT] as they would be had one in `every` [N] of the rows been looked at, `alike` by `alike`.

    alike_bias [N]: rows whose delta bias is alike.
    """
    thinned, floats = words.copy(), words.view(np.float64)
    rows = words[:, Slot.ROWS]
    units = np.maximum(rows // alike, 1)
    looked_units = np.maximum(units // every.astype(np.int64), 1)
    looked = np.where(every > 1, np.minimum(looked_units * alike, rows), rows)
    for slot in _TIES:
        tied, over = np.divmod(words[:, slot], alike)
        tied = np.minimum(tied + (random.random(len(rows)) * alike < over), units)
        drawn = random.hypergeometric(tied, units - tied, looked_units) * alike
        thinned[:, slot] = np.where(every > 1, np.minimum(drawn, looked), words[:, slot])
    total = floats[:, Slot.DELTA_BIAS_SUM]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(_spread(words) * (rows / np.maximum(looked, 1) - 1) * alike_bias)
        share = np.where(every > 1, looked / np.maximum(rows, 1), 1.0)
    thinned.view(np.float64)[:, Slot.DELTA_BIAS_SUM] = (total + error * random.standard_normal(len(rows))) * share
    thinned[:, Slot.SKIPPED_ROWS] = rows - looked
    return thinned


def _spread(words: Words) -> Floats:
    """n s^2 of delta bias, [N]: the variance of its sum over a sample were all rows independent."""
    floats, rows = words.view(np.float64), words[:, Slot.ROWS]
    total, squares = floats[:, Slot.DELTA_BIAS_SUM], floats[:, Slot.DELTA_BIAS_SUMSQ]
    with np.errstate(divide="ignore", invalid="ignore"):
        # Of a normal row, where no more is known.
        of_size = np.pi / 2 * slot_values(words, Slot.DELTA_BIAS_ABS) ** 2 / rows
        spread = np.where(np.isnan(squares), of_size, squares - total**2 / rows)
    return np.asarray(np.nan_to_num(spread.clip(min=0.0)))


def _alike_bias(samples: Sequence[Words], alike: int) -> Floats:
    """Rows whose delta bias is alike, [N]: as many as the recorded sums allow, 1 to `alike`."""
    sums = sum(np.nan_to_num(words.view(np.float64)[:, Slot.DELTA_BIAS_SUM] ** 2) for words in samples)
    spread = sum(map(_spread, samples))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(sums / spread, nan=1.0, posinf=alike).clip(1.0, alike))


def warned(
    trace: Trace, every: int, *, alike: int, always: bool, seed: int, config: DetectorConfig
) -> tuple[Warned, int, int]:
    """The first warnings of a run under k = `every`, and its rows, all and those looked at."""
    random = np.random.default_rng([seed, every, alike])
    detectors = Detectors(trace.heads, config)
    heads = [len(layer.heads) for layer in trace.started.layers]
    thinning = thinning_of(new_cadence(len(heads), torch.device("cpu")), heads, every, config)
    samples = list(counted(trace))
    alike_bias = _alike_bias([words for _, words in samples], alike)
    told: Warned = {}
    watch_until, all_rows, looked = -1, 0, 0
    for sample, whole in samples:
        k = np.full(len(whole), every) if always else np.repeat(thinning.every, heads)
        words = thin(whole, k.astype(np.float64), alike, alike_bias, random) if (k > 1).any() else whole
        all_rows += int(whole[:, Slot.ROWS].sum())
        looked += int(looked_at(words).sum())
        for verdict in detectors.update(replace(reading(trace, sample, words), rounds=True)):
            if verdict.state == "raised" and verdict.severity != "info":
                told.setdefault((verdict.layer, verdict.head), verdict.step)
                watch_until = sample.step + _CLOSE_WATCH
        modes = modes_of(sample, len(whole))
        near = near_a_warning(detectors.risk, detectors.pressure)
        thinning.follow(_live(sample, whole), near, modes, sample.step, watch_until)
    return told, all_rows, looked


def large(trace: Trace) -> bool:
    """Whether a run has so many rows that the agent thins it; of fewer it counts all."""
    rows = max((int(_live(sample, words)[:, Slot.ROWS].max()) for sample, words in counted(trace)), default=0)
    return rows >= 2 * LEAST_ROWS


def _live(sample: wire.Sample, words: Words) -> Words:
    """The counts with the rows that a live sample has: a recorded one is the merger of several."""
    live = words.copy()
    live[:, Slot.ROWS] = words[:, Slot.ROWS] * _SAMPLE_STEPS // max(sample.step - sample.since_step, _SAMPLE_STEPS)
    return live


def thinned(
    traces: Sequence[Trace],
    every: Sequence[int] = EVERY,
    *,
    seeds: int,
    on_row: Callable[[], None] = lambda: None,
) -> list[ThinnedRow]:
    """A row for each policy, k and number of rows that are alike, over `seeds` of the thinning, after one of no
    thinning. Of the runs those that are `large` alone; raises ValueError where none is."""
    config = DetectorConfig()
    if not (traces := [trace for trace in traces if large(trace)]):
        raise ValueError(f"none of these runs has {2 * LEAST_ROWS} rows of a head in a sample; the agent thins none")
    scores = score_traces(traces, config, baselines=())
    whole = [warned(trace, 1, alike=1, always=True, seed=0, config=config)[0] for trace in traces]
    found = [_row(traces, scores, whole, 1, "always", 1, 1, config)]
    for policy in POLICIES:
        for k in every:
            for alike in (1, LOOK_ROWS):
                found.append(_row(traces, scores, whole, k, policy, alike, seeds, config))
                on_row()
    return found


def _row(
    traces: Sequence[Trace],
    scores: Sequence[Score],
    whole: Sequence[Warned],
    every: int,
    policy: str,
    alike: int,
    seeds: int,
    config: DetectorConfig,
) -> ThinnedRow:
    moves: list[int] = []
    lost = added = in_time = false_alarms = all_rows = looked = 0
    for seed in range(seeds):
        for trace, score, before in zip(traces, scores, whole, strict=True):
            now, rows, seen = warned(trace, every, alike=alike, always=policy == "always", seed=seed, config=config)
            all_rows, looked = all_rows + rows, looked + seen
            moves += [abs(now[who] - step) for who, step in before.items() if now.get(who, step) != step]
            lost += len(before.keys() - now.keys())
            added += len(now.keys() - before.keys())
            false_alarms += len(now) if score.healthy else 0
            if score.failed and score.harm_step is not None and now:
                in_time += score.harm_step - min(now.values()) >= asked_lead(score.harm_step)
    return ThinnedRow(
        every=every,
        policy=policy,
        alike=alike,
        runs=len(traces),
        warnings=sum(map(len, whole)),
        moved=len(moves) / seeds,
        furthest_steps=max(moves, default=0),
        lost=lost / seeds,
        added=added / seeds,
        in_time=in_time / seeds,
        failures=sum(score.failed for score in scores),
        false_alarms=false_alarms / seeds,
        looked=looked / all_rows if all_rows else 0.0,
    )
