"""Our kernels are proven to compute what a layer computes before they serve it; a CPU stands in for the GPU here."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.doubles import Listener
from tests.monitor.test_foreign_models import DECODER, X, tiny
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, batch, tiny_gpt, train_step
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention
from foreshock.monitor import Agent, attach
from foreshock.monitor import attach as _attach_function
from foreshock.monitor.attention import proof, watched_layer
from foreshock.monitor.attention.proof import Proof, both_ways, difference_from_own

EVERY_STEP: dict[str, Any] = {
    "attention": "auto",
    "probe_rows": 5,
    "sample_every_steps": 1,
    "sample_every_seconds": 0.0,
    "strict": True,
    "quiet": True,
    "url": None,
}

pytestmark = [  # of torch.compile's own doing
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _a_cpu_counts_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(_attach_function.__globals__, "_accelerated", lambda device: True)
    yield
    torch._dynamo.reset()


def watch(
    model: nn.Module, steps: int = 4, *, run: Any = None, **overrides: Any
) -> tuple[Agent, Listener, list[Tensor]]:
    agent, listener, losses = attach(model, **{**EVERY_STEP, **overrides}), Listener(), []
    agent.subscribe(listener)
    with agent:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = model if run is None else run(model)
        for step in range(steps):
            losses.append(train_step(run, optimizer, step).detach())
            agent.step(losses[-1])
    return agent, listener, losses


def rows(listener: Listener) -> list[list[int]]:
    return [slot_values(s.words(), Slot.ROWS).astype(int).tolist() for s in listener.of(wire.Sample)]


WAYS: dict[str, Any] = {
    "eager": None,
    "compiled whole": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_goes_to_our_kernels_after_two_calls_that_agree_and_not_before(way: str, dtype: torch.dtype) -> None:
    model = tiny_gpt().to(dtype)
    plain = tiny_gpt().to(dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = [train_step(plain, optimizer, step).detach() for step in range(4)]
    _, listener, losses = watch(model, run=WAYS[way])
    assert rows(listener) == [[5] * 4, [5] * 4, [24] * 4, [24] * 4]
    assert all(torch.equal(a, b) for a, b in zip(losses[:2], expected[:2], strict=True))
    torch.testing.assert_close(losses[2:], expected[2:], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_grouped_heads_and_models_of_transformers_are_proven_too() -> None:
    _, listener, _ = watch(tiny_gpt(GroupedQueryAttention(16, 4, 2)))
    assert rows(listener)[-1] == [24] * 4
    model: Any = tiny("Qwen3", **DECODER)
    agent, listener = attach(model, **EVERY_STEP), Listener()
    agent.subscribe(listener)
    with agent:
        for _ in range(3):
            torch.autograd.backward(model(X).logits.square().mean())
            agent.step(1.0)
    assert rows(listener) == [[5] * 8, [5] * 8, [12] * 8]


def half_as_large(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel that forgets half of the scale."""
    return flash_attention(
        query, key, value, **{**options, "scale": (options.get("scale") or query.shape[3] ** -0.5) / 2}
    )


def careless_gradient(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel that is right forwards, and gives the keys a tenth less than their gradient."""
    return flash_attention(query, key * 0.9 + (key * 0.1).detach(), value, **options)


def one_row_off(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel that lets the last row see one key less."""
    out = flash_attention(query, key, value, **options)
    last = F.scaled_dot_product_attention(query[:, :, -1:], key[:, :, :-1], value[:, :, :-1], enable_gqa=True)
    assert isinstance(out, Tensor)
    return torch.cat([out[:, :, :-1], last.to(out.dtype)], 2)


@pytest.mark.parametrize("wrong", [half_as_large, careless_gradient, one_row_off])
def test_a_kernel_that_differs_in_any_way_never_serves_and_the_reason_stands_in_the_report(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "flash_attention", wrong)
    monkeypatch.setattr(watched_layer, "flash_attention", wrong)
    model, plain = tiny_gpt(), tiny_gpt()
    for weights in (model, plain):
        torch.manual_seed(9)
        for weight in weights.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    agent, listener, losses = watch(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert all(torch.equal(loss, train_step(plain, optimizer, step)) for step, loss in enumerate(losses))
    assert {count for sample in rows(listener) for count in sample} <= {0, 5}
    assert "kept, sampled: the " in agent.report()
    assert "of our kernels" in agent.report()


class WithDropout(CausalSelfAttention):
    """Drops a tenth of its weights."""

    def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


def test_what_cannot_be_compared_stays_with_its_own_attention() -> None:
    agent, listener, _ = watch(tiny_gpt(WithDropout(16, 2), CausalSelfAttention(16, 2)))
    assert rows(listener)[2:] == [[5, 5, 24, 24], [0, 0, 24, 24]]  # the last step is not measured
    assert "1 x kernels (blocks.1)" in agent.report()
    assert "1 x kept, sampled: our kernels would draw other dropout masks than it does" in agent.report()
    assert "watched 2 of 2 attention layers" in agent.report()


def test_a_gradient_that_is_differentiated_again_keeps_the_layer() -> None:
    model = tiny_gpt()
    agent = attach(model, **EVERY_STEP)
    with agent, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for _ in range(4):
            loss = model(batch(0)).square().mean()
            first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            torch.autograd.backward(torch.stack([g.square().sum() for g in first]).sum())
            agent.step(1.0)
        assert agent.report().count("its gradient is differentiated again") >= 1


def test_operands_that_are_not_finite_prove_nothing_and_condemn_nothing() -> None:
    x = torch.randn(1, 2, 8, 8)
    spec = AttentionSpec(scale=8**-0.5, causal="top_left", numerics="float32")
    told = Proof()
    told.compare(torch.full_like(x, math.inf), x, x, x, x, spec)
    assert (told.calls, told.reason) == (0, None)


def test_the_truth_is_pytorchs_function_in_float64_and_an_error_is_judged_by_its_own() -> None:
    torch.manual_seed(3)
    operands = tuple(torch.randn(2, 4, 33, 16).bfloat16() for _ in range(4))
    spec = AttentionSpec(scale=0.25, causal="top_left", numerics="kernel")

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.25)

    out = both_ways(own, *operands)[0]
    assert not isinstance(difference_from_own(operands, out, spec), str)
    other = F.scaled_dot_product_attention(operands[0], operands[1], operands[2], scale=0.25)
    told = difference_from_own(operands, other, spec)
    assert isinstance(told, str)
    assert "from that of the attention that it seems to call" in told
    assert np.isfinite(float(told.split("differs by ")[1].split()[0]))


DOUBLES = [
    pytest.param((2, 4, 4, 33, 16), 1.0, "top_left", id="causal"),
    pytest.param((1, 4, 2, 140, 64), 3.0, "top_left", id="sharp, grouped heads"),
    pytest.param((1, 2, 1, 200, 24), 0.2, "none", id="even, not causal"),
]


def doubles(sizes: tuple[int, ...], spread: float) -> tuple[Tensor, ...]:
    batches, heads, key_heads, length, width = sizes
    random = torch.Generator().manual_seed(17)
    return tuple(
        torch.randn(batches, h, length, width, generator=random, dtype=torch.float64) * scale
        for h, scale in ((heads, spread), (key_heads, spread), (key_heads, 1.0), (heads, 1.0))
    )


def own_in_float64(operands: tuple[Tensor, ...], causal: Any) -> Tensor:
    query, key, value, _ = operands
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal == "top_left", enable_gqa=query.shape[1] != key.shape[1]
        )


