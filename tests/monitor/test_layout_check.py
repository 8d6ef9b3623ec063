"""Norms are of the right rows or unknown: numbers of a call tell where the weights of each head are."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.executions import EVERY_STEP
from tests.monitor.test_norms import PeftLinear
from tests.monitor.watching import listening
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from foreshock.contract import wire
from foreshock.monitor import attach
from foreshock.monitor.attention import layout_check
from foreshock.monitor.attention.layout_check import Call, Numbers, confirmed
from foreshock.monitor.model.discovery import find_attention
from foreshock.monitor.model.layers import projections

HEADS, KEYS, DIM, WIDTH = 4, 2, 8, 32
EVERY = EVERY_STEP | {"attention": "keep", "norms_every_steps": 1}
Heads = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """One layer of attention, whose `split` takes its heads [B, H, S, D] out of what its projections give."""

    num_heads, head_dim = HEADS, DIM

    def __init__(self, split: Callable[..., Heads], **widths: int) -> None:
        super().__init__()
        self.split = split
        for name, width in widths.items():
            self.add_module(name, nn.Linear(WIDTH, width))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(*(projection(x) for projection in self.children()))
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])
        return x + out.transpose(1, 2).flatten(2)


def axes(order: str) -> Callable[[Tensor], Heads]:
    """Outputs in this order of k (which of the three), h and d; "v" for k, of values, keys and queries."""
    sizes = {"k": 3, "v": 3, "h": HEADS, "d": DIM}

    def split(fused: Tensor) -> Heads:
        parts = torch.unflatten(fused, -1, [sizes[axis] for axis in order])
        query, key, value = torch.einsum(f"bs{order}->{order[order.index('k')] if 'k' in order else 'v'}bhsd", parts)
        return (value, key, query) if "v" in order else (query, key, value)

    return split


def per_key_head(fused: Tensor) -> Heads:
    """InternLM2: each key head with its queries before it and its value behind."""
    parts = torch.unflatten(fused, -1, (KEYS, HEADS // KEYS + 2, DIM))
    query, key, value = (parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :])
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def heads_of(x: Tensor, count: int = HEADS) -> Tensor:
    return torch.unflatten(x, -1, (count, DIM)).transpose(1, 2)


def separate(query: Tensor, key: Tensor, value: Tensor) -> Heads:
    return heads_of(query), heads_of(key), heads_of(value)


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Heads:
    return heads_of(query), heads_of(key, KEYS), heads_of(value, KEYS)


def rotary(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[2])[:, None] * 10.0 ** -torch.arange(DIM // 2)
    one, other = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], -1)


def turned(split: Callable[..., Heads]) -> Callable[..., Heads]:
    def of(*outputs: Tensor) -> Heads:
        query, key, value = split(*outputs)
        return rotary(query), rotary(key), value

    return of


THREE = {"q_proj": WIDTH, "k_proj": WIDTH, "v_proj": WIDTH}
LAYOUTS: dict[str, Callable[[], Attention]] = {
    "Q, K, V": lambda: Attention(axes("khd"), qkv=3 * WIDTH),
    "each head its Q, K, V": lambda: Attention(axes("hkd"), qkv_proj=3 * WIDTH),
    "each key head its Q, K, V": lambda: Attention(per_key_head, wqkv=(HEADS + 2 * KEYS) * DIM),
    "separate": lambda: Attention(separate, **THREE),
    "separate, grouped": lambda: Attention(grouped, Wq=WIDTH, Wk=KEYS * DIM, Wv=KEYS * DIM),
}
OTHERS: dict[str, Callable[[], Attention]] = {
    "V, K, Q": lambda: Attention(axes("vhd"), qkv=3 * WIDTH),
    "each feature its Q, K, V": lambda: Attention(axes("hdk"), Wqkv=3 * WIDTH),
    "a convolution of the queries": lambda: Attention(convolved, **THREE),
}


def true_norms(module: Attention, split: Callable[..., Heads]) -> dict[str, Tensor]:
    """By name, [H]: the heads of every unit input, less those of none."""
    with torch.no_grad():
        units = torch.cat([torch.zeros(1, WIDTH), torch.eye(WIDTH)])[None]
        query, key, _ = (x[0] - x[0, :, :1] for x in split(*(projection(units) for projection in module.children())))
    key = key.repeat_interleave(HEADS // len(key), 0)
    pairs = (("query_norm", query), ("key_norm", key), ("query_key_norm", query @ key.mT))
    return {name: torch.linalg.matrix_norm(x, 2) for name, x in pairs}


def losses_of(running: Any, model: nn.Module, steps: int, stepped: Callable[[Tensor], None]) -> list[float]:
    torch.manual_seed(5)
    losses, optimizer = [], torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        loss = running(torch.randn(2, 7, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stepped(loss.detach())
        losses.append(float(loss.detach()))
    return losses


def train(
    model: nn.Module, steps: int, running: Any = None, change: Callable[[], None] = lambda: None
) -> tuple[list[Any], list[str], list[float]]:
    """Samples, the layouts that were told at the end, and losses."""
    with listening(model, **EVERY) as (agent, listener):
        change()
        losses = losses_of(model if running is None else running, model, steps, agent.step)
        told = [layout.describe() for layout in agent._attached.layouts]
        assert all(layout in agent.report() for layout in told)
    return listener.of(wire.Sample), told, losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_key_heads_that_no_attribute_gives_are_read_off_the_widths_of_projections(name: str) -> None:
    (found,) = find_attention(LAYOUTS[name](), {})
    assert (found.heads, found.kv_heads) == (
        HEADS,
        KEYS if name in ("each key head its Q, K, V", "separate, grouped") else HEADS,
    )


POSITIONS: dict[str, Callable[[Callable[..., Heads]], Callable[..., Heads]]] = {
    "none": lambda split: split,
    "rotary": turned,
}


@pytest.mark.promise("A23")
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norms_of_each_layout_are_the_true_ones_from_the_first_sample_on(name: str, positions: str) -> None:
    torch.manual_seed(1)
    module = LAYOUTS[name]()
    split = module.split
    module.split = POSITIONS[positions](split)
    for projection in module.children():
        projection.get_parameter("weight").data[:5] *= 9
    (sample, *_), (told,), _ = train(module, 1)
    assert not told.startswith("norms")
    for norm, true in true_norms(module, split).items():
        measured = torch.from_numpy(getattr(sample, norm).numpy().copy())
        torch.testing.assert_close(measured, true, rtol=0.03, atol=0, msg=f"{norm}: {measured} for {true}")


def convolved(query: Tensor, key: Tensor, value: Tensor) -> Heads:
    query = query + 0.5 * F.pad(query, (0, 0, 1, 0))[:, :-1]
    return separate(query, key, value)


@pytest.mark.promise("A23")
@pytest.mark.parametrize("name", OTHERS)
def test_heads_that_lie_otherwise_than_names_say_have_unknown_norms_and_the_table_says_so(name: str) -> None:
    torch.manual_seed(1)
    module = OTHERS[name]()
    samples, (told,), _ = train(module, 4)
    assert [sample.query_norm for sample in samples] == [None] * 4
    names = ", ".join(name for name, _ in module.named_children() if name != "v_proj")
    assert told == (
        f"norms are not measured: no known layout shows how the outputs of its projections ({names}) give its queries "
        "and keys, 4 heads of 8 features"
    )


@pytest.mark.promise("A23")
def test_a_call_that_tells_nothing_leaves_the_norms_unknown_until_one_does() -> None:
    torch.manual_seed(1)
    module = LAYOUTS["each head its Q, K, V"]()
    nn.init.zeros_(module.get_parameter("qkv_proj.bias"))
    with attach(module, **EVERY) as agent:
        (layout,) = agent._attached.layouts
        for x, known in ((torch.zeros(2, 7, WIDTH), False), (torch.randn(2, 7, WIDTH), True)):
            with torch.no_grad():
                module(x)
            assert (layout.current() is not None) == known


def blocks(*, again: bool = False) -> nn.Module:
    """Four layers of three layouts, recomputed in the backward where asked."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("each head its Q, K, V", "each head its Q, K, V", "separate")
            last = Attention(turned(grouped), w_q=WIDTH, w_k=KEYS * DIM, three=KEYS * DIM)
            self.layers = nn.ModuleList([*(LAYOUTS[name]() for name in names), last])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            return x

    torch.manual_seed(1)
    return Model()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, of what it compiles
