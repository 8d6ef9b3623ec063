"""Attention calls of all shapes, modified in place, nested, and differentiated in unusual ways."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.tiny_models import GroupedQueryAttention, ImageAttention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

SETTINGS: dict[str, Any] = {"url": None, "quiet": True, "strict": True, "probe_rows": 10**6}
ATTENTION_SETTINGS = ["keep", "kernels"]


@pytest.fixture(autouse=True)
def _plain_attention() -> Any:
    """Uses PyTorch's math backend, which supports in-place changes and all kinds of differentiation."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


class ScaledInPlace(GroupedQueryAttention):
    """Scales the output of its attention in place, like a gate."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y.mul_(0.5)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class ReusedMask(ImageAttention):
    """Overwrites its mask before the backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("mask", torch.zeros(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        self.mask.fill_(0).add_(torch.ones(7, 7).triu(1), alpha=-3.0)  # type: ignore[operator]
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)  # type: ignore[arg-type]
        self.mask.fill_(0)  # type: ignore[operator]
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class NestedAttention(ImageAttention):
    """Attends to the output of another attention inside it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.inner = ImageAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.inner(x))


def model_of(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(21)
    model = nn.Sequential(*layers, nn.Linear(16, 16))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.double()


def x(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(4), dtype=dtype)


def gradients(model: nn.Module, run: Any = None) -> list[Tensor]:
    loss = (model if run is None else run)(x()).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def rows(agent: Any) -> list[int]:
    attached = agent._attached
    return [int(n) for n in slot_values(attached.state.numpy(), Slot.ROWS)]


def compiled_gradients(model: nn.Module) -> list[Tensor]:
    return gradients(model, torch.compile(model, backend="aot_eager"))


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (ScaledInPlace, gradients),
        (ReusedMask, gradients),
        pytest.param(ScaledInPlace, compiled_gradients, marks=pytest.mark.full),
        pytest.param(ReusedMask, compiled_gradients, marks=pytest.mark.full),
    ],
)
def test_model_may_modify_attention_inputs_and_outputs_in_place(
    kind: Any, run: Callable[[nn.Module], list[Tensor]]
) -> None:
    model = model_of(kind(16, 2, 1) if kind is ScaledInPlace else kind(16, 2), ImageAttention(16, 2))
    expected = run(copy.deepcopy(model))
    torch._dynamo.reset()
    with attach(model, **SETTINGS) as agent:
        found = run(model)
        assert rows(agent)[2:] == [14, 14]
        assert not agent.faults
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("attention", ATTENTION_SETTINGS)
def test_nested_attention_layers_count_their_own_calls(attention: Any) -> None:
    model = model_of(NestedAttention(16, 2))
    expected = gradients(copy.deepcopy(model))
    with attach(model, **SETTINGS, attention=attention) as agent:
        gradients(model)
        assert rows(agent) == [14] * 2  # only inner calls; the first step discovers the outer attention
        agent.step(1.0)
        found = gradients(model)
        assert rows(agent) == [14, 14, 28, 28]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# untyped functions of PyTorch
forward_ad: Any = torch.autograd.forward_ad
functional: Any = torch.autograd.functional


def forward_mode(model: nn.Module) -> list[Tensor]:
    with forward_ad.dual_level():
        return [
            t for t in forward_ad.unpack_dual(model(forward_ad.make_dual(x(), torch.ones_like(x())))) if t is not None
        ]


def batched_gradients(model: nn.Module) -> list[Tensor]:
    out = model(x())
    directions = torch.eye(out.numel(), dtype=out.dtype)[:5].view(5, *out.shape)
    return list(torch.autograd.grad(out, list(model.parameters()), directions, is_grads_batched=True))


def jacobian(model: nn.Module) -> list[Tensor]:
    return [functional.jacobian(lambda y: model(y).sum((0, 1)), x(), vectorize=True)]


def hessian_times_vector(model: nn.Module) -> list[Tensor]:
    return [functional.hvp(lambda y: model(y).square().sum(), x(), torch.ones_like(x()))[1]]


def functional_gradient(model: nn.Module) -> list[Tensor]:
    """torch.func, which calls the model without foreshock."""
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x(),)).square().sum()  # type: ignore[no-any-return]

    return list(torch.func.grad(loss)(weights).values())


def gradient_penalty_without_a_loss(model: nn.Module) -> list[Tensor]:
    """A penalty on the gradient of a plain sum, in which attention could be mistaken for a constant."""
    first = torch.autograd.grad(model[0](x()).sum(), list(model[0].parameters()), create_graph=True)  # type: ignore[index]
    norm = torch.stack([g.square().sum() for g in first]).sum()
    return list(torch.autograd.grad(norm, list(model[0].parameters()), materialize_grads=True))  # type: ignore[index]


@pytest.mark.parametrize("attention", ATTENTION_SETTINGS)
@pytest.mark.parametrize(
    "differentiate",
    [
        *(forward_mode, batched_gradients, jacobian, hessian_times_vector, functional_gradient),
        gradient_penalty_without_a_loss,
    ],
)
def test_every_kind_of_differentiation_equals_the_unwatched_model(
    differentiate: Callable[[nn.Module], list[Tensor]], attention: Any
) -> None:
    model = model_of(ImageAttention(16, 2), GroupedQueryAttention(16, 4, 2))
    expected = differentiate(copy.deepcopy(model))
    with attach(model, **SETTINGS, attention=attention):
        found = differentiate(model)
    assert len(found) == len(expected)
    for watched, unwatched in zip(found, expected, strict=True):
        torch.testing.assert_close(watched, unwatched, rtol=1e-8, atol=1e-10)


WIDTH, TOKENS = 12, 5


class Attention(nn.Module):
    """Attention over the second-to-last dimension of [..., S, W], with any number of leading dimensions."""

    heads_first = contiguous = False

    def __init__(self, heads: int, mask: Tensor | None = None, *, splits_heads: bool = True) -> None:
        super().__init__()
        self.num_heads, self.splits_heads = heads, splits_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, latents: Tensor | None = None) -> Tensor:
        projected = (self.to_q(x if latents is None else latents), self.to_k(x), self.to_v(x))
        if self.splits_heads:
            projected = tuple(y.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for y in projected)
        if self.heads_first:  # [B, H, W, S, D], as timm's Hiera
            projected = tuple(y.transpose(1, 2) for y in projected)
        if self.contiguous:
            projected = tuple(y.contiguous() for y in projected)
        out = F.scaled_dot_product_attention(*projected, attn_mask=self.mask)  # type: ignore[arg-type]
        out = out.transpose(1, 2) if self.heads_first else out
        return out.transpose(-2, -3).flatten(-2) if self.splits_heads else out


def attention(heads: int, mask: Tensor | None = None, *, splits_heads: bool = True) -> Attention:
    torch.manual_seed(31)
    module = Attention(heads, mask, splits_heads=splits_heads)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(32))


def count(module: nn.Module, *inputs: Tensor, attention: Any = "keep") -> tuple[Tensor, Tensor]:
    """The counters of one step, and the gradient of the keys' weight."""
    module = copy.deepcopy(module)
    with attach(module, attention=attention, **SETTINGS) as agent:
        torch.autograd.backward(module(*inputs).square().sum())
        return agent._attached.state.clone(), module.to_k.weight.grad  # type: ignore[union-attr,return-value]


def total_rows(state: Tensor) -> int:
    return int(slot_values(state.numpy(), Slot.ROWS).sum())


def assert_same_counts(state: Tensor, other: Tensor) -> None:
    """Asserts equal counters, with sums equal within the rounding of PyTorch's attention, which depends on the shape.
    Gradients are checked only in four-dimensional calls, so their slots are left out."""
    for slot in set(Slot) - {Slot.WRONG_GRADIENT_ROWS, Slot.GRADIENT_ERROR_MAX}:
        counts, others = (slot_values(each.numpy(), slot) for each in (state, other))
        np.testing.assert_allclose(counts, others, rtol=1e-9, atol=1e-12, err_msg=slot.name)


def random_mask(*shape: int) -> Tensor:
    return torch.rand(*shape, TOKENS, TOKENS, generator=torch.Generator().manual_seed(33)) > 0.3


CAUSAL_BIAS = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -5.0)
WINDOWS, FLAT = tokens(2, 3, TOKENS), tokens(2, 3, TOKENS).flatten(0, 1)
ENTRIES, LATENTS = tokens(4, TOKENS), tokens(1, 2)
ModuleAndInputs = tuple[Attention, tuple[Tensor, ...]]
SHAPES: dict[str, tuple[ModuleAndInputs, ModuleAndInputs]] = {
    # a call, and its four-dimensional equivalent
    "windows": ((attention(4), (WINDOWS,)), (attention(4), (FLAT,))),
    "as many windows as heads": (
        (attention(4), (tokens(2, 4, TOKENS),)),
        (attention(4), (tokens(2, 4, TOKENS).flatten(0, 1),)),
    ),
    "windows, biased": ((attention(4, CAUSAL_BIAS), (WINDOWS,)), (attention(4, CAUSAL_BIAS), (FLAT,))),
    "windows, masked by window": (
        (attention(4, random_mask(3, 1)), (WINDOWS,)),
        (attention(4, random_mask(3, 1).repeat(2, 1, 1, 1)), (FLAT,)),
    ),
    "queries shared by the batch": (
        (attention(3), (ENTRIES, LATENTS)),
        (attention(3), (ENTRIES, LATENTS.expand(4, -1, -1))),
    ),
    "a single head": ((attention(1, splits_heads=False), (ENTRIES,)), (attention(1), (ENTRIES,))),
    "a single head, masked": (
        (attention(1, random_mask(4), splits_heads=False), (ENTRIES,)),
        (attention(1, random_mask(4, 1)), (ENTRIES,)),
    ),
}


