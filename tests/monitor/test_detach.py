"""After detach everything is as before attach: modules, copies, exports, other threads, and every name of PyTorch."""

import copy
import gc
import io
import itertools
import pickle
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.monitor.executions import EVERY_STEP, MODELS, Mode, encoder_layer
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, batch, next_token_loss, tiny_gpt
from tests.monitor.transformers_models import DECODER, TRANSFORMERS, X, tiny
from tests.monitor.unusual_attention import Mixing
from tests.monitor.watching import listening, train
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import flex_attention as FLEX
from torch.optim.swa_utils import AveragedModel
from transformers import masking_utils, modeling_utils

from foreshock.monitor import Agent, attach
from foreshock.monitor.attention import interception
from foreshock.monitor.model import discovery

MAKERS: dict[str, Callable[[], nn.Module]] = {
    name: (lambda make=make: make(Mode())) for name, (make, _, _) in MODELS.items() if name not in TRANSFORMERS
} | TRANSFORMERS
MAKERS["names that say nothing"] = lambda: tiny_gpt(Mixing(), Mixing())
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


class ChoosesItsBackend(nn.Module):
    """As models do that take PyTorch's function in their first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.c_attn = 2, nn.Linear(16, 48)
        self.backends: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.backends:
            self.backend, self.bound = F.scaled_dot_product_attention, partial(F.scaled_dot_product_attention)
            self.backends.append(self.backend)
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        attended: Tensor = self.backend(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.promise("A25")
def test_an_object_that_took_pytorchs_function_during_the_training_has_it_after_close_and_is_saved() -> None:
    model = tiny_gpt(ChoosesItsBackend())
    with attach(model, **EVERY_STEP) as agent:
        torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
        agent.step(1.0)
        [taken] = [module for module in model.modules() if isinstance(module, ChoosesItsBackend)]
        assert taken.backend is not discovery.SDPA
    assert [taken.backend, taken.bound.func, *taken.backends] == [discovery.SDPA] * 3
    torch.save(model, io.BytesIO())


@pytest.mark.promise("A25")
def test_a_close_searches_every_object_only_if_one_took_pytorchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr(interception, "_restore_in_objects", lambda: searched.append(1))
    gc.collect()  # garbage of earlier tests may have references to foreshock's functions
    for layer, times in ((CausalSelfAttention(16, 2), 0), (ChoosesItsBackend(), 1)):
        model = tiny_gpt(layer)
        with attach(model, **EVERY_STEP) as agent:
            torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
            agent.step(1.0)
        assert len(searched) == times


@pytest.mark.execution("torch TransformerEncoder", "eager")
@pytest.mark.promise("A25")
@pytest.mark.parametrize("when", ["it comes", "it goes"])
def test_an_agent_that_is_interrupted_while_it_comes_or_goes_leaves_pytorchs_names_to_pytorch(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C in a notebook, while all modules are searched for names of ours."""
    own = F.scaled_dot_product_attention, FLEX.__code__, torch._dynamo.config.skip_nnmodule_hook_guards

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    holder = types.ModuleType("holder")
    monkeypatch.setitem(sys.modules, "holder", holder)
    model = tiny_gpt()
    if when == "it goes":
        agent = attach(model, **EVERY_STEP)
        vars(holder)["taken"] = F.scaled_dot_product_attention
        monkeypatch.setattr(interception, "places_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            agent.close()
    else:
        monkeypatch.setattr(interception, "rebind_flex", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attach(model, **EVERY_STEP)
    assert (F.scaled_dot_product_attention, FLEX.__code__, torch._dynamo.config.skip_nnmodule_hook_guards) == own
    monkeypatch.undo()
    with attach(tiny_gpt(), **EVERY_STEP):
        assert F.scaled_dot_product_attention is not own[0]
    assert F.scaled_dot_product_attention is own[0]


def test_torchs_fast_path_in_evaluation_is_left_as_it_is_and_training_after_it_counts() -> None:
    torch.manual_seed(0)
    model = tiny_gpt(encoder_layer(), encoder_layer()).eval()
    with torch.no_grad():
        expected = model(batch(0))
    with listening(model) as (agent, listener):
        with torch.no_grad():
            got = model(batch(0))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        model.train()
        torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
        agent.step(1.0)
    assert counted_rows(listener) == [[24] * 4]


@pytest.mark.promise("A25")
@pytest.mark.parametrize("attention", ["kernels", "keep"])
@pytest.mark.parametrize("name", ["nanoGPT", "Llama"])
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
        train(agent, model, 1)
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


@pytest.mark.parametrize("mode", ["row_corrected", "plain"])
def test_no_head_is_switched_by_an_agent_that_was_detached(mode: str) -> None:
    agent = attach(tiny_gpt(), **EVERY_STEP)
    agent.detach()
    with pytest.raises(ValueError, match="the agent was detached from its model"):
        agent.set_mode([(0, 0)], mode, reason="a drift")
    agent.close()


WAYS = ["kernels", "keep"]


def llama() -> nn.Module:
    return tiny("Llama", **DECODER)


def logits(model: nn.Module) -> Tensor:
    out: Any = model(X)
    return getattr(out, "logits", out)  # type: ignore[no-any-return]


def through_a_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def through_a_file(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": through_a_pickle,
    "torch.save": through_a_file,
    "AveragedModel": lambda model: AveragedModel(model).module,
}


def traces(model: nn.Module) -> list[str]:
    """Names of attributes and hooks of ours in any module."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{key}" for key in vars(module) if "foreshock" in key or key == "__getstate__"]
        for key, value in vars(module).items():
            if key.endswith(("_hooks", "_with_kwargs", "_always_called")) and value:
                found.append(f"{name}.{key}")
    return found


def every_copy() -> Iterator[Any]:
    """Each way to copy with each model under each attention; the quick tier has a copy of each model by each way."""
    for way, make, attention in itertools.product(COPIES, (tiny_gpt, llama), WAYS):
        quick = way == "copy.deepcopy" or attention == "keep"
        yield pytest.param(way, make, attention, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("way", "make", "attention"), [*every_copy()])
def test_a_copy_is_unwatched_without_a_trace_and_may_be_attached_itself(
    way: str, make: Callable[[], nn.Module], attention: str
) -> None:
    model = make()
    expected = logits(model)
    with listening(model, attention=attention, probe_rows=10**6) as (agent, listener):
        clone = COPIES[way](model)
        assert not traces(clone)
        assert torch.equal(logits(clone), expected)
        torch.autograd.backward(logits(clone).square().mean())
        agent.step(1.0)
        agent.step(1.0)
        attach(clone, **EVERY_STEP).close()
        torch.autograd.backward(logits(model).square().mean())
        agent.step(1.0)
    assert [sum(sample) for sample in counted_rows(listener)] == [0, 0, len(counted_rows(listener)[0]) * 12]
    assert not traces(model)


def test_an_exported_program_is_the_models_own(tmp_path: Path) -> None:
    model = tiny_gpt().eval()
    with attach(model, **EVERY_STEP):
        program = torch.export.export(model, (batch(0),))
    assert not [node for node in program.graph.nodes if "foreshock" in str(node.target)]
    torch.testing.assert_close(program.module()(batch(0)), model(batch(0)))


@pytest.mark.parametrize("attention", WAYS)
def test_an_implementation_that_is_set_in_the_middle_of_a_run_counts_on(attention: str) -> None:
    model: Any = llama()
    model.set_attn_implementation("eager")
    with listening(model, attention=attention, probe_rows=10**6) as (agent, listener):
        for implementation in ("eager", "sdpa", "eager"):
            model.set_attn_implementation(implementation)
            torch.autograd.backward(logits(model).square().mean())
            agent.step(1.0)
    assert counted_rows(listener) == [[12] * 8] * 3
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("attention", WAYS)
def test_a_second_thread_with_a_model_of_its_own_miscounts_nothing(attention: str) -> None:
    meeting, models = threading.Barrier(2), [tiny_gpt(seed=seed) for seed in range(2)]
    settings: dict[str, Any] = {"attention": attention, "probe_rows": 10**6}

    def trained(model: nn.Module, agent: Agent) -> None:
        for step in range(6):
            meeting.wait(60)
            train(agent, model, [step])

    with (
        listening(models[0], **settings) as first,
        listening(models[1], **settings) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        list(threads.map(trained, models, [first[0], second[0]]))
    assert [counted_rows(listener) for _, listener in (first, second)] == [[[24] * 4] * 6] * 2


@pytest.mark.parametrize("attention", WAYS)
def test_a_rollout_in_another_thread_beside_the_training_of_the_same_model_changes_no_count_and_no_loss(
    attention: str,
) -> None:
    with attach(plain := tiny_gpt(), quiet=True) as agent:
        expected = train(agent, plain, 6)
    model, over, rolled = tiny_gpt(), threading.Event(), threading.Semaphore(0)

    def roll_out() -> None:
        with torch.no_grad():
            while not over.is_set():
                model(batch(99, rows=1))
                rolled.release()

    with listening(model, attention=attention, probe_rows=10**6) as (agent, listener), ThreadPoolExecutor(1) as thread:
        rolling, losses = thread.submit(roll_out), []
        for step in range(6):
            assert rolled.acquire(timeout=60)
            losses += train(agent, model, [step])
        over.set()
        rolling.result()
    assert counted_rows(listener) == [[24] * 4] * 6
    if attention == "kernels":
        torch.testing.assert_close(losses, expected)
    else:
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))


class StopsInside(CausalSelfAttention):
    """Somebody presses Ctrl+C before the attention function is called."""

    stops = True

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.stops:
            raise KeyboardInterrupt
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_a_forward_that_was_interrupted_leaves_no_layer_running() -> None:
    model = tiny_gpt(StopsInside(16, 2), CausalSelfAttention(16, 2))
    x = torch.randn(2, 2, 12, 8, requires_grad=True)
    with listening(model) as (agent, listener):
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        torch.autograd.backward(F.scaled_dot_product_attention(x, x, x).sum())
        StopsInside.stops = False
        train(agent, model, 1)
        StopsInside.stops = True
    assert counted_rows(listener) == [[24] * 4]


def test_what_somebody_bound_while_attached_stays_bound_after_detach_and_is_pytorchs_attention() -> None:
    original = F.scaled_dot_product_attention
    x = torch.randn(1, 2, 5, 8)
    try:
        with listening(tiny_gpt()) as (_, listener):
            taken = F.scaled_dot_product_attention

            def wrapper(*args: Any, **options: Any) -> Tensor:
                return taken(*args, **options) * 2

            vars(F)["scaled_dot_product_attention"] = wrapper
        assert F.scaled_dot_product_attention is wrapper
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), original(x, x, x) * 2)
        with attach(tiny_gpt(), **EVERY_STEP):
            assert torch.equal(taken(x, x, x), original(x, x, x))
        assert F.scaled_dot_product_attention is wrapper
    finally:
        vars(F)["scaled_dot_product_attention"] = original
    assert not [row for row in counted_rows(listener) if any(row)]


class CopiesItsAttributes(CausalSelfAttention):
    """As code for moving averages does it."""

    deep = True

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = type(self).__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo) if self.deep else dict(self.__dict__)
        return copied


class SharesItsAttributes(CopiesItsAttributes):
    deep = False


@pytest.mark.promise("A25")
@pytest.mark.parametrize("kind", [CopiesItsAttributes, SharesItsAttributes])
def test_a_module_that_copies_its_own_dict_leaves_a_copy_that_counts_nothing_and_is_clean_after_close(
    kind: type[CopiesItsAttributes],
) -> None:
    model = tiny_gpt(kind(16, 2))
    with listening(model, attention="keep", probe_rows=999) as (agent, listener):
        second = copy.deepcopy(model)
        for step in range(2):
            second(batch(step)).sum().backward()
            train(agent, model, [step])
        third = copy.deepcopy(model)
        attach(third, **EVERY_STEP).close()  # a copy may be attached while the first is watched
    assert counted_rows(listener) == [[24, 24]] * 2
    assert [traces(each) for each in (model, second, third)] == [[], [], []]
    attach(second, **EVERY_STEP).close()
