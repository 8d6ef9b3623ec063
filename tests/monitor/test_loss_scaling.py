"""A loss scaler that starts too high skips its first steps: that is how it finds its scale, and no failure."""

import math
from typing import Any

import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.tiny_models import batch, next_token_loss, tiny_gpt

from foreshock.contract import wire
from foreshock.contract.incident import RunContext, Warned, incidents
from foreshock.monitor import AgentConfig, attach


@pytest.mark.parametrize("told", ["loss", "loss and gradient norm"])
@pytest.mark.parametrize("attention", ["kernels", "keep"])
def test_a_gradscaler_that_starts_high_skips_steps_and_raises_no_warning(attention: Any, told: str) -> None:
    model, listener = tiny_gpt(), Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with attach(model, **{**EVERY_STEP, "attention": attention}) as agent:
        agent.subscribe(listener)
        for step in range(26):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = next_token_loss(model(batch(step)), batch(step))
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            agent.step(loss, norm if "norm" in told else None)
    samples = listener.of(wire.Sample)
    skipped = [sample for sample in samples if sample.grad_norm_nonfinite_steps]
    assert ("norm" in told) == (len(skipped) > 5)
    assert not samples[-1].grad_norm_nonfinite_steps
    assert scaler.get_scale() < 2.0**20
    assert not listener.of(wire.Verdict)


@pytest.mark.parametrize("poisoned", [13, 20, 21])
@pytest.mark.parametrize("norms", [True, False])
def test_the_newest_checkpoint_that_is_advised_was_written_before_the_update_that_broke_the_weights(
    poisoned: int, norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples come every ten steps, and the loss shows a bad update one step later."""
    model, listener = tiny_gpt(), Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sound = [0]
    monkeypatch.setattr(AgentConfig, "close_watch_steps", 0)
    with attach(model, **{**EVERY_STEP, "sample_every_steps": 10}) as agent:
        agent.subscribe(listener)
        for step in range(1, 41):
            optimizer.zero_grad()
            loss = next_token_loss(model(batch(step)), batch(step))
            torch.autograd.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if norms else None
            gradient = next(model.parameters()).grad
            if step == poisoned and gradient is not None:
                gradient.fill_(math.nan)  # what the backward of a broken kernel would leave
            optimizer.step()
            agent.step(loss, norm)
            if all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
                sound.append(step)
    told = [verdict for verdict in listener.of(wire.Verdict) if verdict.layer is None]
    assert told
    for verdict in told:
        assert verdict.evidence["suspect_step"] == sound[-1] + 1 == poisoned
        [incident] = incidents([Warned(0, verdict.step, verdict)], RunContext("row_corrected"))
        assert f"a checkpoint before step {poisoned}" in incident.to_do
