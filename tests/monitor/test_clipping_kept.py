"""QK-Clip where attention is kept: by the largest score of every row, in some steps, and never by a sampled one."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.doubles import Listener
from tests.monitor.layouts import DIM, HEADS, WIDTH, separate
from tests.monitor.probing import probed, tensors
from tests.monitor.test_clipping import EVERY, TAU, changed, of_queries_and_keys, two_layers
from tests.monitor.test_flex import Flex
from tests.monitor.test_scaling import fresh_state, layer, seen
from tests.monitor.tiny_models import AttentionWithMask, CausalSelfAttention
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.monitor import attach
from foreshock.monitor.attention import probe
from foreshock.monitor.attention.probe import Sampling
from foreshock.monitor.attention.probed_rows import Call, raise_largest
from foreshock.monitor.model.layers import find_projection
from foreshock.monitor.qk_clip import QKClip

KEPT: dict[str, Any] = EVERY | {
    "attention": "keep", "qk_clip": "always", "qk_clip_every_steps": 1, "probe_rows": 1, "numerics": "float32",
}  # fmt: skip


def looked_at(query: Tensor, key: Tensor, spec: AttentionSpec, mask: Tensor | None = None) -> list[float]:
    """The largest score of each head, one after the other, in float64."""
    query, key = query.double(), key.double()
    group, longer = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    largest = [-math.inf] * query.shape[1]
    for entry, head, row, column in torch.cartesian_prod(*map(torch.arange, (*query.shape[:3], key.shape[2]))).tolist():
        diagonal = row + (longer if spec.causal != "top_left" else 0)
        hidden = (spec.right >= 0 and column > diagonal + spec.right) or (0 <= spec.window_left < diagonal - column)
        if hidden or (mask is not None and not mask[entry, 0, row, column]):
            continue
        score = float(query[entry, head, row] @ key[entry, head // group, column]) * spec.scale
        score = spec.softcap * math.tanh(score / spec.softcap) if spec.softcap else score
        largest[head] = max(largest[head], score)
    return largest


SPECS = [
    AttentionSpec(0.25),
    AttentionSpec(0.25, "top_left"),
    AttentionSpec(0.25, "bottom_right", window_left=3),
    AttentionSpec(0.25, window_left=2, window_right=1, softcap=5.0),
]


@pytest.mark.parametrize("at_once", [2**24, 2**8])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_the_largest_of_all_rows_is_that_of_a_float64_loop_in_one_piece_and_in_many(
    spec: AttentionSpec, masked: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.HELD_BYTES", at_once)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.LEAST_ROWS", 3)
    query, key, value, grad = tensors(torch.bfloat16, length=11)
    seen = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None
    if seen is not None:
        seen[1, :, 4] = False  # a row that sees nothing
    largest = torch.full((4,), -math.inf)
    raise_largest(largest, Call(grad, grad, query, key, value, seen), spec)
    assert largest.tolist() == pytest.approx(looked_at(query, key, spec, seen), rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_no_sample_of_rows_holds_a_larger_score(seed: int, rows: int) -> None:
    query, key, value, grad = tensors(torch.float32, length=10, seed=seed)
    words = probed(query, key, value, grad, grad, Sampling(rows), numerics="float32", causal="top_left")
    largest = torch.full((4,), -math.inf)
    raise_largest(largest, Call(grad, grad, query, key, value), AttentionSpec(0.25, "top_left", numerics="float32"))
    assert (slot_values(words, Slot.SCORE_MAX) <= largest.numpy() * (1 + 1e-6)).all()


def weights_after(*attentions: nn.Module, steps: int = 3, **settings: Any) -> list[Tensor]:
    model = two_layers(*attentions)
    with attach(model, **settings) as agent:
        assert changed(agent, model, steps)
        assert agent.faults == {}
    return of_queries_and_keys(model)


def test_a_kept_attention_is_scaled_as_our_kernels_would_have_it_scaled_though_one_row_is_sampled() -> None:
    ours = weights_after(**(KEPT | {"attention": "kernels"}))
    torch.testing.assert_close(weights_after(**KEPT), ours, rtol=1e-6, atol=0)


def test_a_layer_that_our_kernels_do_not_serve_is_scaled_by_all_of_its_rows_too() -> None:
    both = []
    for attention in ("kernels", "keep"):
        torch.manual_seed(2)
        layers = CausalSelfAttention(16, 2), AttentionWithMask(16, 2)
        both.append(weights_after(*layers, **(KEPT | {"attention": attention})))
    torch.testing.assert_close(*both, rtol=1e-6, atol=0)


def test_only_steps_that_look_at_all_rows_scale_and_no_sampled_score_does() -> None:
    model, listener = two_layers(), Listener()
    with attach(model, **(KEPT | {"qk_clip_every_steps": 3, "probe_rows": 10**6})) as agent:
        agent.subscribe(listener)
        assert [changed(agent, model) for _ in range(7)] == [False, False, True, False, False, True, False]
    sampled = [sample.words() for sample in listener.of(wire.Sample)]
    assert len(sampled) == 7
    assert all(slot_values(words, Slot.SCORE_MAX).max() > TAU for words in sampled if words is not None)


def test_all_rows_are_looked_at_while_it_is_on_and_in_its_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Tensor] = []

    def noted(largest: Tensor, *given: Any) -> None:
        looks.append(largest)
        raise_largest(largest, *given)

    monkeypatch.setattr(probe, "raise_largest", noted)
    model = two_layers()
    with attach(model, **(KEPT | {"qk_clip": "never", "qk_clip_every_steps": 2})) as agent:
        assert not changed(agent, model, 3)
        assert not looks
        agent.set_qk_clip(True, "the scores grow")
        assert [changed(agent, model) for _ in range(3)] == [True, False, True]
        assert len(looks) == 2 * 2  # of either layer, after steps 4 and 6
        agent.set_qk_clip(False, "enough")
        assert not changed(agent, model, 4)
        assert len(looks) == 2 * 2


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_compiled_model_is_scaled_as_an_eager_one() -> None:
    eager = weights_after(**KEPT)
    model = two_layers()
    with attach(model, **(KEPT | {"qk_clip": "never"})) as agent:
        changed(agent, model)  # shows which rows are which head's
        compiled: Any = torch.compile(model, backend="aot_eager")
        agent.set_qk_clip(True, "the scores grow")
        assert changed(agent, compiled, 3)
    torch.testing.assert_close(of_queries_and_keys(model), eager, rtol=1e-6, atol=0)
    torch._dynamo.reset()


@pytest.mark.parametrize("score", [-math.inf, -500.0, 0.0, 100.0, math.inf, math.nan])
def test_a_largest_score_that_is_unknown_or_not_finite_or_below_the_threshold_scales_nothing(score: float) -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    state, projection = fresh_state(), find_projection(module, HEADS, HEADS, DIM)
    largest = torch.full((HEADS,), score)
    clip = QKClip([layer(0, HEADS)], [projection], state, threshold=100.0, largest=largest)
    clip.find([projection], [True])
    seen(state, [300.0 if score == -math.inf else -math.inf] * HEADS)  # of a sample: it is not gone by
    clip.after_step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), weights, strict=True))
    assert largest.tolist() == [-math.inf] * HEADS, "each step is judged by its own"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_the_pass_cannot_look_at_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *operands: None)  # which refuses to train on a CPU
    model = two_layers(Flex(), CausalSelfAttention(16, 4))
    with attach(model, **KEPT) as agent:
        assert changed(agent, model, 2)
        assert "left out: 1 layers (blocks.0): a function or ALiBi slopes change its scores" in agent.report()
    model = two_layers()
    with attach(model, **KEPT) as agent:
        assert changed(agent, model, 2)
        monkeypatch.setattr(probe, "_capturing", lambda query: True)
        assert not changed(agent, model, 2)
        assert "left out: 2 layers (blocks.0, blocks.1): its step was captured in a CUDA graph" in agent.report()


def test_a_pass_that_fails_scales_nothing_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no room")

    model = two_layers()
    with attach(model, **(KEPT | {"strict": False})) as agent:
        assert changed(agent, model)
        monkeypatch.setattr(probe, "raise_largest", fails)
        assert not changed(agent, model)
        monkeypatch.undo()
        assert not changed(agent, model, 2)
        assert "the probe is off (RuntimeError: no room)" in agent.report()
