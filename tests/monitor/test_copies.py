"""Copies and exports of a watched model leave clean; threads, interrupts and transforms leave nothing behind."""

import copy
import io
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_foreign_models import DECODER, X, tiny
from tests.monitor.tiny_models import CausalSelfAttention, batch, next_token_loss, tiny_gpt, train_step
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import Agent, attach, detach
from foreshock.monitor.callbacks.huggingface import ForeshockCallback

WAYS = ["kernels", "keep"]


def llama() -> nn.Module:
    return tiny("Llama", **DECODER)


def logits(model: nn.Module) -> Tensor:
    out: Any = model(X)
    return getattr(out, "logits", out)  # type: ignore[no-any-return]


def listening(model: nn.Module, **overrides: Any) -> tuple[Agent, Listener]:
    agent, listener = attach(model, **{**EVERY_STEP, **overrides}), Listener()
    agent.subscribe(listener)
    return agent, listener


def rows(listener: Listener) -> list[list[int]]:
    return [slot_values(s.words(), Slot.ROWS).astype(int).tolist() for s in listener.of(wire.Sample)]


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
    agent, listener = listening(model, attention=attention, probe_rows=10**6)
    with agent:
        clone = COPIES[way](model)
        assert not traces(clone)
        assert torch.equal(logits(clone), expected)
        torch.autograd.backward(logits(clone).square().mean())
        agent.step(1.0)
        agent.step(1.0)
        attach(clone, **EVERY_STEP).close()
        torch.autograd.backward(logits(model).square().mean())
        agent.step(1.0)
    assert [sum(sample) for sample in rows(listener)] == [0, 0, len(rows(listener)[0]) * 12]
    assert not traces(model)


@pytest.mark.parametrize("kind", ["ModelEmaV2", "ModelEmaV3"])
def test_timms_moving_average_is_the_one_without_us_and_unwatched(kind: str) -> None:
    average_of: Any = getattr(pytest.importorskip("timm.utils", reason="pip install '.[zoo]' brings timm"), kind)

    def averaged(*, watches: bool) -> nn.Module:
        model = tiny_gpt()
        agent = attach(model, **{**EVERY_STEP, "attention": "keep"}) if watches else None
        average, optimizer = average_of(model, decay=0.5), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = train_step(model, optimizer, step)
            if agent is not None:
                agent.step(loss)
            average.update(model)
        assert not traces(average)
        attach(average.module, **EVERY_STEP).close()
        if agent is not None:
            agent.close()
        return average  # type: ignore[no-any-return]

    alone, watched = averaged(watches=False).state_dict(), averaged(watches=True).state_dict()
    assert alone.keys() == watched.keys()
    assert all(torch.equal(alone[name], watched[name]) for name in alone)


def test_a_copy_beside_the_trainers_callback_holds_no_agent() -> None:
    model: Any = llama()
    callback = ForeshockCallback(**EVERY_STEP)
    args: Any = type("Args", (), {"process_index": 0, "n_gpu": 0, "output_dir": "unused"})()
    state: Any = type("State", (), {"global_step": 0, "max_steps": 3, "stateful_callbacks": None})()
    control: Any = None
    callback.on_train_begin(args, state, control, model=model)
    clone = copy.deepcopy(model)
    callback.on_train_end(args, state, control)
    assert not traces(clone)
    assert not traces(model)


def test_an_exported_program_is_the_models_own(tmp_path: Path) -> None:
    model = tiny_gpt().eval()
    with attach(model, **EVERY_STEP):
        program = torch.export.export(model, (batch(0),))
    assert not [node for node in program.graph.nodes if "foreshock" in str(node.target)]
    torch.testing.assert_close(program.module()(batch(0)), model(batch(0)))


def test_two_models_with_one_configuration_are_watched_and_left_apart() -> None:
    first: Any = llama()
    second: Any = type(first)(first.config)
    expected = logits(second)
    agents = [attach(m, **EVERY_STEP) for m in (first, second)]
    agents[0].close()
    assert second.config._attn_implementation == "sdpa"
    torch.testing.assert_close(logits(second), expected, rtol=1e-4, atol=1e-5)
    agents[1].close()
    assert torch.equal(logits(second), expected)


@pytest.mark.parametrize("attention", WAYS)
def test_an_implementation_that_is_set_in_the_middle_of_a_run_counts_on(attention: str) -> None:
    model: Any = llama()
    model.set_attn_implementation("eager")
    agent, listener = listening(model, attention=attention, probe_rows=10**6)
    with agent:
        for implementation in ("eager", "sdpa", "eager"):
            model.set_attn_implementation(implementation)
            torch.autograd.backward(logits(model).square().mean())
            agent.step(1.0)
    assert rows(listener) == [[12] * 8] * 3
    assert model.config._attn_implementation == "eager"


def test_detach_takes_the_agent_off_any_model_that_carries_one() -> None:
    original = F.scaled_dot_product_attention
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    assert traces(model)
    detach(model)
    detach(model)
    del agent  # held until here, or it would have left by itself
    assert not traces(model)
    assert F.scaled_dot_product_attention is original
    attach(model, **EVERY_STEP).close()