@pytest.mark.parametrize("setting", ATTENTION_SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_call_of_any_shape_counts_like_its_4d_equivalent(shape: str, setting: str) -> None:
    (module, inputs), (flat_module, flat_inputs) = SHAPES[shape]
    state, gradient = count(module, *inputs, attention=setting)
    expected, _ = count(flat_module, *flat_inputs)
    assert total_rows(expected) > 0
    assert_same_counts(state, expected)
    if "single" not in shape:  # the kernels compute single heads, so gradients differ
        module = copy.deepcopy(module)
        module(*inputs).square().sum().backward()
        assert torch.equal(gradient, module.to_k.weight.grad)  # type: ignore[arg-type]


@pytest.mark.promise("A24")
@pytest.mark.parametrize("setting", ATTENTION_SETTINGS)
@pytest.mark.parametrize("windows", [3, 2])
def test_window_dimension_after_the_heads_is_reported_and_not_counted(
    windows: int, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = attention(3)
    module.heads_first = True
    state, _ = count(module, tokens(2, windows, TOKENS), attention=setting)
    assert total_rows(state) == 0
    assert "which dimension holds its 3 heads is unclear" in caplog.text
    assert "announces others" not in caplog.text


@pytest.mark.promise("A24")
def test_ambiguous_head_dimension_of_contiguous_tensors_is_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = attention(3)
    module.contiguous = True
    state, _ = count(module, tokens(2, 3, TOKENS))
    assert total_rows(state) == 0
    assert "which dimension holds its 3 heads is unclear" in caplog.text