@pytest.mark.parametrize(("sizes", "spread", "causal"), DOUBLES)
def test_operands_in_float64_are_judged_by_what_a_rounding_of_them_does(
    sizes: tuple[int, ...], spread: float, causal: Any
) -> None:
    operands = doubles(sizes, spread)
    spec = AttentionSpec(scale=sizes[-1] ** -0.5, causal=causal, numerics="float64")
    before = torch.random.get_rng_state()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not isinstance(difference_from_own(operands, own_in_float64(operands, causal), spec), str)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("error", [1e-13, 1e-9])
@pytest.mark.parametrize(("sizes", "spread", "causal"), DOUBLES)
def test_an_error_far_below_that_of_other_types_is_found_in_float64(
    sizes: tuple[int, ...], spread: float, causal: Any, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return flash_attention(query, key, value * (1 + error), **options)

    monkeypatch.setattr(proof, "flash_attention", off)
    operands = doubles(sizes, spread)
    spec = AttentionSpec(scale=sizes[-1] ** -0.5, causal=causal, numerics="float64")
    told = difference_from_own(operands, own_in_float64(operands, causal), spec)
    assert isinstance(told, str)
    assert "the output of our kernels is off by" in told


def test_a_model_in_float64_goes_to_our_kernels() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, listener, _ = watch(tiny_gpt().double())
    assert rows(listener)[-1] == [24] * 4


def half_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the queries of each call of our kernels in a proof."""
    seen: list[tuple[int, ...]] = []

    def noting(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        seen.append(tuple(query.shape))
        return flash_attention(query, key, value, **options)

    monkeypatch.setattr(proof, "flash_attention", noting)
    return seen


def told_of(*calls: tuple[Tensor, ...], spec: AttentionSpec) -> Proof:
    told = Proof()
    for query, key, value, grad in calls:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        told.compare(grad, out, query, key, value, spec)
    return told


def test_a_second_call_like_the_first_is_compared_in_its_last_heads_and_another_kind_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = half_calls(monkeypatch)
    spec = AttentionSpec(scale=16**-0.5, causal="top_left", numerics="float32")
    one, same, longer = (tuple(torch.randn(3, heads, length, 16) for heads in (8, 4, 4, 8)) for length in (20, 20, 21))
    assert told_of(one, same, spec=spec).holds
    assert seen == [(3, 8, 20, 16), (1, 4, 20, 16)]
    seen.clear()
    assert told_of(one, longer, spec=spec).holds
    assert seen == [(3, 8, 20, 16), (3, 8, 21, 16)]


def test_a_second_call_that_differs_is_compared_whole_and_never_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(scale=16**-0.5, causal="top_left", numerics="float32")
    calls = 0

    def wrong_from_the_second_on(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return (flash_attention if calls == 1 else careless_gradient)(query, key, value, **options)

    monkeypatch.setattr(proof, "flash_attention", wrong_from_the_second_on)
    one, same = (tuple(torch.randn(2, 2, 12, 16) for _ in range(4)) for _ in range(2))
    told = told_of(one, same, spec=spec)
    assert not told.holds
    assert told.reason is not None
    assert "gradient of the keys of our kernels" in told.reason
    assert calls == 3
