"""What a person does before the first step, and a training that goes on with another model than the one watched."""

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.contract import wire
from foreshock.monitor import attach

QUIET: dict[str, Any] = {
    "url": None, "quiet": True, "strict": True, "sample_every_seconds": 0.0, "sample_every_steps": 2,
}  # fmt: skip

LOUD = QUIET | {"quiet": False}


def steps(agent: Any, model: Any, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(count):
        agent.step(train_step(model, optimizer, number))


def test_heads_switched_before_the_first_step_leave_the_step_free_to_be_set() -> None:
    model = tiny_gpt()
    told: list[wire.Event] = []
    with attach(model, **QUIET) as agent:
        agent.subscribe(told.append)
        agent.set_mode(agent.modes(), "row_corrected", reason="it failed at step 7025")
        agent.begin_at(6000)
        steps(agent, model, 1)
        assert agent.current_step == 6001
    started = next(event for event in told if isinstance(event, wire.Started))
    switched = next(event for event in told if isinstance(event, wire.Switched))
    assert told.index(started) < told.index(switched)
    assert (started.step, switched.step, len(switched.heads)) == (6000, 6000, len(agent.modes()))


def test_a_switch_before_the_first_step_outlives_the_saved_modes_that_are_loaded_after_it() -> None:
    model = tiny_gpt()
    with attach(model, **QUIET) as agent:
        steps(agent, model, 3)
        agent.set_mode([(0, 0), (0, 1)], "exact_delta", reason="tried")
        saved = agent.state_dict()
    with attach(model, **QUIET) as agent:
        agent.set_mode([(0, 1)], "row_corrected", reason="the run failed")
        agent.load_state_dict(saved)
        assert agent.current_step == 3
        steps(agent, model, 1)  # a switch waits for the step that runs with it
        assert (agent.modes()[0, 0], agent.modes()[0, 1]) == ("exact_delta", "row_corrected")
        steps(agent, model, 1)
        with pytest.raises(ValueError, match="call it before the first step"):
            agent.load_state_dict(saved)


def test_a_training_that_goes_on_with_another_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watched, other = tiny_gpt(), tiny_gpt()
    with attach(watched, **QUIET) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        steps(agent, watched, 4)
        steps(agent, other, 5)
        assert not [r for r in caplog.records if "no attention was recorded" in r.message]  # it may be a pause
        steps(agent, other, 20)
        told = [r.message for r in caplog.records if "no attention was recorded" in r.message]
        assert len(told) == 1
        assert "since step 4" in told[0]
        assert "a different model" in told[0]
        steps(agent, watched, 4)
        steps(agent, other, 20)
        assert len([r for r in caplog.records if "no attention was recorded" in r.message]) == 2


def test_a_training_that_goes_on_after_detach_is_not_told_that_its_model_is_the_wrong_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    with attach(model, **QUIET) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        steps(agent, model, 4)
        agent.detach()
        steps(agent, model, 40)
        assert agent.current_step == 44
    assert not caplog.records


@pytest.mark.parametrize(("given", "done"), [(torch.tensor(6), 6), (np.int64(6), 6), (6.0, 6)])
def test_steps_are_numbered_on_from_whatever_a_checkpoint_holds_their_number_as(given: Any, done: int) -> None:
    model = tiny_gpt()
    with attach(model, **QUIET) as agent:
        agent.begin_at(given)
        steps(agent, model, 2)
        assert json.loads(json.dumps(agent.state_dict()))["step"] == agent.current_step == done + 2


@pytest.mark.promise("A15")
@pytest.mark.parametrize("given", ["6", None, -6, float("nan"), [6]])
def test_what_is_no_number_of_steps_is_named_and_the_training_goes_on(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt()
    with attach(model, **QUIET | {"strict": False}) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        agent.begin_at(given)
        steps(agent, model, 2)
        assert agent.current_step == 2
        assert agent.faults == {"agent": 1}
    assert "begin_at takes the number of steps" in caplog.text


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_training_that_never_calls_step_is_told_when_it_ends(
    forgotten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt()
    with attach(model, **LOUD) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        loss = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
        if not forgotten:
            agent.step(loss)
    assert any("agent.step(loss) was never called" in r.message for r in caplog.records) == forgotten


def test_an_agent_that_was_asked_to_be_quiet_may_be_there_for_another_purpose(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    with attach(model, **QUIET), caplog.at_level(logging.WARNING, "foreshock"):
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert not caplog.records


def test_a_model_that_was_never_trained_or_failed_before_its_first_step_is_no_forgotten_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_gpt()
    with caplog.at_level(logging.WARNING, "foreshock"):
        with attach(model, **LOUD), torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
        agent = attach(model, **LOUD)
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
        agent.close("failed")
    assert not [r for r in caplog.records if "never called" in r.message]
