"""QK-Clip by order while a run goes on: agreed to by a person, answered once, kept in checkpoints."""

import json
import time
from typing import Any

import pytest
from tests.monitor.doubles import Listener, ScriptedDetectors
from tests.monitor.test_clipping import EVERY, changed, growing, two_layers

from foreshock.contract import wire
from foreshock.contract.orders import ORDERS
from foreshock.monitor import Agent, attach


def command(when: str, name: str = "cmd-1", **changes: Any) -> wire.Command:
    fields: dict[str, Any] = {"id": name, "action": "qk_clip", "mode": f"qk_clip_{when}", "reason": "scores grow"}
    return wire.Command(issued_by="ada", **fields | changes)


def ordered(agent: Agent, order: wire.Command) -> wire.Switched | None:
    """What the agent answers to an order at this step boundary."""
    return agent._switchboard.obey(order, step=agent.current_step, unix_seconds=time.time())


def test_an_agent_carries_out_every_order_that_there_is() -> None:
    with attach(two_layers(), **EVERY) as agent:
        assert {order.action for order in ORDERS.values()} == agent._switchboard.acts.keys()


def test_an_order_switches_it_on_and_off_and_a_repeated_delivery_changes_nothing() -> None:
    listener, model = Listener(), two_layers()
    with attach(model, **EVERY) as agent:
        agent.subscribe(listener)
        assert not changed(agent, model, 2)
        answer = ordered(agent, command("always"))
        assert answer is not None
        assert (answer.outcome, answer.command, answer.heads, answer.reason) == (
            "applied",
            "cmd-1",
            (),
            "QK-Clip is on",
        )
        assert changed(agent, model)
        assert ordered(agent, command("never", "cmd-2")) is not None
        assert ordered(agent, command("always")) is None  # delivered again
        assert not changed(agent, model, 2)
        assert "QK-Clip is off" in agent.report()
    told = [(each.on, each.reason) for each in listener.of(wire.Clipped) if not each.heads]
    assert told[0] == (True, "ada: scores grow")
    assert told[1][1].endswith("weights that were scaled stay so: training has gone on from them")


def test_a_dry_run_says_what_the_last_sample_would_have_it_do_and_does_not_do_it() -> None:
    model = two_layers()
    with attach(model, **EVERY) as agent:
        changed(agent, model, 2)
        would = agent.qk_clip_dry_run()
        answer = ordered(agent, command("always", dry_run=True))
        assert answer is not None
        assert answer.outcome == "dry_run"
        (layer, head), factor = next(iter(would.items()))
        assert f"QK-Clip would scale the scores of layer {layer} head {head} by {factor:.3g}" in answer.reason
        assert not changed(agent, model, 2)


def test_warned_by_order_acts_on_what_stands_and_on_what_comes_whatever_the_policy() -> None:
    model = two_layers()
    with attach(model, policy="observe", **EVERY) as agent:
        agent.detectors = scripted = ScriptedDetectors(4, {4: [growing(4)]})
        assert not changed(agent, model, 2)
        assert ordered(agent, command("warned")) is not None
        assert not changed(agent, model)
        assert agent._clipping.state == "warned"
        assert changed(agent, model, 4)
    model = two_layers()
    with attach(model, policy="observe", **EVERY) as agent:
        agent.detectors = scripted = ScriptedDetectors(4)
        assert not changed(agent, model)
        scripted.standing = [growing(1)]
        answer = ordered(agent, command("warned"))
        assert answer is not None
        assert answer.reason == "QK-Clip is on"
        assert changed(agent, model)


@pytest.mark.promise("A26")
@pytest.mark.parametrize("policy", ["observe", "approve", "auto"])
def test_no_policy_clips_by_itself_and_those_that_act_propose_it_once(policy: Any) -> None:
    listener, model = Listener(), two_layers()
    with attach(model, policy=policy, **EVERY) as agent:
        agent.subscribe(listener)
        agent.detectors = ScriptedDetectors(4, {1: [growing(1)], 2: [growing(2, state="updated")]})
        assert not changed(agent, model, 5)
    proposals = [(each.outcome, each.after, each.heads) for each in listener.of(wire.Switched)]
    assert proposals == ([] if policy == "observe" else [("proposed", ("qk_clip_always",), ((0, 0),))])


@pytest.mark.parametrize("together", [True, False])
def test_where_a_head_drifts_too_the_agent_proposes_the_switch_alone(together: bool) -> None:
    """QK-Clip comes after the verdict on the switch, which the service knows."""
    drift = growing(1, cause="rounding").model_copy(update={"id": "d", "head": 1})
    listener, model = Listener(), two_layers()
    with attach(model, policy="approve", **EVERY) as agent:
        agent.subscribe(listener)
        agent.detectors = scripted = ScriptedDetectors(4, {1: [growing(1), drift] if together else [growing(1)]})
        scripted.standing = [drift]
        assert not changed(agent, model, 4)
    proposed = {mode for each in listener.of(wire.Switched) for mode in each.after}
    assert proposed == ({"row_corrected"} if together else set())


