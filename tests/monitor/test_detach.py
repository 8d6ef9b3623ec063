"""detach restores everything that attach changed: modules, copies, exports, other threads and PyTorch's functions."""

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
from tests.monitor.execution_modes import EVERY_STEP, MODELS, Mode, encoder_layer
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, batch, next_token_loss, tiny_gpt
from tests.monitor.transformers_models import DECODER, TRANSFORMERS, X, tiny
from tests.monitor.unusual_attention import UnrelatedNames
from tests.monitor.watched_training import listening, train
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
MAKERS["unrelated names"] = lambda: tiny_gpt(UnrelatedNames(), UnrelatedNames())
PATCHED_MODULES: list[Any] = [F, varlen, torch.utils.checkpoint, torch.nn.utils, masking_utils, modeling_utils]


def snapshot(model: nn.Module) -> Any:
    """Everything that attach may change. Dictionaries, such as hooks, are compared by content."""
    modules = {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
    names = {place.__name__: dict(vars(place)) for place in PATCHED_MODULES}
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return modules, names, torch._dynamo.config.get_config_copy(), implementation, type(model).__mro__


@pytest.mark.parametrize("attention", ["kernels", "keep"])
@pytest.mark.parametrize("name", MAKERS)
def test_detach_restores_the_model_and_all_patched_modules(name: str, attention: Any) -> None:
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
    for restored, original in zip(snapshot(model), before, strict=True):
        assert restored == original


class StoresPatchedFunction(nn.Module):
    """Stores PyTorch's attention function in the first forward."""

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
def test_objects_that_stored_the_patched_function_get_pytorchs_back_on_close() -> None:
    model = tiny_gpt(StoresPatchedFunction())
    with attach(model, **EVERY_STEP) as agent:
        torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
        agent.step(1.0)
        [stored] = [module for module in model.modules() if isinstance(module, StoresPatchedFunction)]
        assert stored.backend is not discovery.SDPA
    assert [stored.backend, stored.bound.func, *stored.backends] == [discovery.SDPA] * 3
    torch.save(model, io.BytesIO())


@pytest.mark.promise("A25")
def test_close_searches_objects_only_if_one_stored_the_patched_function(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr(interception, "_restore_in_objects", lambda: searched.append(1))
    gc.collect()  # garbage of earlier tests may have references to foreshock's functions
    for layer, times in ((CausalSelfAttention(16, 2), 0), (StoresPatchedFunction(), 1)):
        model = tiny_gpt(layer)
        with attach(model, **EVERY_STEP) as agent:
            torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
            agent.step(1.0)
        assert len(searched) == times


@pytest.mark.execution("torch TransformerEncoder", "eager")
@pytest.mark.promise("A25")
@pytest.mark.parametrize("when", ["attach", "close"])
def test_interrupted_attach_or_close_restores_pytorchs_functions(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like Ctrl-C in a notebook while attach or close searches all modules."""
    pytorchs = F.scaled_dot_product_attention, FLEX.__code__, torch._dynamo.config.skip_nnmodule_hook_guards

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    holder = types.ModuleType("holder")
    monkeypatch.setitem(sys.modules, "holder", holder)
    model = tiny_gpt()
    if when == "close":
        agent = attach(model, **EVERY_STEP)
        vars(holder)["taken"] = F.scaled_dot_product_attention
        monkeypatch.setattr(interception, "places_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            agent.close()
    else:
        monkeypatch.setattr(interception, "rebind_flex", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attach(model, **EVERY_STEP)
    assert (F.scaled_dot_product_attention, FLEX.__code__, torch._dynamo.config.skip_nnmodule_hook_guards) == pytorchs
    monkeypatch.undo()
    with attach(tiny_gpt(), **EVERY_STEP):
        assert F.scaled_dot_product_attention is not pytorchs[0]
    assert F.scaled_dot_product_attention is pytorchs[0]


def test_fast_path_in_evaluation_is_unchanged_and_later_training_counts() -> None:
    torch.manual_seed(0)
    model = tiny_gpt(encoder_layer(), encoder_layer()).eval()
    with torch.no_grad():
        expected = model(batch(0))
    with listening(model) as (agent, listener):
        with torch.no_grad():
            found = model(batch(0))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        model.train()
        torch.autograd.backward(next_token_loss(model(batch(0)), batch(0)))
        agent.step(1.0)
    assert counted_rows(listener) == [[24] * 4]


@pytest.mark.promise("A25")
@pytest.mark.parametrize("attention", ["kernels", "keep"])
@pytest.mark.parametrize("name", ["nanoGPT", "Llama"])
def test_dropped_agent_is_collected_with_its_model_and_sends_its_samples(name: str, attention: Any) -> None:
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
    references = weakref.ref(model), weakref.ref(agent)
    model = agent = out = None
    assert all(is_garbage_collected(each) for each in references)
    assert snapshot(nn.Module())[1:3] == before[1:3]
    assert [(event.kind, event.step) for event in events][-2:] == [("sample", 2), ("finished", 2)]


@pytest.mark.promise("A25")
def test_dropped_agent_detaches_at_once_but_never_within_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A collection between a forward and its recompute must not detach, because the recompute would fail."""
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


def is_garbage_collected(reference: weakref.ref[Any]) -> bool:
    """Whether the object is collected, at the latest once the closing threads have sent its last samples."""
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "foreshock-close":
                thread.join(20)
        if reference() is None or time.monotonic() > deadline:
            return reference() is None


@pytest.mark.parametrize("mode", ["row_corrected", "plain"])
def test_detached_agent_refuses_to_switch_heads(mode: str) -> None:
    agent = attach(tiny_gpt(), **EVERY_STEP)
    agent.detach()
    with pytest.raises(ValueError, match="the agent was detached from its model"):
        agent.set_mode([(0, 0)], mode, reason="a drift")
    agent.close()


ATTENTION_SETTINGS = ["kernels", "keep"]


def llama() -> nn.Module:
    return tiny("Llama", **DECODER)


def logits(model: nn.Module) -> Tensor:
    out: Any = model(X)
    return getattr(out, "logits", out)  # type: ignore[no-any-return]


def copy_by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def copy_by_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": copy_by_pickle,
    "torch.save": copy_by_torch_save,
    "AveragedModel": lambda model: AveragedModel(model).module,
}


def foreshock_names(model: nn.Module) -> list[str]:
    """The attributes and hooks of foreshock in all modules."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{key}" for key in vars(module) if "foreshock" in key or key == "__getstate__"]
        for key, value in vars(module).items():
            if key.endswith(("_hooks", "_with_kwargs", "_always_called")) and value:
                found.append(f"{name}.{key}")
    return found


def every_copy() -> Iterator[Any]:
    """Each copy function with each model and attention setting; the quick tier has fewer combinations."""
    for copy_function, make, attention in itertools.product(COPIES, (tiny_gpt, llama), ATTENTION_SETTINGS):
        quick = copy_function == "copy.deepcopy" or attention == "keep"
        yield pytest.param(copy_function, make, attention, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("copy_function", "make", "attention"), [*every_copy()])
def test_copy_is_unwatched_and_can_be_attached(
    copy_function: str, make: Callable[[], nn.Module], attention: str
) -> None:
    model = make()
    expected = logits(model)
    with listening(model, attention=attention, probe_rows=10**6) as (agent, listener):
        clone = COPIES[copy_function](model)
        assert not foreshock_names(clone)
        assert torch.equal(logits(clone), expected)
        torch.autograd.backward(logits(clone).square().mean())
        agent.step(1.0)
        agent.step(1.0)
        attach(clone, **EVERY_STEP).close()
        torch.autograd.backward(logits(model).square().mean())
        agent.step(1.0)
    assert [sum(sample) for sample in counted_rows(listener)] == [0, 0, len(counted_rows(listener)[0]) * 12]
    assert not foreshock_names(model)


def test_exported_program_contains_nothing_of_foreshock(tmp_path: Path) -> None:
    model = tiny_gpt().eval()
    with attach(model, **EVERY_STEP):
        program = torch.export.export(model, (batch(0),))
    assert not [node for node in program.graph.nodes if "foreshock" in str(node.target)]
    torch.testing.assert_close(program.module()(batch(0)), model(batch(0)))


@pytest.mark.parametrize("attention", ATTENTION_SETTINGS)
def test_changing_the_attention_implementation_mid_run_keeps_counting(attention: str) -> None:
    model: Any = llama()
    model.set_attn_implementation("eager")
    with listening(model, attention=attention, probe_rows=10**6) as (agent, listener):
        for implementation in ("eager", "sdpa", "eager"):
            model.set_attn_implementation(implementation)
            torch.autograd.backward(logits(model).square().mean())
            agent.step(1.0)
    assert counted_rows(listener) == [[12] * 8] * 3
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("attention", ATTENTION_SETTINGS)
def test_two_threads_with_own_models_count_separately(attention: str) -> None:
    barrier, models = threading.Barrier(2), [tiny_gpt(seed=seed) for seed in range(2)]
    settings: dict[str, Any] = {"attention": attention, "probe_rows": 10**6}

    def trained(model: nn.Module, agent: Agent) -> None:
        for step in range(6):
            barrier.wait(60)
            train(agent, model, [step])

    with (
        listening(models[0], **settings) as first,
        listening(models[1], **settings) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        list(threads.map(trained, models, [first[0], second[0]]))
    assert [counted_rows(listener) for _, listener in (first, second)] == [[[24] * 4] * 6] * 2


@pytest.mark.parametrize("attention", ATTENTION_SETTINGS)
def test_rollout_in_another_thread_changes_neither_counts_nor_losses(
    attention: str,
) -> None:
    with attach(plain := tiny_gpt(), quiet=True) as agent:
        expected = train(agent, plain, 6)
    model, stop, rollouts = tiny_gpt(), threading.Event(), threading.Semaphore(0)

    def run_rollouts() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(batch(99, rows=1))
                rollouts.release()

    with listening(model, attention=attention, probe_rows=10**6) as (agent, listener), ThreadPoolExecutor(1) as thread:
        rollout_future, losses = thread.submit(run_rollouts), []
        for step in range(6):
            assert rollouts.acquire(timeout=60)
            losses += train(agent, model, [step])
        stop.set()
        rollout_future.result()
    assert counted_rows(listener) == [[24] * 4] * 6
    if attention == "kernels":
        torch.testing.assert_close(losses, expected)
    else:
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))


class InterruptedAttention(CausalSelfAttention):
    """Raises KeyboardInterrupt before it calls the attention function."""

    interrupts = True

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.interrupts:
            raise KeyboardInterrupt
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_interrupted_forward_leaves_no_layer_active() -> None:
    model = tiny_gpt(InterruptedAttention(16, 2), CausalSelfAttention(16, 2))
    x = torch.randn(2, 2, 12, 8, requires_grad=True)
    with listening(model) as (agent, listener):
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        torch.autograd.backward(F.scaled_dot_product_attention(x, x, x).sum())
        InterruptedAttention.interrupts = False
        train(agent, model, 1)
        InterruptedAttention.interrupts = True
    assert counted_rows(listener) == [[24] * 4]


def test_wrapper_bound_while_attached_stays_bound_and_calls_pytorch_after_detach() -> None:
    original = F.scaled_dot_product_attention
    x = torch.randn(1, 2, 5, 8)
    try:
        with listening(tiny_gpt()) as (_, listener):
            stored = F.scaled_dot_product_attention

            def wrapper(*args: Any, **options: Any) -> Tensor:
                return stored(*args, **options) * 2

            vars(F)["scaled_dot_product_attention"] = wrapper
        assert F.scaled_dot_product_attention is wrapper
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), original(x, x, x) * 2)
        with attach(tiny_gpt(), **EVERY_STEP):
            assert torch.equal(stored(x, x, x), original(x, x, x))
        assert F.scaled_dot_product_attention is wrapper
    finally:
        vars(F)["scaled_dot_product_attention"] = original
    assert not [row for row in counted_rows(listener) if any(row)]


class CustomDeepcopy(CausalSelfAttention):
    """Copies its __dict__, as some code for weight averages does."""

    deep = True

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = type(self).__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo) if self.deep else dict(self.__dict__)
        return copied


class CustomShallowCopy(CustomDeepcopy):
    deep = False


@pytest.mark.promise("A25")
@pytest.mark.parametrize("kind", [CustomDeepcopy, CustomShallowCopy])
def test_copy_by_custom_deepcopy_counts_nothing_and_is_clean_after_close(
    kind: type[CustomDeepcopy],
) -> None:
    model = tiny_gpt(kind(16, 2))
    with listening(model, attention="keep", probe_rows=999) as (agent, listener):
        second = copy.deepcopy(model)
        for step in range(2):
            second(batch(step)).sum().backward()
            train(agent, model, [step])
        third = copy.deepcopy(model)
        attach(third, **EVERY_STEP).close()  # a copy can be attached while the original is watched
    assert counted_rows(listener) == [[24, 24]] * 2
    assert [foreshock_names(each) for each in (model, second, third)] == [[], [], []]
    attach(second, **EVERY_STEP).close()
