"""Norms are measured on the right rows or unknown: the values of a call confirm the weight layout of each head."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.test_norms import PeftLinear
from tests.monitor.watched_training import listening
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import grad
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from foreshock.contract import wire
from foreshock.monitor import attach
from foreshock.monitor.attention import layout_check
from foreshock.monitor.attention.layout_check import Call, Numbers, confirmed
from foreshock.monitor.model.discovery import find_attention
from foreshock.monitor.model.layers import projections

HEADS, KEYS, DIM, WIDTH = 4, 2, 8, 32
SETTINGS = EVERY_STEP | {"attention": "keep", "norms_every_steps": 1}
Heads = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """An attention layer; `split` makes heads [B, H, S, D] of the outputs of its projections."""

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
    """A fused projection with this order of k (query, key, value), h and d; "v" instead of k: value, key, query."""
    sizes = {"k": 3, "v": 3, "h": HEADS, "d": DIM}

    def split(fused: Tensor) -> Heads:
        parts = torch.unflatten(fused, -1, [sizes[axis] for axis in order])
        query, key, value = torch.einsum(f"bs{order}->{order[order.index('k')] if 'k' in order else 'v'}bhsd", parts)
        return (value, key, query) if "v" in order else (query, key, value)

    return split


def per_key_head(fused: Tensor) -> Heads:
    """InternLM2's layout: for each key head, its queries, the key and the value."""
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
    first_half, second_half = x.chunk(2, -1)
    return torch.cat(
        [first_half * angle.cos() - second_half * angle.sin(), first_half * angle.sin() + second_half * angle.cos()], -1
    )


def with_rotary(split: Callable[..., Heads]) -> Callable[..., Heads]:
    def split_and_rotate(*outputs: Tensor) -> Heads:
        query, key, value = split(*outputs)
        return rotary(query), rotary(key), value

    return split_and_rotate


SEPARATE = {"q_proj": WIDTH, "k_proj": WIDTH, "v_proj": WIDTH}
LAYOUTS: dict[str, Callable[[], Attention]] = {
    "Q, K, V": lambda: Attention(axes("khd"), qkv=3 * WIDTH),
    "Q, K, V per head": lambda: Attention(axes("hkd"), qkv_proj=3 * WIDTH),
    "Q, K, V per key head": lambda: Attention(per_key_head, wqkv=(HEADS + 2 * KEYS) * DIM),
    "separate": lambda: Attention(separate, **SEPARATE),
    "separate, grouped": lambda: Attention(grouped, Wq=WIDTH, Wk=KEYS * DIM, Wv=KEYS * DIM),
}
UNKNOWN_LAYOUTS: dict[str, Callable[[], Attention]] = {
    "V, K, Q": lambda: Attention(axes("vhd"), qkv=3 * WIDTH),
    "Q, K, V per feature": lambda: Attention(axes("hdk"), Wqkv=3 * WIDTH),
    "a convolution of the queries": lambda: Attention(convolved, **SEPARATE),
}


def true_norms(module: Attention, split: Callable[..., Heads]) -> dict[str, Tensor]:
    """True norms by name, [H], from the heads of unit inputs minus those of a zero input."""
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
    """Samples, the descriptions of the layouts after training, and losses."""
    with listening(model, **SETTINGS) as (agent, listener):
        change()
        losses = losses_of(model if running is None else running, model, steps, agent.step)
        descriptions = [layout.describe() for layout in agent._attached.layouts]
        assert all(layout in agent.report() for layout in descriptions)
    return listener.of(wire.Sample), descriptions, losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_key_heads_without_an_attribute_follow_from_projection_widths(name: str) -> None:
    (found,) = find_attention(LAYOUTS[name](), {})
    assert (found.heads, found.kv_heads) == (
        HEADS,
        KEYS if name in ("Q, K, V per key head", "separate, grouped") else HEADS,
    )


POSITIONS: dict[str, Callable[[Callable[..., Heads]], Callable[..., Heads]]] = {
    "none": lambda split: split,
    "rotary": with_rotary,
}


@pytest.mark.promise("A23")
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_of_each_layout_are_correct_from_the_first_sample(name: str, positions: str) -> None:
    torch.manual_seed(1)
    module = LAYOUTS[name]()
    split = module.split
    module.split = POSITIONS[positions](split)
    for projection in module.children():
        projection.get_parameter("weight").data[:5] *= 9
    (sample, *_), (description,), _ = train(module, 1)
    assert not description.startswith("norms")
    for norm, true in true_norms(module, split).items():
        measured = torch.from_numpy(getattr(sample, norm).numpy().copy())
        torch.testing.assert_close(measured, true, rtol=0.03, atol=0, msg=f"{norm}: {measured} for {true}")


