"""Trainings that are changed half-way: what is changed, when, and what is told of it."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from foreshock.cli import laboratory
from foreshock.lab.changes import CHANGES, RECIPE, Changed, Seen, changes
from foreshock.lab.training.model import ModelConfig
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE

TINY = replace(RECIPE, model=ModelConfig(layers=1, heads=2, width=16, context=16), batch=4, steps=8)
AFTER = 5


Begin = Callable[..., Changed]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a tiny training and makes some steps; its agent is gone after the test."""
    begun: list[Changed] = []

    def start(change: str, steps: int = 0, after: int = AFTER) -> Changed:
        begun.append(Changed(change, 3, recipe=TINY, after=after))
        for _ in range(steps):
            begun[-1].advance()
        return begun[-1]

    yield start
    for training in reversed(begun):
        training.agent.close("stopped")


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("none", "agent")])
def test_a_change_moves_the_training_from_its_step_on_and_not_before(begin: Begin, change: str) -> None:
    def losses(name: str, after: int) -> list[float]:
        training = begin(name, after=after)
        return [float(training.advance()) for _ in range(AFTER + 3)]

    late, now = losses(change, AFTER + 3), losses(change, AFTER)
    if change != "warm-up":  # its rate falls towards the change
        assert now[:AFTER] == late[:AFTER]
    assert now[AFTER:] != late[AFTER:]


@pytest.mark.parametrize(
    ("change", "before", "after"), [("none", (4, 9), (4, 9)), ("context", (8, 5), (2, 17)), ("batch", (1, 9), (8, 9))]
)
def test_batches_have_the_shape_that_the_change_asks_for(
    begin: Begin, change: str, before: tuple[int, int], after: tuple[int, int]
) -> None:
    assert begin(change, AFTER)._windows.shape == before
    assert begin(change, AFTER + 1)._windows.shape == after


def test_a_rate_is_tripled_or_warms_up_again(begin: Begin) -> None:
    rates = {
        change: [training._set_rate() for training.step in (199, 999, 1999, 2099, 2999)]
        for change in ("none", "rate", "warm-up")
        for training in [begin(change, after=2000)]
    }
    full = TINY.learning_rate
    assert rates["none"] == pytest.approx([full] * 5)
    assert rates["rate"] == pytest.approx([full, full, full, 3 * full, 3 * full])
    assert rates["warm-up"] == pytest.approx([x * full for x in (0.9768, 0.525, 0.05, 0.525, 1.0)], rel=1e-3)


def test_frozen_attention_stands_still_until_it_is_thawed(begin: Begin) -> None:
    training = begin("thaw")
    weight = training.model.get_parameter("h.0.attn.c_attn.weight")
    before = weight.detach().clone()
    for _ in range(AFTER):
        training.advance()
    assert torch.equal(weight, before)
    training.advance()
    assert not torch.equal(weight, before)


def test_another_agent_takes_over_at_the_change_and_the_training_goes_on_as_it_was(begin: Begin) -> None:
    alone, changed = begin("none", AFTER), begin("agent", AFTER)
    first = changed.agent
    assert [float(alone.advance()) for _ in range(3)] == [float(changed.advance()) for _ in range(3)]
    assert changed.agent is not first
    assert changed.agent.current_step == AFTER + 3
    assert LAYER_ATTRIBUTE in changed.model.get_submodule("h.0.attn").__dict__


def test_what_was_seen_is_kept_and_shown(tmp_path: Path) -> None:
    found = changes(["reversed", "none"], [3], json_file=tmp_path / "seen.json", recipe=TINY, after=AFTER)
    assert [(each.change, each.seed, each.warnings) for each in found] == [("none", 3, []), ("reversed", 3, [])]
    kept = [Seen(**each) for each in json.loads((tmp_path / "seen.json").read_text())["runs"]]
    assert sorted(kept, key=str) == sorted(found, key=str)


def test_a_warning_is_shown_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(
        change="rate",
        seed=3,
        warnings=["Layer 0 head 1 drifts."],
        first_step=2600,
        loss_before=1.5,
        loss_after=1.8,
        loss_end=1.4,
        processor_seconds=9.0,
    )
    monkeypatch.setattr("foreshock.lab.changes.changes", lambda *_, **__: [seen])
    shown = io.StringIO()
    laboratory.changes([], "3", Console(file=shown, width=120), processes=1, json=None)
    assert "2600" in shown.getvalue()
    assert "the learning rate is three times what it was" in shown.getvalue()
    assert "Layer 0 head 1 drifts." in shown.getvalue()


def test_a_change_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="no such change: colour; allowed are none, text"):
        changes(["colour"], [1])