@pytest.mark.promise("A14")
@pytest.mark.promise("A23")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_layouts_are_shown_by_compiled_and_recomputed_code_without_a_bit_or_a_graph_more(
    compiled: bool, again: bool
) -> None:
    def around(model: nn.Module) -> Any:
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model

    alone = blocks(again=again)
    expected = losses_of(around(alone), alone, 3, lambda loss: None)
    graphs = counters["stats"]["unique_graphs"]
    model = blocks(again=again)
    samples, told, losses = train(model, 3, around(model))
    assert losses == expected
    assert counters["stats"]["unique_graphs"] == graphs
    assert told == [*["fused per key head (qkv_proj)"] * 2, "separate (q_proj, k_proj)", "separate (w_q, w_k)"]
    assert samples[0].query_norm is not None
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))


@pytest.mark.promise("A23")
@pytest.mark.parametrize("change", [lambda old: PeftLinear(old, WIDTH, WIDTH), lambda old: nn.Linear(WIDTH, WIDTH)])
def test_a_projection_that_is_replaced_after_attach_has_unknown_norms_from_then_on(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(1)
    module = LAYOUTS["separate"]()

    def replace() -> None:
        for name in ("q_proj", "k_proj"):
            module.set_submodule(name, change(module.get_submodule(name)))

    samples, (told,), _ = train(module, 3, change=replace)
    assert [sample.query_norm for sample in samples] == [None, None, None]
    why = "its projections were changed after attach; attach again to measure their norms"
    assert told == f"norms are not measured: {why}"


@pytest.mark.promise("A23")
def test_a_projection_that_is_replaced_after_the_first_step_showed_another_layer_has_unknown_norms() -> None:
    class Unknown(Attention):
        num_heads = None  # type: ignore[assignment]

    torch.manual_seed(1)
    model = nn.Sequential(LAYOUTS["separate"](), Unknown(separate, **THREE))
    with listening(model, **EVERY) as (agent, listener):
        losses_of(model, model, 3, agent.step)
        model.set_submodule("0.q_proj", nn.Linear(WIDTH, WIDTH))
        losses_of(model, model, 3, agent.step)
        told = [layout.describe() for layout in agent._attached.layouts]
    changed = "norms are not measured: its projections were changed after attach; attach again to measure their norms"
    assert told == [changed, "separate (q_proj, k_proj)"]
    norms = [sample.query_norm for sample in listener.of(wire.Sample)]
    known = [None if each is None else np.isfinite(each.numpy()).tolist() for each in norms]
    assert known == [[True] * 8] * 2 + [[False] * 4 + [True] * 4] * 3


class PartlyCalled(Attention):
    """Uses the weights of some projections without a call of their modules."""

    called: tuple[str, ...]

    def forward(self, x: Tensor) -> Tensor:
        results = (
            proj(x) if name in self.called else F.linear(x, proj.weight, proj.bias)  # type: ignore[arg-type]
            for name, proj in self.named_children()
        )
        query, key, value = separate(*results)
        return x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


@pytest.mark.promise("A23")
@pytest.mark.parametrize(("called", "missing"), [(("q_proj",), "k_proj"), ((), "q_proj, k_proj")])
def test_norms_of_a_projection_that_no_call_runs_are_unknown_with_the_reason(
    called: tuple[str, ...], missing: str
) -> None:
    torch.manual_seed(1)
    module = PartlyCalled(separate, **THREE)
    module.called = called
    samples, (told,), _ = train(module, 4)
    assert [sample.query_norm for sample in samples] == [None] * 4
    assert told == f"norms are not measured: its attention was called without a call of {missing}"


@pytest.mark.promise("A22")
@pytest.mark.promise("A23")
def test_norms_of_pytorchs_attention_whose_weight_becomes_computed_after_attach_are_unknown_from_then_on() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model = Own()
    with listening(model, **EVERY) as (agent, listener):
        losses_of(model, model, 2, agent.step)
        assert "fused Q, K, V (in_proj_weight)" in agent.report()
        spectral_norm(model.attention, "in_proj_weight")
        losses_of(model, model, 2, agent.step)
        assert "norms are not measured: its projections were changed after attach" in agent.report()
    assert [sample.query_norm is not None for sample in listener.of(wire.Sample)] == [True, True, False, False]


@pytest.mark.promise("A25")
def test_a_report_after_the_end_puts_nothing_into_projections_that_were_replaced_since() -> None:
    module = LAYOUTS["separate"]()
    with attach(module, **EVERY) as agent:
        agent.step(module(torch.randn(2, 7, WIDTH)).mean().detach())
    before = agent.report()
    for name in ("q_proj", "k_proj"):
        module.set_submodule(name, nn.Linear(WIDTH, WIDTH))
    names = set(vars(nn.Linear(1, 1)))
    assert agent.report() == before
    assert all(vars(each).keys() == names and not each._forward_hooks for each in module.children())


class Failing(Tensor):
    """A tensor that cannot be brought to the host."""

    error: Exception

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            raise args[0].error
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def failing(error: Exception) -> Callable[..., Tensor]:
    """In the place of `_corners`: what it keeps of a call fails with this."""

    def corners(x: Tensor, token_dims: int) -> Tensor:
        kept = torch.zeros(4, HEADS, DIM).as_subclass(Failing)
        kept.error = error
        return kept

    return corners


def raising(error: Exception) -> Callable[..., Tensor]:
    """In the place of `_corners`: fails with this in a call."""

    def corners(x: Tensor, token_dims: int) -> Tensor:
        raise error

    return corners


@pytest.mark.promise("A15")
@pytest.mark.parametrize("place", [raising, failing], ids=["in a call", "at a step"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("gone")])
def test_a_call_that_cannot_be_read_is_reported_and_tried_three_times_or_until_there_is_memory(
    error: Exception,
    place: Callable[[Exception], Callable[..., Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(1)
    module = LAYOUTS["separate"]()
    why = f"its layout could not be looked at: {type(error).__name__}: {error}"
    with listening(module, **EVERY) as (agent, listener):
        with monkeypatch.context() as broken:
            broken.setattr(layout_check, "_corners", place(error))
            losses_of(module, module, 2, agent.step)
            assert f"norms are not measured: {why}" in agent.report()
        losses_of(module, module, 2, agent.step)
        assert "separate (q_proj, k_proj)" in agent.report()
    samples = listener.of(wire.Sample)
    assert samples[0].query_norm is None
    assert samples[-1].query_norm is not None
    told = [record.getMessage() for record in caplog.records if "norms" in record.getMessage()]
    assert told == [f"foreshock: norms of model are not measured: {why}. Training continues"]
    with listening(module := LAYOUTS["separate"](), **EVERY) as (agent, _):
        with monkeypatch.context() as broken:
            broken.setattr(layout_check, "_corners", place(error))
            losses_of(module, module, 6, agent.step)
        losses_of(module, module, 2, agent.step)
        assert ("separate (q_proj, k_proj)" in agent.report()) == isinstance(error, torch.OutOfMemoryError)


FIRST = np.array([True, False, True, False])


def rounded(x: Numbers, bits: int) -> Numbers:
    mantissa, exponent = np.frexp(x)
    kept: Numbers = np.ldexp(np.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)
    return kept


def turned_by(x: Numbers, rng: np.random.Generator, pairs: str) -> Numbers:
    """Each head [t, H, D] turned_by by angles of its token, but for tokens that begin a sequence."""
    half = x.shape[2] // 2
    one, other = (x[..., ::2], x[..., 1::2]) if pairs == "neighbours" else (x[..., :half], x[..., half:])
    angle = rng.uniform(0, 6, (len(x), 1, half)) * ~FIRST[:, None, None]
    both = one * np.cos(angle) - other * np.sin(angle), one * np.sin(angle) + other * np.cos(angle)
    return np.stack(both, -1).reshape(x.shape) if pairs == "neighbours" else np.concatenate(both, -1)


def normed(x: Numbers, gain: Numbers | float = 1.0, over: tuple[int, ...] = (2,)) -> Numbers:
    divided: Numbers = gain * x / np.sqrt(np.square(x).mean(over, keepdims=True))
    return divided


def owner_of(**widths: int) -> nn.Module:
    module = nn.Module()
    for name, width in widths.items():
        module.add_module(name, nn.Linear(1, width))
    return module


def call(owner: nn.Module, outputs: dict[str, Numbers], *operands: Numbers, bits: int = 52) -> Call:
    by_projection = {owner.get_submodule(name): rounded(x, bits) for name, x in outputs.items()}
    query, key, value = (rounded(x, bits) for x in operands)
    return Call(by_projection, query, key, value, 2.0**-bits)


def drawn(rng: np.random.Generator, heads: int = HEADS, dim: int = DIM) -> Numbers:
    numbers: Numbers = rng.normal(size=(4, heads, dim))
    return numbers


ON_THE_WAY: dict[str, Callable[[Numbers, np.random.Generator], Numbers]] = {
    "as they are": lambda x, rng: x,
    "scaled": lambda x, rng: x * DIM**-0.5,
    "with a bias": lambda x, rng: x + rng.normal(size=x.shape[1:]),
    "turned in halves": lambda x, rng: turned_by(x, rng, "halves"),
    "turned side by side": lambda x, rng: turned_by(x, rng, "neighbours"),
    "normalised and turned_by": lambda x, rng: turned_by(normed(x), rng, "halves"),
    "normalised with a gain": lambda x, rng: turned_by(normed(x, rng.uniform(0.5, 2, DIM)), rng, "halves"),
    "less their mean": lambda x, rng: normed(x - x.mean(2, keepdims=True), rng.uniform(0.5, 2, DIM)),
    "each token normalised": lambda x, rng: turned_by(normed(x, over=(1, 2)), rng, "halves"),
}


@pytest.mark.promise("A23")
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from(["khd", "khd", "hkd", "hkd", "kdh", "dkh", "hdk"]),
    st.sampled_from(["qkv", "qkv", "qkv", "qvk", "kqv", "vkq"]), st.sampled_from(sorted(ON_THE_WAY)),
    st.sampled_from([52, 23, 10, 7]),
)  # fmt: skip
def test_an_order_of_a_fused_projection_is_confirmed_if_it_is_the_true_one_whatever_happens_to_its_heads_on_the_way(
    seed: int, axes: str, kinds: str, how: str, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = {kind: drawn(rng) for kind in "qkv"}
    fused = np.einsum(f"kthd->t{axes}", np.stack([parts[kind] for kind in kinds])).reshape(4, -1)
    query, key = (ON_THE_WAY[how](parts[kind], rng) for kind in "qk")
    owner = owner_of(qkv=3 * HEADS * DIM)
    given_call = call(owner, {"qkv": fused}, query, key, parts["v"], bits=bits)
    proposed = projections(owner, HEADS, HEADS, DIM)
    if axes in ("khd", "hkd") and kinds == "qkv" and not re.search("normalised|mean|bias", how):
        found, keys_are_values = confirmed(given_call, proposed)
        np.testing.assert_array_equal(fused[:, found.query.outputs], parts["q"])
        np.testing.assert_array_equal(fused[:, found.key.outputs], parts["k"])
        assert not keys_are_values
    else:
        with pytest.raises(ValueError, match="no known layout shows how"):
            confirmed(given_call, proposed)