def convolved(query: Tensor, key: Tensor, value: Tensor) -> Heads:
    query = query + 0.5 * F.pad(query, (0, 0, 1, 0))[:, :-1]
    return separate(query, key, value)


@pytest.mark.promise("A23")
@pytest.mark.parametrize("name", UNKNOWN_LAYOUTS)
def test_unknown_layout_has_no_norms_and_the_table_says_why(name: str) -> None:
    torch.manual_seed(1)
    module = UNKNOWN_LAYOUTS[name]()
    samples, (description,), _ = train(module, 4)
    assert [sample.query_norm for sample in samples] == [None] * 4
    names = ", ".join(name for name, _ in module.named_children() if name != "v_proj")
    assert description == (
        f"norms are not measured: no known layout shows how the outputs of its projections ({names}) give its queries "
        "and keys, 4 heads of 8 features"
    )


@pytest.mark.promise("A23")
def test_norms_stay_unknown_until_a_call_confirms_the_layout() -> None:
    torch.manual_seed(1)
    module = LAYOUTS["Q, K, V per head"]()
    nn.init.zeros_(module.get_parameter("qkv_proj.bias"))
    with attach(module, **SETTINGS) as agent:
        (layout,) = agent._attached.layouts
        for x, known in ((torch.zeros(2, 7, WIDTH), False), (torch.randn(2, 7, WIDTH), True)):
            with torch.no_grad():
                module(x)
            assert (layout.current() is not None) == known


@pytest.mark.promise("A23")
def test_report_says_norms_are_not_measured_until_a_call_confirms_the_layout() -> None:
    torch.manual_seed(1)
    module = LAYOUTS["separate"]()
    with attach(module, **SETTINGS) as agent:
        assert "separate (q_proj, k_proj)" in agent.report()  # before the first step, what names suggest
        grad(lambda x: module(x).sum())(torch.randn(2, 7, WIDTH))
        assert "norms are not measured: no call has shown yet which rows belong to which head" in agent.report()
        module(torch.randn(2, 7, WIDTH))
        assert "separate (q_proj, k_proj)" in agent.report()


def blocks(*, recompute: bool = False) -> nn.Module:
    """Four layers with three layouts. recompute: use activation checkpointing."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("Q, K, V per head", "Q, K, V per head", "separate")
            last = Attention(with_rotary(grouped), w_q=WIDTH, w_k=KEYS * DIM, three=KEYS * DIM)
            self.layers = nn.ModuleList([*(LAYOUTS[name]() for name in names), last])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            return x

    torch.manual_seed(1)
    return Model()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by PyTorch in compilation
@pytest.mark.promise("A14")
@pytest.mark.promise("A23")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_layouts_are_confirmed_in_compiled_and_recomputed_code_bit_identically(compiled: bool, recompute: bool) -> None:
    def maybe_compile(model: nn.Module) -> Any:
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model

    unwatched = blocks(recompute=recompute)
    expected = losses_of(maybe_compile(unwatched), unwatched, 3, lambda loss: None)
    graphs = counters["stats"]["unique_graphs"]
    model = blocks(recompute=recompute)
    samples, descriptions, losses = train(model, 3, maybe_compile(model))
    assert losses == expected
    assert counters["stats"]["unique_graphs"] == graphs
    assert descriptions == [*["fused per key head (qkv_proj)"] * 2, "separate (q_proj, k_proj)", "separate (w_q, w_k)"]
    assert samples[0].query_norm is not None
    assert all(torch.equal(a, b) for a, b in zip(unwatched.parameters(), model.parameters(), strict=True))


@pytest.mark.promise("A23")
@pytest.mark.parametrize("change", [lambda old: PeftLinear(old, WIDTH, WIDTH), lambda old: nn.Linear(WIDTH, WIDTH)])
def test_projection_replaced_after_attach_has_no_norms(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(1)
    module = LAYOUTS["separate"]()

    def replace() -> None:
        for name in ("q_proj", "k_proj"):
            module.set_submodule(name, change(module.get_submodule(name)))

    samples, (description,), _ = train(module, 3, change=replace)
    assert [sample.query_norm for sample in samples] == [None, None, None]
    reason = "its projections were changed after attach; attach again to measure their norms"
    assert description == f"norms are not measured: {reason}"


@pytest.mark.promise("A23")
def test_projection_replaced_after_discovery_of_another_layer_has_no_norms() -> None:
    class Unknown(Attention):
        num_heads = None  # type: ignore[assignment]

    torch.manual_seed(1)
    model = nn.Sequential(LAYOUTS["separate"](), Unknown(separate, **SEPARATE))
    with listening(model, **SETTINGS) as (agent, listener):
        losses_of(model, model, 3, agent.step)
        model.set_submodule("0.q_proj", nn.Linear(WIDTH, WIDTH))
        losses_of(model, model, 3, agent.step)
        descriptions = [layout.describe() for layout in agent._attached.layouts]
    changed = "norms are not measured: its projections were changed after attach; attach again to measure their norms"
    assert descriptions == [changed, "separate (q_proj, k_proj)"]
    norms = [sample.query_norm for sample in listener.of(wire.Sample)]
    known = [None if each is None else np.isfinite(each.numpy()).tolist() for each in norms]
    assert known == [[True] * 8] * 2 + [[False] * 4 + [True] * 4] * 3


class UsesWeightsDirectly(Attention):
    """Uses the weights of some projections without calling their modules."""

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
def test_projection_that_is_never_called_has_no_norms_and_the_table_says_why(
    called: tuple[str, ...], missing: str
) -> None:
    torch.manual_seed(1)
    module = UsesWeightsDirectly(separate, **SEPARATE)
    module.called = called
    samples, (description,), _ = train(module, 4)
    assert [sample.query_norm for sample in samples] == [None] * 4
    assert description == f"norms are not measured: no call of {missing} returned a plain tensor"


class PairLinear(nn.Linear):
    """Returns its bias next to its output, as tensor-parallel layers of some libraries do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.bias


