"""A mode that a layer cannot have, or that no kernel serves, is refused with a sentence and never ordered."""

import pytest
from tests.monitor.doubles import Listener, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_modes_without_effect import half_masked
from tests.monitor.test_switch import command, run
from tests.monitor.tiny_models import tiny_gpt

from foreshock.contract import wire
from foreshock.monitor import attach


@pytest.mark.parametrize("mode", ["centred_keys", "centred_values", "row_corrected+centred_keys"])
def test_a_mode_that_only_recorded_runs_name_is_refused_whoever_asks(mode: str) -> None:
    listener = Listener()
    with attach(tiny_gpt(), **EVERY_STEP) as agent:
        agent.subscribe(listener)
        with pytest.raises(ValueError, match=r"no kernel serves mode centred_\w+; served are exact_delta"):
            agent.set_mode([(0, 1)], mode, "a test")
        answer = agent._switchboard.obey(command(heads=None, mode=mode), step=2, unix_seconds=0)
        assert answer is not None
        assert answer.outcome == "refused"
        assert set(agent.modes().values()) == {"plain"}
    with pytest.raises(ValueError, match="no kernel serves mode centred_"):
        attach(tiny_gpt(), mitigation=mode, quiet=True, url=None)
    assert not listener.of(wire.Switched)


def test_a_policy_switches_the_heads_that_can_have_its_mitigation_and_says_why_not_the_others() -> None:
    agent, listener = run(half_masked(), {2: [verdict(1, 0)]}, 4, policy="auto", mitigation="row_corrected")
    agent.close()
    told = {switched.outcome: switched for switched in listener.of(wire.Switched)}
    assert told["applied"].heads == ((1, 0), (1, 1))
    assert told["refused"].heads == ((0, 0), (0, 1))
    assert "its own attention stays in every call" in told["refused"].reason
    assert not agent.faults
    assert "mitigation row_corrected will be refused in 1 of 2 layers: its own attention stays" in agent.report()
