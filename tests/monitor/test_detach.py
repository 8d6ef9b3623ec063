"""After detach everything is as it was before attach: every module, and every name of PyTorch and transformers."""

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_executions import MODELS, Mode, encoder_layer
from tests.monitor.test_huggingface import MODELS as TRANSFORMERS
from tests.monitor.tiny_models import CausalSelfAttention, batch, next_token_loss, tiny_gpt, train_step
from torch import nn
from torch.nn.attention import varlen
from transformers import masking_utils, modeling_utils

from foreshock.monitor import Agent, attach
from foreshock.monitor.attention import interception
from foreshock.monitor.model import discovery

MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda make=make: make(Mode())) for name, (make, _, _) in MODELS.items()},  # type: ignore[misc]
    **TRANSFORMERS,
}
PLACES: list[Any] = [F, varlen, torch.utils.checkpoint, torch.nn.utils, masking_utils, modeling_utils]


def snapshot(model: nn.Module) -> Any:
    """Everything that attach may touch; dictionaries (hooks, say) by their contents, not by themselves."""
    modules = {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
    names = {place.__name__: dict(vars(place)) for place in PLACES}
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return modules, names, torch._dynamo.config.get_config_copy(), implementation, type(model).__mro__


class Holding:
    def __init__(self, function: Any) -> None:
        self.named, self.numbered, self.own, self.causal = {1: function}, [function], function, partial(function)

    def are_pytorchs(self) -> list[bool]:
        return [each is discovery.SDPA for each in (self.named[1], self.numbered[0], self.own, self.causal.func)]


@pytest.mark.promise("A25")
def test_what_holds_pytorchs_function_holds_it_again_and_so_do_its_copies() -> None:
    gc.collect()  # of agents that other tests dropped
    holding, model = Holding(F.scaled_dot_product_attention), tiny_gpt(CausalSelfAttention(16, 2))
    local: Any = type(
        "Local", (), {"bare": F.scaled_dot_product_attention, "static": staticmethod(F.scaled_dot_product_attention)}
    )
    with attach(model, **EVERY_STEP):
        assert holding.are_pytorchs() == [False] * 4
        assert discovery.SDPA not in (local.bare, local.static, local().bare)
        copied, pickled = copy.deepcopy(holding), pickle.dumps(holding)
    assert [each.are_pytorchs() for each in (holding, copied, pickle.loads(pickled))] == [[True] * 4] * 3
    assert (vars(local)["bare"], local.static) == (discovery.SDPA, discovery.SDPA)


@pytest.mark.parametrize("attention", ["kernels", "keep"])
@pytest.mark.parametrize("name", MAKERS)
def test_detach_gives_everything_back_as_it_was(name: str, attention: Any) -> None:
    torch.manual_seed(0)
    model = MAKERS[name]()
    before = snapshot(model)
    agent = attach(model, **{**EVERY_STEP, "attention": attention})
    assert snapshot(model) != before
    out = model(batch(0))
    torch.autograd.backward(next_token_loss(getattr(out, "logits", out), batch(0)))
    agent.step(1.0)
    agent.close()
    model.zero_grad(set_to_none=True)
    for mine, theirs in zip(snapshot(model), before, strict=True):
        assert mine == theirs


@pytest.mark.execution("torch TransformerEncoder", "eager")
def test_torchs_fast_path_in_evaluation_is_left_as_it_is_and_training_after_it_counts() -> None:
    torch.manual_seed(0)
    model = tiny_gpt(encoder_layer(), encoder_layer()).eval()
    with torch.no_grad():
        expected = model(batch(0))
    agent = attach(model, **EVERY_STEP)
    events: list[Any] = []
    agent.subscribe(events.append)
    with torch.no_grad():
        got = model(batch(0))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    model.train()
    torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
    agent.step(1.0)
    agent.close()
    samples = [event for event in events if event.kind == "sample"]
    assert [sample.words()[:, 0].tolist() for sample in samples] == [[24] * 4]


@pytest.mark.promise("A25")
@pytest.mark.parametrize("attention", ["kernels", "keep"])
@pytest.mark.parametrize("name", ["nanoGPT", "llama"])
def test_an_agent_that_was_dropped_is_collected_with_its_model_and_sends_what_it_counted(
    name: str, attention: Any
) -> None:
    torch.manual_seed(0)
    model: nn.Module | None = MAKERS[name]()
    assert model is not None
    before = snapshot(nn.Module())
    events: list[Any] = []
    agent: Agent | None = attach(model, **{**EVERY_STEP, "attention": attention})
    assert agent is not None
    agent.subscribe(events.append)
    for _ in range(2):
        out = model(batch(0))
        torch.autograd.backward(next_token_loss(getattr(out, "logits", out), batch(0)))
        agent.step(1.0)
    held = weakref.ref(model), weakref.ref(agent)
    model = agent = out = None
    assert all(is_collected(each) for each in held)
    assert snapshot(nn.Module())[1:3] == before[1:3]
    assert [(event.kind, event.step) for event in events][-2:] == [("sample", 2), ("finished", 2)]


@pytest.mark.promise("A25")
def test_a_model_whose_agent_was_dropped_trains_on_as_before_attach() -> None:
    model = tiny_gpt()
    before = snapshot(model)
    dropped = weakref.ref(attach(model, **EVERY_STEP))
    assert is_collected(dropped)
    assert snapshot(model) == before


@pytest.mark.promise("A25")
def test_an_agent_that_was_dropped_leaves_at_once_and_never_in_the_midst_of_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Between a forward and its recompute, where garbage may be collected, it would end the training."""
    model = tiny_gpt(checkpoint=partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    before = snapshot(model)
    gc.collect()
    gc.disable()
    try:
        attach(model, **{**EVERY_STEP, "quiet": False})
        assert snapshot(model) == before
        assert "the agent was garbage-collected before its first step" in caplog.text
        agent: Agent | None = attach(model, **EVERY_STEP)
        assert agent is not None
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
        agent = None
        assert snapshot(model) == before
    finally:
        gc.enable()


def is_collected(held: weakref.ref[Any]) -> bool:
    """Whether it goes once its last samples are judged and sent, in threads that hold it so long."""
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "foreshock-close":
                thread.join(20)
        if held() is None or time.monotonic() > deadline:
            return held() is None


@pytest.mark.promise("A25")
def test_what_fails_while_an_agent_leaves_holds_nothing_else_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gpt()
    before = snapshot(model)
    monkeypatch.setattr(interception.SdpaRebinding, "release", fails_after(interception.SdpaRebinding.release))
    agent = attach(model, **{**EVERY_STEP, "strict": False})
    agent.close()
    assert agent.faults == {"agent": 1}
    assert snapshot(model) == before


def fails_after(work: Callable[..., None]) -> Callable[..., None]:
    def failing(*given: Any) -> None:
        work(*given)
        raise RuntimeError("a fault on the way out")

    return failing


@pytest.mark.parametrize("mode", ["row_corrected", "plain"])
def test_no_head_is_switched_by_an_agent_that_was_detached(mode: str) -> None:
    agent = attach(tiny_gpt(), **EVERY_STEP)
    agent.detach()
    with pytest.raises(ValueError, match="the agent was detached from its model"):
        agent.set_mode([(0, 0)], mode, reason="a drift")
    agent.close()
