"""A mode that a layer's attention cannot have, as it is called, is refused with a sentence and never ordered."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_foreign_models import DECODER, X, tiny
from tests.monitor.test_switch import command, run
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, tiny_gpt, train_step
from torch import Tensor

from foreshock.contract import wire
from foreshock.monitor import Agent, attach

pytestmark = [  # of torch.compile's own doing
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class WithDropout(CausalSelfAttention):
    """Drops a tenth of its weights while it trains."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=0.1 if self.training else 0.0, is_causal=True
        )


def half_dropped() -> TinyGPT:
    return tiny_gpt(WithDropout(16, 2), CausalSelfAttention(16, 2))


def trained(compiled: bool) -> tuple[Agent, Listener, TinyGPT]:
    model, listener = half_dropped(), Listener()
    agent = attach(model, **EVERY_STEP)
    agent.subscribe(listener)
    running: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    agent.step(train_step(running, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    model.eval()
    with torch.no_grad():
        running(torch.arange(12)[None])
    return agent, listener, model


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_values_are_not_centred_where_the_model_drops_weights_whoever_asks(compiled: bool) -> None:
    agent, _, _ = trained(compiled)
    with agent:
        with pytest.raises(ValueError, match="layer 0 head 1: centred_values does not serve dropout"):
            agent.set_mode([(0, 1)], "centred_values", "a test")
        agent.set_mode([(1, 0)], "centred_values", "a test")
        agent.set_mode([(0, 1)], "row_corrected", "a test")
        assert agent.modes() == {(0, 0): "plain", (0, 1): "row_corrected", (1, 0): "centred_values", (1, 1): "plain"}
        answer = agent._switchboard.obey(command(heads=None, mode="centred_values"), step=2, unix_seconds=0)
        assert answer is not None
        assert (answer.outcome, answer.heads) == ("applied", ((1, 0), (1, 1)))
        assert "(2 heads are left out: layer 0 head 0: centred_values does not serve dropout" in answer.reason
    torch._dynamo.reset()


def test_a_policy_switches_the_heads_that_can_have_its_mitigation_and_says_why_not_the_others() -> None:
    script = {2: [verdict(1, 0)]}
    agent, listener = run(half_dropped(), script, 4, policy="auto", mitigation="centred_values")
    agent.close()
    told = {switched.outcome: switched for switched in listener.of(wire.Switched)}
    assert told["applied"].heads == ((1, 0), (1, 1))
    assert told["refused"].heads == ((0, 0), (0, 1))
    assert "does not serve dropout" in told["refused"].reason
    assert not agent.faults
    assert "mitigation centred_values will be refused in 1 of 2 layers: centred_values does not" in agent.report()


def test_keys_are_not_centred_where_scores_are_capped() -> None:
    model: Any = tiny("Gemma2", **DECODER, sliding_window=4, query_pre_attn_scalar=8, attn_implementation="eager")
    with attach(model, **EVERY_STEP) as agent:
        torch.autograd.backward(model(X).logits.square().mean())
        agent.step(1.0)
        with pytest.raises(ValueError, match="capped scores do not enter as differences"):
            agent.set_mode([(1, 3)], "centred_keys", "a test")
