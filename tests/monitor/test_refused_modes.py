"""A mode that a layer cannot have, or that would change nothing, is refused with a sentence and never ordered."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener, verdict
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_switch import command, run
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, tiny_gpt, train_step
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention import watched_layer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Masked(CausalSelfAttention):
    """Causal by a mask that it passes itself, with a slope that is trained; `masks` says in which calls."""

    masks = True

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.masks:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        length = query.shape[2]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = (-0.1 * distance).masked_fill(distance < 0, float("-inf")).to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def half_masked() -> TinyGPT:
    return tiny_gpt(Masked(16, 2), CausalSelfAttention(16, 2))


def after_a_step(model: TinyGPT, *, compiled: bool = False, **settings: Any) -> Agent:
    agent = attach(model, **{**EVERY_STEP, **settings})
    running: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    agent.step(train_step(running, torch.optim.SGD(model.parameters(), lr=0.1), 0))
    return agent


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_a_layer_whose_every_call_passes_a_mask_cannot_be_switched_and_says_why(attention: str) -> None:
    with after_a_step(half_masked(), attention=attention) as agent:
        with pytest.raises(ValueError, match=r"layer 0 head 1: .*it passes a mask.*a switch would change nothing"):
            agent.set_mode([(0, 1)], "row_corrected", "a test")
        agent.set_mode([(0, 1)], "plain", "nothing is asked of the kernels")
        done = agent.set_mode([(1, 0)], "row_corrected", "a test")
        assert (done is None) == (attention == "keep")  # it waits for the kernels to serve its layer
        row_corrected = "row_corrected" if attention == "kernels" else "plain"
        assert agent.modes() == {(0, 0): "plain", (0, 1): "plain", (1, 0): row_corrected, (1, 1): "plain"}
        answer = agent._switchboard.obey(command(heads=((0, 0),), mode="exact_delta"), step=2, unix_seconds=0)
        assert answer is not None
        assert (answer.outcome, "it passes a mask" in answer.reason) == ("refused", True)


def test_an_order_for_every_head_leaves_out_those_that_it_would_not_change_and_says_so() -> None:
    with after_a_step(half_masked()) as agent:
        done = agent.set_mode(agent.modes(), "row_corrected", "a test")
        assert done is not None
        assert done.heads == ((1, 0), (1, 1))
        assert done.reason.startswith("a test (2 heads are left out: layer 0 head 0: its own attention stays")
        answer = agent._switchboard.obey(command(heads=None, mode="plain"), step=2, unix_seconds=0)
        assert answer is not None
        assert (answer.outcome, len(answer.heads)) == ("applied", 4)
        answer = agent._switchboard.obey(command(id="c2", heads=None, mode="exact_delta"), step=3, unix_seconds=0)
        assert answer is not None
        assert (answer.outcome, answer.heads) == ("applied", ((1, 0), (1, 1)))
    with after_a_step(tiny_gpt(Masked(16, 2))) as agent, pytest.raises(ValueError, match=r"change nothing"):
        agent.set_mode(agent.modes(), "row_corrected", "nobody is left")


@pytest.mark.full
def test_so_it_is_in_compiled_code_of_a_process_that_has_imported_transformers() -> None:
    importlib.import_module("transformers.modeling_utils")  # whose models alone can leave their masks out
    torch._dynamo.reset()  # earlier tests use up the limit of compilations of one code, past which PyTorch runs eagerly
    with after_a_step(half_masked(), compiled=True, attention="keep") as agent:
        with pytest.raises(ValueError, match=r"layer 0 head 0: .*it passes a mask in compiled code; a switch"):
            agent.set_mode([(0, 0)], "row_corrected", "a test")
        agent.set_mode([(1, 0)], "row_corrected", "a test")
    torch._dynamo.reset()


def test_a_layer_that_passes_a_mask_in_some_calls_alone_is_switched_and_what_does_not_train_does_not_count() -> None:
    model = half_masked()
    first: Any = model.blocks[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, **EVERY_STEP) as agent:
        first.masks = False
        with torch.no_grad():
            model(torch.arange(12)[None])
        first.masks = True
        agent.step(train_step(model, optimizer, 0))
        with pytest.raises(ValueError, match=r"a switch would change nothing"):
            agent.set_mode([(0, 1)], "row_corrected", "only an evaluation went without a mask")
        first.masks = False
        agent.step(train_step(model, optimizer, 1))
        first.masks = True
        agent.step(train_step(model, optimizer, 2))
        agent.set_mode([(0, 1)], "row_corrected", "some calls can be served")


def test_a_layer_whose_calls_our_kernels_compute_otherwise_cannot_be_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_layer, "why_not_proven", lambda *kind: "the output of our kernels is off by 3")
    refused = pytest.raises(ValueError, match=r"our kernels is off by 3; a switch would change nothing")
    with after_a_step(tiny_gpt(CausalSelfAttention(16, 2))) as agent, refused:
        agent.set_mode([(0, 0)], "row_corrected", "a test")


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
