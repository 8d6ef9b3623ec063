"""QK-Clip follows its setting and the agent's method alone: no policy and no order of the service switches it on."""

import time
from typing import Any

import pytest
from tests.monitor.doubles import Listener, ScriptedDetectors
from tests.monitor.test_clipping import EVERY, changed, growing, two_layers

from foreshock.contract import wire
from foreshock.monitor import attach


@pytest.mark.promise("A26")
@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
def test_no_policy_clips_or_proposes_to(policy: Any) -> None:
    listener, model = Listener(), two_layers()
    with attach(model, policy=policy, **EVERY) as agent:
        agent.subscribe(listener)
        agent.detectors = ScriptedDetectors(4, {1: [growing(1)], 2: [growing(2, state="updated")]})
        assert not changed(agent, model, 5)
    assert listener.of(wire.Switched) == []


@pytest.mark.promise("A26")
def test_an_order_of_an_older_service_is_refused_with_a_sentence_and_scales_nothing() -> None:
    order = wire.Command(id="c", action="qk_clip", mode="qk_clip_always", reason="scores grow", issued_by="ada")
    model = two_layers()
    with attach(model, **EVERY) as agent:
        changed(agent, model)
        answer = agent._switchboard.obey(order, step=agent.current_step, unix_seconds=time.time())
        assert answer is not None
        assert (answer.outcome, answer.heads) == ("refused", ())
        assert answer.reason == "this agent does not carry out 'qk_clip' orders"
        assert not changed(agent, model)


def test_the_service_hears_whenever_its_state_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []
    model = two_layers()
    with attach(model, **EVERY) as agent:
        monkeypatch.setattr(agent._outbox, "_send", lambda event: told.append(getattr(event, "qk_clip", "other")))
        changed(agent, model, 2)
        agent.set_qk_clip(True, "scores grow")
        changed(agent, model, 2)
        agent.set_qk_clip(False, "enough")
        changed(agent, model, 2)
    assert [each for each in told if each != "other"] == ["never", "on", "never"]
