"""The judge of real training code finds each kind of falsehood, shown on a model of this repository."""

import copy
import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
from tests.monitor.tiny_models import tiny_gpt
from tests.real_code.case import EVERY, SAMPLED, SWITCH_AT, Case, Lines, fused
from tests.real_code.cases import cross_entropy, loop, words
from tests.real_code.course import Course
from tests.real_code.judge import Verdict, judge
from tests.real_code.table import PAGE, RECORD, table_of
from tests.real_code.training import train

from foreshock.contract.slots import Slot


def _train(lines: Lines) -> None:
    model = tiny_gpt()

    def loss_of(generator: torch.Generator) -> torch.Tensor:
        tokens, targets = words(generator, 16)
        return cross_entropy(model(tokens), targets)

    loop(lines, model, loss_of)


CASE = Case(
    name="tiny", repository="here", model="tiny_gpt", train=_train, layers=2, heads=2, key_heads=2,
    rows=fused("c_attn.weight", width=8, heads=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def courses() -> tuple[Course, Course]:
    return train(_train, watched=False), train(_train, watched=True)


def test_a_true_training_has_nothing_wrong(courses: tuple[Course, Course]) -> None:
    verdict = judge(CASE, "", *courses)
    assert not verdict.wrong
    assert not verdict.missing
    assert verdict.bits == "equal"
    assert verdict.switch.startswith("applied, loss within")


def _bit_of_a_loss(course: Course) -> None:
    course.losses[3] = float(torch.tensor(course.losses[3]).nextafter(torch.tensor(9.0)))


def _bit_of_a_weight(course: Course) -> None:
    weight = next(iter(course.weights.values())).flatten()
    weight[0] = weight[0].nextafter(torch.tensor(9.0))


def _random_state(course: Course) -> None:
    assert course.random_state is not None
    course.random_state[5] ^= 1


def _score(course: Course) -> None:
    sample = next(s for s in course.samples if s.step == SAMPLED[-1])
    assert sample.states is not None
    words = sample.states.numpy().copy()
    words.view("<f8")[1, Slot.SCORE_MAX] += 1e-3
    course.samples = [s for s in course.samples if s is not sample]
    course.samples.append(sample.model_copy(update={"states": type(sample.states).of(words)}))


def _weights_of_norms(course: Course) -> None:
    for value in course.states[SAMPLED[-1]].values():
        value *= 1.02


def _count(course: Course) -> None:
    course.lines = [line.replace("watched 2 of 2", "watched 2 of 3") for line in course.lines]


def _silence(course: Course) -> None:
    course.answers.clear()


def _served_by_nobody(course: Course) -> None:
    """As a switch is that was answered and moved nothing: the sample after it is like the one before."""
    before, after = (next(s for s in course.samples if s.step == step) for step in (SWITCH_AT, SWITCH_AT + EVERY))
    course.samples[course.samples.index(after)] = after.model_copy(update={"states": before.states})


@pytest.mark.parametrize(
    ("falsify", "says"),
    [
        (_bit_of_a_loss, "differs before the switch: the loss of step 4"),
        (_bit_of_a_weight, "differs before the switch: "),
        (_random_state, "differs before the switch: the random state"),
        (_score, "blocks.0, step 12: largest score is "),
        (_weights_of_norms, "a norm is 2.0% off"),
        (_count, "watched: 2 of 3, true 2 of 2"),
        (_served_by_nobody, "the switch is called applied, but heads counted"),
        (_silence, "switch: never answered; expected applied"),
        (lambda course: course.lines.append("foreshock: 1 head is warned about"), "printed, and not on the list: "),
        (lambda course: course.faults.update(agent=1), "contained faults"),
    ],
)
def test_a_falsehood_is_found(courses: tuple[Course, Course], falsify: Callable[[Course], None], says: str) -> None:
    plain, watched = courses
    falsify(watched := copy.deepcopy(watched))
    assert any(says in wrong for wrong in judge(CASE, "", plain, watched).wrong)


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"layers": 3}, "watched: 2 of 2, true 3 of 3"),
        ({"heads": 4}, "2 heads and 2 key heads, true 4 and 2"),
        ({"switch": "it passes a mask"}, "expected it passes a mask"),
        ({"says": ("a line of its own",)}, "on the list, and not printed: a line of its own"),
    ],
)
def test_a_case_that_counts_otherwise_is_wrong(
    courses: tuple[Course, Course], claim: dict[str, object], says: str
) -> None:
    case = dataclasses.replace(CASE, **claim)  # type: ignore[arg-type]
    assert any(says in wrong for wrong in judge(case, "", *courses).wrong)


def test_the_page_has_the_table_of_the_record() -> None:
    verdicts = [Verdict(**verdict) for verdict in json.loads(RECORD.read_text())]
    assert table_of(verdicts) in PAGE.read_text()
