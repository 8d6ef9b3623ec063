"""A mode that a layer cannot have, or that no kernel serves, is refused with a sentence and never ordered."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_modes_without_effect import half_masked
from tests.monitor.test_switch import command, run
from tests.monitor.tiny_models import CausalSelfAttention, tiny_gpt, train_step
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import attach


@pytest.mark.parametrize("mode", ["centred_keys", "stable_softmax", "row_corrected+centred_keys"])
def test_a_mode_that_only_recorded_runs_name_is_refused_whoever_asks(mode: str) -> None:
    listener = Listener()
    with attach(tiny_gpt(), **EVERY_STEP) as agent:
        agent.subscribe(listener)
        with pytest.raises(ValueError, match=r"does not exist; .*allowed are plain, exact_delta"):
            agent.set_mode([(0, 1)], mode, "a test")
        with pytest.raises(ValueError, match=r"does not exist; .*allowed are"):
            agent._switchboard.load_state_dict({"modes": [[0, 0, mode]], "answered": []})
        answer = agent._switchboard.obey(command(heads=None, mode=mode), step=2, unix_seconds=0)
        assert answer is not None
        assert answer.outcome == "refused"
        assert set(agent.modes().values()) == {"plain"}
    with pytest.raises(ValueError, match=r"does not exist; .*allowed are"):
        attach(tiny_gpt(), mitigation=mode, quiet=True, url=None)
    assert not listener.of(wire.Switched)


def test_a_switch_of_no_heads_is_refused_and_prints_no_line_about_them(caplog: pytest.LogCaptureFixture) -> None:
    """As `set_mode(agent.modes(), ...)` is where attach found nothing to watch."""
    agent = attach(nn.Sequential(nn.Linear(4, 4)), run="r", quiet=True)
    with agent, pytest.raises(ValueError, match=r"no heads were given; give \(layer, head\) pairs"):
        agent.set_mode(agent.modes(), "row_corrected", reason="a test")
    assert "0 heads" not in caplog.text


def test_a_policy_switches_the_heads_that_can_have_its_mitigation_and_says_why_not_the_others() -> None:
    agent, listener = run(half_masked(), {2: [verdict(1, 0)]}, 4, policy="auto", mitigation="row_corrected")
    agent.close()
    told = {switched.outcome: switched for switched in listener.of(wire.Switched)}
    assert told["applied"].heads == ((1, 0), (1, 1))
    assert told["refused"].heads == ((0, 0), (0, 1))
    assert "its own attention stays in every call" in told["refused"].reason
    assert not agent.faults
    assert "mitigation row_corrected will be refused in 1 of 2 layers: its own attention stays" in agent.report()


class Branching(CausalSelfAttention):
    """As x-transformers' with its default: PyTorch's attention is on a branch that its configuration does not take."""

    flash = False

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.flash:
            return F.scaled_dot_product_attention(query, key, value)
        out: Tensor = (query @ key.mT).softmax(-1) @ value
        return out


@pytest.mark.promise("A24")
@pytest.mark.parametrize("heads", [{}, {"blocks.0": 2}], ids=["told by the first step", "announced by the user"])
@pytest.mark.parametrize("others", [[CausalSelfAttention(16, 2)], []])
def test_a_switch_of_a_layer_that_is_never_met_is_refused_within_one_sample_and_not_saved(
    others: list[nn.Module], heads: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    model, listener = tiny_gpt(Branching(16, 2), *others), Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {**EVERY_STEP, "attention": "keep", "strict": False, "heads": heads}
    with attach(model, **settings) as agent:
        agent.subscribe(listener)
        asked = [head for head in agent.modes() if head[0] == 0]
        agent.set_mode(asked, "row_corrected", "before the first step")
        for step in range(4):
            agent.step(train_step(model, optimizer, step))
        assert not agent._switchboard._orders
        assert {tuple(head) for *head, _ in agent.state_dict()["switch"]["modes"]}.isdisjoint(asked)
        if heads:
            with pytest.raises(ValueError, match="none of its calls is met"):
                agent.set_mode(asked, "row_corrected", "after")
    assert heads or "the switch of heads of blocks.0 is refused" in caplog.text
    assert [(told.outcome, told.heads) for told in listener.of(wire.Switched)] == (
        [("refused", tuple(asked))] if heads else []
    )