class OfPairs(Attention):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = separate(*(proj(x)[0] for proj in self.children()))
        return x + F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


@pytest.mark.promise("A23")
def test_projection_whose_output_is_no_tensor_has_no_norms_and_the_table_says_why() -> None:
    torch.manual_seed(1)
    module = OfPairs(separate, **SEPARATE)
    for name, _ in list(module.named_children()):
        module.set_submodule(name, PairLinear(WIDTH, WIDTH))
    samples, (description,), _ = train(module, 4)
    assert [sample.query_norm for sample in samples] == [None] * 4
    assert description == "norms are not measured: no call of q_proj, k_proj returned a plain tensor"


@pytest.mark.promise("A22")
@pytest.mark.promise("A23")
def test_multihead_weight_parametrized_after_attach_has_no_norms() -> None:
    class PytorchAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model = PytorchAttention()
    with listening(model, **SETTINGS) as (agent, listener):
        losses_of(model, model, 2, agent.step)
        assert "fused Q, K, V (in_proj_weight)" in agent.report()
        spectral_norm(model.attention, "in_proj_weight")
        losses_of(model, model, 2, agent.step)
        assert "norms are not measured: its projections were changed after attach" in agent.report()
    assert [sample.query_norm is not None for sample in listener.of(wire.Sample)] == [True, True, False, False]


@pytest.mark.promise("A25")
def test_report_after_close_adds_nothing_to_replaced_projections() -> None:
    module = LAYOUTS["separate"]()
    with attach(module, **SETTINGS) as agent:
        agent.step(module(torch.randn(2, 7, WIDTH)).mean().detach())
    before = agent.report()
    for name in ("q_proj", "k_proj"):
        module.set_submodule(name, nn.Linear(WIDTH, WIDTH))
    names = set(vars(nn.Linear(1, 1)))
    assert agent.report() == before
    assert all(vars(each).keys() == names and not each._forward_hooks for each in module.children())


class FailingTensor(Tensor):
    """A tensor that raises when it is copied to the host."""

    error: Exception

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            raise args[0].error
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def failing(error: Exception) -> Callable[..., Tensor]:
    """A replacement of `_corners` whose result raises `error` when it is read."""

    def corners(x: Tensor, token_dims: int) -> Tensor:
        value = torch.zeros(4, HEADS, DIM).as_subclass(FailingTensor)
        value.error = error
        return value

    return corners


def raising(error: Exception) -> Callable[..., Tensor]:
    """A replacement of `_corners` that raises `error` in the call."""

    def corners(x: Tensor, token_dims: int) -> Tensor:
        raise error

    return corners


