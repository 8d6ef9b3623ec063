"""Whether foreshock was right about a training: each number against a true one, each printed line against a list."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from tests.real_code.case import EVERY, SAMPLED, SWITCH_AT, Case
from tests.real_code.course import Course
from tests.real_code.truth import CallScores

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values

SCORE_ERROR: Final = 1e-5
"""Of a score or an offset, relative to one or to itself where it is larger: both are computed from the same operands,
once in float32 and once in float64."""
NORM_ERROR: Final = 0.01
"""Relative, as kernels/spectral.py states it."""
LOSS_AFTER: Final = 1e-3
"""Relative, after the switch: another kernel rounds otherwise. A model with dropout draws other masks."""
ANSWER_BY: Final = SWITCH_AT + EVERY + 1
"""An order is answered within a sample, which the agent reads one step later."""

COMMON: Final = tuple(
    map(
        re.compile,
        (
            r"Drift by rounding: not in this run\. Its attention is computed in float32; the drift needs 16 bits\.$",
            r"foreshock watches:$",
            r"layer +attention module +heads ",
            r"\d[\d to,.]* +(\d+ x )?\S.* native attention, sampled$",
            r"numerics: auto \(kernel for 16-bit operands, float32 for fp32, float64 for float64\)$",
            r"the model's own attention runs unchanged; every 4 steps 4096 rows of every head are measured$",
            r"foreshock, from step 1 on:$",
            r"\d+ x native attention, sampled \(",
        ),
    )
)
"""Lines that any training of fp32 whose attention is kept may print: none of them says a number that can be wrong."""
_SWITCHED: Final = r"foreshock: step 12: {heads} heads switched to row_corrected: by hand$"


@dataclass(slots=True)
class Verdict:
    """A line of the table."""

    name: str
    repository: str
    commit: str
    model: str
    attached: str = "two lines"
    watched: str = ""
    bits: str = ""
    score_error: float | None = None
    norm_error: float | None = None
    switch: str = ""
    wrong: list[str] = field(default_factory=list)
    missing: str = ""
    """Why the repository could not be run."""


def judge(case: Case, commit: str, plain: Course, watched: Course) -> Verdict:
    """Of a training without foreshock and one with it."""
    verdict = Verdict(case.name, case.repository, commit, case.model)
    if plain.ended:
        verdict.missing = f"{plain.ended} (without foreshock)"
        return verdict
    if watched.ended:
        verdict.wrong.append(f"with foreshock only: {watched.ended}")
        return verdict
    if watched.faults:
        verdict.wrong.append(f"contained faults: {watched.faults}")
    _judge_bits(verdict, plain, watched)
    _judge_layers(verdict, case, plain, watched)
    _judge_scores(verdict, case, plain, watched)
    _judge_norms(verdict, case, watched)
    _judge_switch(verdict, case, plain, watched)
    verdict.wrong += _of_lines(case, watched)
    return verdict


def _judge_bits(verdict: Verdict, plain: Course, watched: Course) -> None:
    differ = [step for step in range(SWITCH_AT) if plain.losses[step] != watched.losses[step]]
    parts = [f"the loss of step {differ[0] + 1}"] if differ else []
    if list(plain.weights) != list(watched.weights):
        parts.append("the keys of the state dict")
    else:
        parts += [name for name, value in plain.weights.items() if not _same(value, watched.weights[name])]
    if not torch.equal(_tensor(plain.random_state), _tensor(watched.random_state)):
        parts.append("the random state")
    verdict.bits = "differ" if parts else "equal"
    verdict.wrong += [f"differs before the switch: {part}" for part in parts[:3]]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the last bit, a NaN like another."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    )


def _tensor(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def _judge_layers(verdict: Verdict, case: Case, plain: Course, watched: Course) -> None:
    said = re.findall(r"^watched (\d+ of \d+) attention layers$", "\n".join(watched.lines), re.MULTILINE)
    verdict.watched = f"{said[-1] if said else 'nothing said'}, true {case.measured} of {case.layers}"
    if not said or said[-1] != f"{case.measured} of {case.layers}":
        verdict.wrong.append(f"watched: {verdict.watched}")
    met = len(next(iter(plain.scores.values()), {}))
    if met != case.measured:
        verdict.wrong.append(f"{met} modules call PyTorch's attention; the case counts {case.measured}")
    for layer in watched.layers if case.measured else ():
        if (len(layer.heads), layer.kv_heads) != (case.heads, case.key_heads):
            found = f"{len(layer.heads)} heads and {layer.kv_heads} key heads"
            verdict.wrong.append(f"{layer.name}: {found}, true {case.heads} and {case.key_heads}")


def _judge_scores(verdict: Verdict, case: Case, plain: Course, watched: Course) -> None:
    samples = {sample.step: sample for sample in watched.samples}
    for step in SAMPLED if case.measured else ():
        sample = samples.get(step)
        words = sample.words() if sample is not None else None
        if words is None:
            verdict.wrong.append(f"no sample of step {step}")
            continue
        rows, start = plain.scores.get(step, {}), 0
        for layer in watched.layers:
            mine = words[start : (start := start + len(layer.heads))]
            true = [of for name, of in rows.items() if name == layer.name or name.startswith(f"{layer.name}.")]
            if len(true) != 1:
                verdict.wrong.append(f"{layer.name}: float64 met {len(true)} modules of it in step {step}")
                continue
            for what, got, expected in _pairs(mine, true[0]):
                error = max(abs(g - e) / max(1.0, abs(e)) for g, e in zip(got, expected, strict=True))
                error = error if math.isfinite(error) else math.inf
                if what == "rows" and error:
                    verdict.wrong.append(f"{layer.name}, step {step}: {got} rows, true {expected}")
                elif what != "rows":
                    verdict.score_error = max(verdict.score_error or 0.0, error)
                    if error > SCORE_ERROR:
                        verdict.wrong.append(f"{layer.name}, step {step}: {what} is {error:.1e} from float64")


def _pairs(words: Any, true: CallScores) -> Iterator[tuple[str, list[float], list[float]]]:
    """What foreshock measured and what is true, of every head."""
    rows = slot_values(words, Slot.ROWS)
    yield "rows", rows.tolist(), true.rows.double().tolist()
    yield "largest score", slot_values(words, Slot.SCORE_MAX).tolist(), true.largest.tolist()
    yield "largest row maximum", slot_values(words, Slot.ROW_MAX_ABS).tolist(), true.largest_row_max.tolist()
    yield "offset", (slot_values(words, Slot.SCORE_OFFSET_SUM) / rows).tolist(), (true.offset / true.rows).tolist()


def _judge_norms(verdict: Verdict, case: Case, watched: Course) -> None:
    for sample in watched.samples if case.measured else ():
        if sample.step not in SAMPLED:
            continue
        measured = [
            None if norm is None else norm.numpy()
            for norm in (sample.query_norm, sample.key_norm, sample.query_key_norm)
        ]
        if case.rows is None or any(norm is None for norm in measured):
            if case.rows is not None or any(norm is not None and not math.isnan(max(norm)) for norm in measured):
                verdict.wrong.append(f"step {sample.step}: norms are {'not ' * (case.rows is not None)}measured")
            continue
        for number, (layer, head) in enumerate((x, h) for x in watched.layers for h in range(len(x.heads))):
            query, key = (w.double() for w in case.rows(watched.states[sample.step], layer.name, head))
            for got, true in zip(measured, (query, key, query.mT @ key), strict=True):
                assert got is not None
                expected = float(torch.linalg.matrix_norm(true, 2))
                error = abs(float(got[number]) - expected) / expected
                error = error if math.isfinite(error) else math.inf
                verdict.norm_error = max(verdict.norm_error or 0.0, error)
                if error > NORM_ERROR:
                    verdict.wrong.append(f"{layer.name}, head {head}, step {sample.step}: a norm is {error:.1%} off")


def _judge_switch(verdict: Verdict, case: Case, plain: Course, watched: Course) -> None:
    answers: list[wire.Switched] = [answer for answer in watched.answers if answer.reason]
    outcome = {answer.outcome for answer in answers}
    if watched.refused_at_once:
        verdict.switch = f"refused: {watched.refused_at_once}"
    elif not answers:
        verdict.switch = "never answered"
    elif outcome == {"applied"}:
        losses = zip(plain.losses[SWITCH_AT:], watched.losses[SWITCH_AT:], strict=True)
        away = max(abs(one - other) / abs(one) for one, other in losses)
        verdict.switch = "applied" if case.dropout else f"applied, loss within {away:.0e}"
        if away > LOSS_AFTER and not case.dropout:
            verdict.wrong.append(f"after the switch the loss is {away:.1e} away")
        verdict.wrong += _not_served(watched)
    else:
        verdict.switch = "; ".join(f"{answer.outcome}: {answer.reason}" for answer in answers)
    late = [answer.step for answer in answers if answer.step > ANSWER_BY]
    if late:
        verdict.wrong.append(f"the switch is answered in step {late[0]}, more than a sample after the order")
    if not re.match("applied" if case.switch == "applied" else f"refused: .*(?:{case.switch})", verdict.switch):
        verdict.wrong.append(f"switch: {verdict.switch}; expected {case.switch}")


def _not_served(watched: Course) -> Iterator[str]:
    """Our kernels count the rows of every step; a native attention is measured in one."""
    before, after = (_rows_of(watched, step) for step in (SWITCH_AT, SWITCH_AT + EVERY))
    if after != [EVERY * rows for rows in before]:
        yield f"the switch is called applied, but heads counted {after} rows after it in {EVERY} steps of {before}"


def _rows_of(watched: Course, step: int) -> list[float]:
    words = next((sample.words() for sample in watched.samples if sample.step == step), None)
    return [] if words is None else slot_values(words, Slot.ROWS).tolist()


def _of_lines(case: Case, watched: Course) -> Iterator[str]:
    """Lines that no list has, and those of the case that were not printed."""
    own = [re.compile(said) for said in case.says]
    heads = case.heads * case.measured
    own += [re.compile(_SWITCHED.format(heads=heads))] * (case.switch == "applied")
    own += [re.compile(f"watched {case.measured} of {case.layers} attention layers$")]
    printed = [line.strip() for line in watched.lines if line.strip()]
    for line in printed:
        if not any(said.match(line) for said in COMMON) and not any(said.search(line) for said in own):
            yield f"printed, and not on the list: {line}"
    for said in own:
        if not any(said.search(line) for line in printed):
            yield f"on the list, and not printed: {said.pattern}"
