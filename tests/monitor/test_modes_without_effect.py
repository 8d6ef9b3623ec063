"""A mode changes nothing where the model's own attention stays under every mode: such a switch is refused in words."""

import importlib
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
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention import watched_layer

pytestmark = [  # of torch.compile's own doing
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


class Asked:
    """Which heads the switches of an agent ask for, in order: why they cannot have the mode."""

    def __init__(self, agent: Agent) -> None:
        self.refuses: list[tuple[int, int]] = []
        board, heads = agent._switchboard, list(agent.modes())
        refuses = board.why_refused
        assert refuses is not None

        def asked(row: int, mode: int) -> str | None:
            self.refuses.append(heads[row])
            return refuses(row, mode)

        board.why_refused = asked


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


@pytest.mark.parametrize(
    ("changes", "outcome", "asked"),
    [
        ({"heads": ((1, 0), (1, 1))}, "applied", [(1, 0), (1, 1)]),
        ({"heads": ((0, 0),)}, "refused", [(0, 0)]),
        ({"heads": None}, "applied", [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ({"heads": None, "dry_run": True}, "dry_run", [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
)
def test_an_order_asks_each_head_once_whether_it_would_change(
    changes: dict[str, Any], outcome: str, asked: list[tuple[int, int]]
) -> None:
    with after_a_step(half_masked()) as agent:
        asks = Asked(agent)
        answer = agent._switchboard.obey(command(mode="row_corrected", **changes), step=2, unix_seconds=0)
        assert answer is not None
        assert answer.outcome == outcome
        assert asks.refuses == asked
        left_out = "(2 heads are left out: layer 0 head 0" in answer.reason
        assert left_out == (changes["heads"] is None)


def test_a_person_and_a_policy_ask_each_head_once_whether_it_would_change() -> None:
    with after_a_step(half_masked()) as agent:
        person = Asked(agent)
        agent.set_mode(agent.modes(), "row_corrected", "a test")
        assert person.refuses == list(agent.modes())
    with after_a_step(half_masked(), policy="auto", mitigation="row_corrected") as agent:
        policy = Asked(agent)
        agent._switching.act([verdict(1, 0)], agent.current_step)
        assert policy.refuses == list(agent.modes())
        assert set(agent.modes().values()) == {"plain", "row_corrected"}


@pytest.mark.full
def test_so_it_is_in_compiled_code_of_a_process_that_has_imported_transformers() -> None:
    importlib.import_module("transformers.modeling_utils")  # whose models alone can leave their masks out
    torch._dynamo.reset()  # earlier tests use up the limit of compilations of one code, past which PyTorch runs eagerly
    with after_a_step(half_masked(), compiled=True, attention="keep") as agent:
        with pytest.raises(ValueError, match=r"layer 0 head 0: .*it passes a mask in compiled code; a switch"):
            agent.set_mode([(0, 0)], "row_corrected", "a test")
        agent.set_mode([(1, 0)], "row_corrected", "a test")
    torch._dynamo.reset()


def test_the_policy_switches_the_other_layer_and_the_report_says_beforehand_what_will_be_refused() -> None:
    agent, listener = run(half_masked(), {2: [verdict(1, 0)]}, 4, policy="auto", mitigation="row_corrected")
    agent.close()
    told = {switched.outcome: switched for switched in listener.of(wire.Switched)}
    assert told["applied"].heads == ((1, 0), (1, 1))
    assert told["refused"].heads == ((0, 0), (0, 1))
    assert "it passes a mask" in told["refused"].reason
    assert "mitigation row_corrected will be refused in 1 of 2 layers: " in agent.report()


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


def test_eager_attention_of_transformers_cannot_be_switched() -> None:
    model: Any = tiny("Qwen2", **DECODER, attn_implementation="eager")
    with attach(model, **EVERY_STEP) as agent:
        torch.autograd.backward(model(X).logits.square().mean())
        agent.step(1.0)
        with pytest.raises(ValueError, match=r"its attention is eager, which stays.*set_attn_implementation"):
            agent.set_mode([(1, 3)], "row_corrected", "a test")


def test_a_layer_whose_calls_our_kernels_compute_otherwise_cannot_be_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_layer, "why_not_proven", lambda *kind: "the output of our kernels is off by 3")
    refused = pytest.raises(ValueError, match=r"our kernels is off by 3; a switch would change nothing")
    with after_a_step(tiny_gpt(CausalSelfAttention(16, 2))) as agent, refused:
        agent.set_mode([(0, 0)], "row_corrected", "a test")


def test_a_layer_that_is_sampled_now_and_then_is_not_taken_for_one_that_stopped_where_its_peer_counts_every_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = half_masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, **EVERY_STEP | {"sample_every_steps": 4}) as agent:
        listener = Listener()
        agent.subscribe(listener)
        for step in range(8):
            agent.step(train_step(model, optimizer, step))
    rows = [slot_values(sample.words(), Slot.ROWS).tolist() for sample in listener.of(wire.Sample)]
    assert [bool(first) for first, *_ in rows] == [True, True, True]  # each sample ends with a step that is measured
    assert all(last for *_, last in rows)
    assert "counted nothing" not in caplog.text


def test_before_the_first_step_nothing_is_known_and_a_switch_is_taken() -> None:
    listener = Listener()
    with attach(half_masked(), **EVERY_STEP) as agent:
        agent.subscribe(listener)
        done = agent.set_mode([(0, 0)], "row_corrected", "a test")
        assert done is not None
        assert done.outcome == "applied"