@pytest.mark.promise("A15")
@pytest.mark.parametrize("place", [raising, failing], ids=["in a call", "at a step"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("gone")])
def test_failed_layout_check_is_reported_and_retried_up_to_three_times(
    error: Exception,
    place: Callable[[Exception], Callable[..., Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(1)
    module = LAYOUTS["separate"]()
    reason = f"its layout could not be looked at: {type(error).__name__}: {error}"
    with listening(module, **SETTINGS) as (agent, listener):
        with monkeypatch.context() as broken:
            broken.setattr(layout_check, "_corners", place(error))
            losses_of(module, module, 2, agent.step)
            assert f"norms are not measured: {reason}" in agent.report()
        losses_of(module, module, 2, agent.step)
        assert "separate (q_proj, k_proj)" in agent.report()
    samples = listener.of(wire.Sample)
    assert samples[0].query_norm is None
    assert samples[-1].query_norm is not None
    messages = [record.getMessage() for record in caplog.records if "norms" in record.getMessage()]
    assert messages == [f"foreshock: norms of model are not measured: {reason}. Training continues"]
    with listening(module := LAYOUTS["separate"](), **SETTINGS) as (agent, _):
        with monkeypatch.context() as broken:
            broken.setattr(layout_check, "_corners", place(error))
            losses_of(module, module, 6, agent.step)
        losses_of(module, module, 2, agent.step)
        assert ("separate (q_proj, k_proj)" in agent.report()) == isinstance(error, torch.OutOfMemoryError)


STARTS_SEQUENCE = np.array([True, False, True, False])


def rounded_to(x: Numbers, bits: int) -> Numbers:
    mantissa, exponent = np.frexp(x)
    value: Numbers = np.ldexp(np.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)
    return value


def rotated(x: Numbers, rng: np.random.Generator, pairs: str) -> Numbers:
    """Rotates each head [t, H, D] by angles of its token, except for tokens that start a sequence."""
    half = x.shape[2] // 2
    first_half, second_half = (x[..., ::2], x[..., 1::2]) if pairs == "interleaved" else (x[..., :half], x[..., half:])
    angle = rng.uniform(0, 6, (len(x), 1, half)) * ~STARTS_SEQUENCE[:, None, None]
    both = (
        first_half * np.cos(angle) - second_half * np.sin(angle),
        first_half * np.sin(angle) + second_half * np.cos(angle),
    )
    return np.stack(both, -1).reshape(x.shape) if pairs == "interleaved" else np.concatenate(both, -1)


def normed(x: Numbers, gain: Numbers | float = 1.0, over: tuple[int, ...] = (2,)) -> Numbers:
    divided: Numbers = gain * x / np.sqrt(np.square(x).mean(over, keepdims=True))
    return divided


def module_with(**widths: int) -> nn.Module:
    module = nn.Module()
    for name, width in widths.items():
        module.add_module(name, nn.Linear(1, width))
    return module


def call(owner: nn.Module, outputs: dict[str, Numbers], *operands: Numbers, bits: int = 52) -> Call:
    by_projection = {owner.get_submodule(name): rounded_to(x, bits) for name, x in outputs.items()}
    query, key, value = (rounded_to(x, bits) for x in operands)
    return Call(by_projection, query, key, value, 2.0**-bits)


def random_heads(rng: np.random.Generator, heads: int = HEADS, dim: int = DIM) -> Numbers:
    numbers: Numbers = rng.normal(size=(4, heads, dim))
    return numbers


TRANSFORMATIONS: dict[str, Callable[[Numbers, np.random.Generator], Numbers]] = {
    "unchanged": lambda x, rng: x,
    "scaled": lambda x, rng: x * DIM**-0.5,
    "with a bias": lambda x, rng: x + rng.normal(size=x.shape[1:]),
    "rotated in halves": lambda x, rng: rotated(x, rng, "halves"),
    "rotated in interleaved pairs": lambda x, rng: rotated(x, rng, "interleaved"),
    "normalised and rotated": lambda x, rng: rotated(normed(x), rng, "halves"),
    "normalised with a gain": lambda x, rng: rotated(normed(x, rng.uniform(0.5, 2, DIM)), rng, "halves"),
    "minus their mean": lambda x, rng: normed(x - x.mean(2, keepdims=True), rng.uniform(0.5, 2, DIM)),
    "normalised per token": lambda x, rng: rotated(normed(x, over=(1, 2)), rng, "halves"),
}


@pytest.mark.promise("A23")
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from(["khd", "khd", "hkd", "hkd", "kdh", "dkh", "hdk"]),
    st.sampled_from(["qkv", "qkv", "qkv", "qvk", "kqv", "vkq"]), st.sampled_from(sorted(TRANSFORMATIONS)),
    st.sampled_from([52, 23, 10, 7]),
)  # fmt: skip
def test_fused_layout_is_confirmed_only_if_correct_despite_transformed_heads(
    seed: int, axes: str, kinds: str, transformation: str, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = {kind: random_heads(rng) for kind in "qkv"}
    fused = np.einsum(f"kthd->t{axes}", np.stack([parts[kind] for kind in kinds])).reshape(4, -1)
    query, key = (TRANSFORMATIONS[transformation](parts[kind], rng) for kind in "qk")
    owner = module_with(qkv=3 * HEADS * DIM)
    given_call = call(owner, {"qkv": fused}, query, key, parts["v"], bits=bits)
    proposed = projections(owner, HEADS, HEADS, DIM)
    if axes in ("khd", "hkd") and kinds == "qkv" and not re.search("normalised|mean|bias", transformation):
        found, keys_are_values = confirmed(given_call, proposed)
        np.testing.assert_array_equal(fused[:, found.query.outputs], parts["q"])
        np.testing.assert_array_equal(fused[:, found.key.outputs], parts["k"])
        assert not keys_are_values
    else:
        with pytest.raises(ValueError, match="no known layout shows how"):
            confirmed(given_call, proposed)
