"""QK-Clip scales what a loop in float64 scales, and nothing else."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.layouts import DIM, HEADS, LAYOUTS, WIDTH, located, separate
from torch import Tensor, nn

from foreshock.contract.slots import Slot, identity_row
from foreshock.contract.wire import Layer
from foreshock.monitor.model.layers import HeadRows, Projection
from foreshock.monitor.qk_clip import QKClip

TAU = 100.0


def layer(number: int, kv_heads: int) -> Layer:
    return Layer(
        layer=number, name=f"l{number}", heads=tuple(range(HEADS)), kv_heads=kv_heads, head_dim=DIM, served_by="kernel"
    )


def fresh_state(layers: int = 1) -> Tensor:
    return torch.from_numpy(identity_row()).repeat(layers * HEADS, 1)


def seen(state: Tensor, scores: list[float]) -> None:
    state.view(torch.float64)[:, Slot.SCORE_MAX] = torch.tensor(scores, dtype=torch.float64)


def taken(clip: QKClip) -> tuple[float, int, int]:
    """The smallest gamma, heads that were scaled, and scalings."""
    least, counts = clip.done
    return float(least.min()), int((counts > 0).sum()), int(counts.sum())


def largest_scores(projection: Projection, tokens: Tensor) -> Tensor:
    """The largest score of every query head over all pairs of tokens [T, WIDTH], in float64, without biases."""
    query, key = (side.read().weights.double() for side in (projection.query, projection.key))
    key = key.repeat_interleave(len(query) // len(key), 0)
    rows = torch.einsum("hde,te->htd", query, tokens.double())
    columns = torch.einsum("hde,te->htd", key, tokens.double())
    return (rows @ columns.mT / math.sqrt(DIM)).flatten(1).max(1).values


@pytest.mark.promise("A26")
@pytest.mark.parametrize(("layout", "kv_heads"), LAYOUTS)
def test_in_every_layout_heads_past_the_threshold_come_to_it_and_the_others_keep_every_bit(
    layout: Callable[[Tensor, Tensor], nn.Module], kv_heads: int
) -> None:
    torch.manual_seed(kv_heads)
    query, key = torch.randn(HEADS, DIM, WIDTH), torch.randn(kv_heads, DIM, WIDTH)
    query *= torch.tensor([400.0, 1.0, 30.0, 90.0]).repeat(HEADS)[:HEADS].view(-1, 1, 1)
    module = layout(query, key)
    projection = located(module, kv_heads)
    tokens = torch.randn(9, WIDTH) / 4
    before = largest_scores(projection, tokens)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    state = fresh_state()
    clip = QKClip([layer(0, kv_heads)], [projection], state, threshold=TAU)
    assert clip.refused == {}
    seen(state, before.tolist())
    clip.after_step()
    after = largest_scores(projection, tokens)
    assert bool((before > TAU).any())
    torch.testing.assert_close(after, before.clamp(max=TAU), rtol=1e-5, atol=0)
    untouched = before <= TAU
    assert torch.equal(after[untouched], before[untouched])
    # the loop: each head's rows by its gamma, all other rows as they were
    gamma = (TAU / before).clamp(max=1.0)
    grouped = kv_heads < HEADS
    expected = [
        (projection.query, query, gamma if grouped else gamma.sqrt()),
        (projection.key, key, torch.ones(kv_heads) if grouped else gamma.sqrt()),
    ]
    for side, true, factors in expected:
        for head, factor in enumerate(factors.tolist()):
            torch.testing.assert_close(
                side.read().weights[head].double(), true[head].double() * factor, rtol=1e-6, atol=0
            )
    touched = sum(int((parameter != weights[name]).sum()) for name, parameter in module.named_parameters())
    sides = 1 if grouped else 2
    assert touched <= sides * int((before > TAU).sum()) * DIM * (WIDTH + 1)  # rows of those heads, and their biases
    least, heads, scalings = taken(clip)
    assert least == pytest.approx(float(gamma.min()))
    assert heads == scalings == int((before > TAU).sum())


@given(st.lists(st.sampled_from([-math.inf, -500.0, 0.0, TAU, math.inf, math.nan]), min_size=HEADS, max_size=HEADS))
def test_maxima_that_are_negative_zero_at_the_threshold_or_not_finite_scale_nothing(scores: list[float]) -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    state = fresh_state()
    clip = QKClip([layer(0, HEADS)], [located(module)], state, threshold=TAU)
    seen(state, scores)
    clip.after_step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), weights, strict=True))
    assert taken(clip) == (1.0, 0, 0)


def test_each_step_is_judged_by_its_own_scores_and_a_sample_still_holds_those_since_the_last() -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    state = fresh_state()
    clip = QKClip([layer(0, HEADS)], [located(module)], state, threshold=TAU)
    seen(state, [2 * TAU] * HEADS)
    clip.after_step()
    once = [parameter.detach().clone() for parameter in module.parameters()]
    seen(state, [TAU / 2] * HEADS)
    clip.after_step()  # the large score was a step ago
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), once, strict=True))
    clip.before_sample()
    assert state.view(torch.float64)[:, Slot.SCORE_MAX].tolist() == [2 * TAU] * HEADS


def test_layers_that_cannot_be_scaled_are_refused_with_a_sentence() -> None:
    shared, frozen = (separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)) for _ in range(2))
    frozen.requires_grad_(False)
    normalised = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    normalised.q_norm = nn.LayerNorm(DIM)
    elsewhere = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH)).to("meta")
    modules = (shared, frozen, normalised, elsewhere)
    found = [located(module) for module in (shared, *modules)]
    weights = [p.detach().clone() for module in modules[:3] for p in module.parameters()]
    state = fresh_state(6)
    clip = QKClip([layer(n, HEADS) for n in range(6)], [*found, "W_Q and W_K were not found"], state, threshold=TAU)
    assert clip.refused == {
        0: "it shares W_Q or W_K with layer 1, which would be scaled with it",
        1: "it shares W_Q or W_K with layer 0, which would be scaled with it",
        2: "its weight is frozen",
        3: "its scores do not follow from its weights (separate (q_proj, k_proj), norms of the weights only: "
        "heads are normalised)",
        4: "its weight is on meta but its statistics are on cpu",
        5: "W_Q and W_K were not found",
    }
    seen(state, [4 * TAU] * 6 * HEADS)
    clip.after_step()
    after = [p for module in modules[:3] for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))
    assert taken(clip) == (1.0, 0, 0)


def test_rows_that_lie_apart_are_scaled_and_key_heads_that_are_read_in_turn_are_left_alone() -> None:
    # features before heads: feature d of head h is output d * HEADS + h; keys of two heads, read as 0, 1, 0, 1
    module = separate(torch.ones(HEADS, DIM, WIDTH), torch.ones(2, DIM, WIDTH))
    query, key = (module.get_submodule(name) for name in ("q_proj", "k_proj"))
    projection = Projection(
        "showed by a call",
        HeadRows(query, "weight", tuple(range(HEADS)), DIM, HEADS),
        HeadRows(key, "weight", (0, DIM, 0, DIM), DIM),
        module,
    )
    state = fresh_state()
    clip = QKClip([layer(0, 2)], [projection], state, threshold=TAU)
    seen(state, [1.0, 4 * TAU, 1.0, 1.0])
    clip.after_step()
    weights = query.weight
    assert isinstance(weights, Tensor)
    assert weights[:, 0].tolist() == [1.0, 0.25, 1.0, 1.0] * DIM
    assert torch.equal(key.weight, torch.ones_like(key.weight))  # type: ignore[arg-type]


def test_a_parameter_that_was_replaced_is_noticed() -> None:
    module = separate(torch.randn(HEADS, DIM, WIDTH), torch.randn(HEADS, DIM, WIDTH))
    clip = QKClip([layer(0, HEADS)], [located(module)], fresh_state(), threshold=TAU)
    assert not clip.stale
    module.get_submodule("q_proj").weight = nn.Parameter(torch.randn(HEADS * DIM, WIDTH))
    assert clip.stale


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_in_a_captured_step_it_follows_the_scores_of_each_replay() -> None:
    module = separate(torch.ones(HEADS, DIM, WIDTH), torch.ones(HEADS, DIM, WIDTH)).cuda()
    state = fresh_state().cuda()
    clip = QKClip([layer(0, HEADS)], [located(module)], state, threshold=TAU)
    clip.after_step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clip.after_step()
    for score, expected in ((4 * TAU, 0.5), (TAU, 0.5), (16 * TAU, 0.125)):
        seen(state, [score] + [1.0] * (HEADS - 1))
        graph.replay()
        for name in ("q_proj", "k_proj"):
            weight = module.get_parameter(f"{name}.weight")
            assert torch.equal(weight[:DIM], torch.full_like(weight[:DIM], expected))
            assert torch.equal(weight[DIM:], torch.ones_like(weight[DIM:]))