def test_rounding_proposes_no_qk_clip() -> None:
    listener, model = Listener(), two_layers()
    with attach(model, policy="approve", **EVERY) as agent:
        agent.subscribe(listener)
        agent.detectors = ScriptedDetectors(4, {1: [growing(1, cause="rounding")]})
        assert not changed(agent, model, 4)
    assert {mode for each in listener.of(wire.Switched) for mode in each.after} == {"row_corrected"}


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (command("always", mode="qk_clip_sometimes"), "there are qk_clip_never, qk_clip_warned, qk_clip_always"),
        (command("always", expires_step=0), "expired at step 0"),
        (command("always", action="qk_turn"), "does not know the order 'qk_turn'"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused_with_a_sentence(order: wire.Command, why: str) -> None:
    model = two_layers()
    with attach(model, **EVERY) as agent:
        changed(agent, model)
        answer = ordered(agent, order)
        assert answer is not None
        assert answer.outcome in ("refused", "expired")
        assert why in answer.reason
        assert not changed(agent, model)


@pytest.mark.promise("A26")
def test_where_attention_is_kept_it_is_proposed_and_an_order_is_carried_out_in_steps_that_look_at_every_row() -> None:
    listener, model = Listener(), two_layers()
    kept = EVERY | {"attention": "keep", "qk_clip_every_steps": 2}
    with attach(model, policy="approve", **kept) as agent:
        agent.subscribe(listener)
        agent.detectors = ScriptedDetectors(4, {1: [growing(1)]})
        changed(agent, model, 2)
        would = ordered(agent, command("always", dry_run=True))
        assert would is not None
        assert "by the sampled rows of kept attention; all its rows may hold a larger score" in would.reason
        answer = ordered(agent, command("always", "cmd-2"))
        assert answer is not None
        assert answer.outcome == "applied"
        assert [changed(agent, model) for _ in range(4)].count(True) == 2
    assert [each.after for each in listener.of(wire.Switched) if each.outcome == "proposed"] == [("qk_clip_always",)]


def test_the_service_hears_how_it_stands_whenever_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []
    model = two_layers()
    with attach(model, **EVERY) as agent:
        monkeypatch.setattr(agent._outbox, "_send", lambda event: told.append(getattr(event, "qk_clip", "other")))
        changed(agent, model, 2)
        ordered(agent, command("always"))
        changed(agent, model, 2)
        ordered(agent, command("warned", "cmd-2"))
        changed(agent, model, 2)
        ordered(agent, command("never", "cmd-3"))
        changed(agent, model, 2)
    # on by an order, it stays on where it is set to warned
    assert [each for each in told if each != "other"] == ["never", "on", "never"]


@pytest.mark.parametrize(("saved", "resumed", "clips"), [("never", "never", True), ("never", "always", True)])
def test_what_was_ordered_holds_in_the_resumed_run(saved: Any, resumed: Any, clips: bool) -> None:
    model = two_layers()
    with attach(model, qk_clip=saved, **EVERY) as agent:
        changed(agent, model, 2)
        ordered(agent, command("always"))
        changed(agent, model, 2)
        state = json.loads(json.dumps(agent.state_dict()))
    assert state["qk_clip"]["done"], "the state says which heads were scaled"
    model = two_layers()
    with attach(model, qk_clip=resumed, **EVERY) as agent:
        agent.load_state_dict(state)
        assert changed(agent, model, 2) is clips


@pytest.mark.parametrize(("resumed", "clips"), [("always", False), ("never", False)])
def test_an_order_that_ended_it_outlives_the_process_where_the_setting_is_the_same(resumed: Any, clips: bool) -> None:
    model = two_layers()
    with attach(model, qk_clip=resumed, **EVERY) as agent:
        changed(agent, model, 2)
        ordered(agent, command("never"))
        state = json.loads(json.dumps(agent.state_dict()))
    model = two_layers()
    with attach(model, qk_clip=resumed, **EVERY) as agent:
        agent.load_state_dict(state)
        assert changed(agent, model, 2) is clips


def test_a_setting_that_is_newer_than_the_order_wins() -> None:
    model = two_layers()
    with attach(model, **EVERY) as agent:
        changed(agent, model, 2)
        ordered(agent, command("never"))
        state = json.loads(json.dumps(agent.state_dict()))
    model = two_layers()
    with attach(model, qk_clip="always", **EVERY) as agent:
        agent.load_state_dict(state)
        assert changed(agent, model, 2)