def test_attention_weights_asked_of_an_eager_model_are_given() -> None:
    model: Any = llama()
    model.set_attn_implementation("eager")
    expected = model(X, output_attentions=True).attentions
    with attach(model, **EVERY_STEP):
        got = model(X, output_attentions=True).attentions
    assert len(got) == 2
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- transforms, threads, interrupts --------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", WAYS)
def test_function_transforms_see_the_model_without_us(attention: str) -> None:
    model = tiny_gpt()
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        return next_token_loss(torch.func.functional_call(model, weights, (ids,)), ids)

    expected = torch.func.grad(loss)(weights, batch(0))
    with attach(model, **{**EVERY_STEP, "attention": attention}):
        got = torch.func.grad(loss)(weights, batch(0))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def penalty(model: nn.Module) -> list[Tensor]:
    """Gradients of a penalty on the gradient, which differentiates the backward."""
    ids = batch(0)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        first = torch.autograd.grad(next_token_loss(model(ids), ids), list(model.parameters()), create_graph=True)
        norm: Tensor = torch.stack([g.square().sum() for g in first]).sum()
        return list(torch.autograd.grad(norm, list(model.parameters()), materialize_grads=True))


def test_a_gradient_of_a_gradient_is_that_of_the_model() -> None:
    model = tiny_gpt()
    expected = penalty(model)
    with attach(model, **{**EVERY_STEP, "attention": "keep"}):
        got = penalty(model)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("attention", WAYS)
def test_a_second_thread_with_a_model_of_its_own_miscounts_nothing(attention: str) -> None:
    models = [tiny_gpt(seed=seed) for seed in range(2)]
    watched = [listening(m, attention=attention, probe_rows=10**6) for m in models]
    meeting = threading.Barrier(2)
    faults: list[BaseException] = []

    def train(model: nn.Module, agent: Agent) -> None:
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(6):
                meeting.wait(60)
                agent.step(train_step(model, optimizer, step))
        except BaseException as fault:  # told in the test's own thread
            faults.append(fault)
            meeting.abort()

    threads = [threading.Thread(target=train, args=(m, agent)) for m, (agent, _) in zip(models, watched, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent, _ in watched:
        agent.close()
    assert not faults
    assert [rows(listener) for _, listener in watched] == [[[24] * 4] * 6] * 2


@pytest.mark.parametrize("attention", WAYS)
def test_a_rollout_in_another_thread_beside_the_training_of_the_same_model_changes_no_count_and_no_loss(
    attention: str,
) -> None:
    plain = tiny_gpt()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = [train_step(plain, optimizer, step).detach() for step in range(6)]
    model = tiny_gpt()
    agent, listener = listening(model, attention=attention, probe_rows=10**6)
    over, rolled, faults = threading.Event(), threading.Semaphore(0), []

    def roll_out() -> None:
        try:
            with torch.no_grad():
                while not over.is_set():
                    model(batch(99, rows=1))
                    rolled.release()
        except BaseException as fault:  # told in the test's own thread
            faults.append(fault)
            rolled.release(100)

    thread = threading.Thread(target=roll_out)
    thread.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with agent:
        for step in range(6):
            rolled.acquire()
            losses.append(train_step(model, optimizer, step).detach())
            agent.step(losses[-1])
        over.set()
        thread.join()
    assert not faults
    assert rows(listener) == [[24] * 4] * 6
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
    agent, listener = listening(model)
    x = torch.randn(2, 2, 12, 8, requires_grad=True)
    with agent:
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        torch.autograd.backward(F.scaled_dot_product_attention(x, x, x).sum())
        StopsInside.stops = False
        agent.step(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
        StopsInside.stops = True
    assert rows(listener) == [[24] * 4]


def test_a_name_that_was_imported_while_attached_is_pytorchs_again_after_detach() -> None:
    original = F.scaled_dot_product_attention
    space: dict[str, Any] = globals()
    with attach(tiny_gpt(), **EVERY_STEP):
        space["imported_late"] = F.scaled_dot_product_attention
        assert space["imported_late"] is not original
    assert space.pop("imported_late") is original


def test_what_somebody_bound_while_attached_stays_bound_after_detach_and_is_pytorchs_attention() -> None:
    original = F.scaled_dot_product_attention
    x = torch.randn(1, 2, 5, 8)
    agent, listener = listening(tiny_gpt())
    taken = F.scaled_dot_product_attention

    def wrapper(*args: Any, **options: Any) -> Tensor:
        return taken(*args, **options) * 2

    vars(F)["scaled_dot_product_attention"] = wrapper
    try:
        agent.close()
        assert F.scaled_dot_product_attention is wrapper
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), original(x, x, x) * 2)
        with attach(tiny_gpt(), **EVERY_STEP):
            assert torch.equal(taken(x, x, x), original(x, x, x))
        assert F.scaled_dot_product_attention is wrapper
    finally:
        vars(F)["scaled_dot_product_attention"] = original
    assert not [row for row in rows(listener) if any(row)]


def test_dropout_of_a_kept_model_draws_what_it_draws_without_us() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True, dropout=0.2)
    model = tiny_gpt(layer, seed=4)

    def course() -> list[Tensor]:
        torch.manual_seed(5)
        return [next_token_loss(model(batch(0)), batch(0)), torch.get_rng_state()]

    expected = course()
    with attach(model, **{**EVERY_STEP, "attention": "keep"}):
        got = course()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
