"""A largest score of 100 is noted once for each head, and is no warning."""

import json
import math

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener, ScriptedDetectors, verdict
from tests.monitor.test_clipping import EVERY, changed, two_layers

from foreshock.contract import wire
from foreshock.monitor import attach
from foreshock.monitor.detect.notes import NOTED_SCORE, Notes

HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_heads_are_noted_from_the_level_on_that_boards_mark_once_and_when_they_are_twice_as_many() -> None:
    assert NOTED_SCORE == 100.0
    notes = Notes(HEADS)
    assert notes.of(1, np.array([99.9, -math.inf, math.nan, -500.0]), []) is None
    first = notes.of(2, np.array([100.0, 20.0, 143.2, 0.0]), [])
    assert first is not None
    assert (first.severity, first.state, first.layer, first.evidence) == ("info", "cleared", None, {"score": 143.2})
    assert "layer 0 head 0 (100), layer 1 head 0 (143) passed 100 for the first time" in first.sentence
    assert notes.of(3, np.array([900.0, 101.0, 900.0, 0.0]), []) is None
    again = notes.of(4, np.array([900.0, 101.0, 900.0, 120.0]), [])
    assert again is not None
    assert "of layer 1 head 1 (120) passed 100 for the first time, as those of 3 heads before." in again.sentence
    assert notes.of(5, np.full(4, 50.0), []) is None


@pytest.mark.parametrize("at_once", [1, 3, 144])
def test_a_model_whose_every_head_passes_it_gets_one_note_for_each_doubling(at_once: int) -> None:
    notes, largest = Notes([(layer, head) for layer in range(12) for head in range(12)]), np.zeros(144)
    told = 0
    for step, first in enumerate(range(0, 144, at_once)):
        largest[first : first + at_once] = 150.0
        told += notes.of(step, largest, []) is not None
    assert told == len({min(n, 144).bit_length() for n in range(at_once, 144 + at_once, at_once)})


def test_a_head_that_is_warned_about_needs_no_note_now_or_later() -> None:
    notes = Notes(HEADS)
    assert notes.of(1, np.array([200.0, 0.0, 0.0, 0.0]), [verdict(0, 0)]) is None
    assert notes.of(2, np.array([200.0, 0.0, 0.0, 0.0]), []) is None


def test_an_agent_notes_it_once_in_a_run_that_is_resumed_and_no_warning_stands() -> None:
    def trained(saved: str | None) -> tuple[list[wire.Verdict], str]:
        listener, model = Listener(), two_layers()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "c_attn.weight" in name:
                    parameter[:32].mul_(12)
        with attach(model, **EVERY) as agent:
            agent.detectors = ScriptedDetectors(4)
            if saved is not None:
                agent.load_state_dict(json.loads(saved) | {"detectors": None})
            agent.subscribe(listener)
            changed(agent, model, 4)
            state = json.dumps(agent.state_dict())
        return listener.of(wire.Verdict), state

    told, state = trained(None)
    [note] = told
    assert note.severity == "info"
    assert "passed 100 for the first time" in note.sentence
    assert trained(state)[0] == []
