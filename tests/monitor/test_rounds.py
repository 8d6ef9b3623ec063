"""The detectors are told whether attention rounds, so that no float32 head is said to fail by rounding."""

from contextlib import nullcontext

import pytest
import torch
from tests.monitor.doubles import ScriptedDetectors
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.monitor import attach
from foreshock.monitor.config import Numerics


@pytest.mark.parametrize(
    ("numerics", "autocast", "rounds"),
    [("auto", False, False), ("auto", True, True), ("float32", True, False), ("kernel", False, True)],
)
def test_detectors_hear_whether_attention_rounds(numerics: Numerics, autocast: bool, rounds: bool) -> None:
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(
        model, numerics=numerics, sample_every_steps=1, sample_every_seconds=0.0, strict=True, quiet=True
    ) as agent:
        heard = agent.detectors = ScriptedDetectors(4)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = train_step(model, optimizer, step)
            agent.step(loss)
    assert heard.readings
    assert {reading.rounds for reading in heard.readings} == {rounds}
