"""Calls of attention of all shapes, and what models do with them: write into them, nest them, differentiate them."""

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

QUIET: dict[str, Any] = {"url": None, "quiet": True, "strict": True, "probe_rows": 10**6}
WAYS = ["keep", "kernels"]


@pytest.fixture(autouse=True)
def _plain_attention() -> Any:
    """PyTorch's attention that saves none of its results, and can be differentiated in every way."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


class Written(GroupedQueryAttention):
    """Scales what attention gave it where it lies, as a gate does."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y.mul_(0.5)
        return self.wo(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class OneMaskForAll(ImageAttention):
    """Fills its mask anew before the backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("mask", torch.zeros(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        self.mask.fill_(0).add_(torch.ones(7, 7).triu(1), alpha=-3.0)  # type: ignore[operator]
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)  # type: ignore[arg-type]
        self.mask.fill_(0)  # type: ignore[operator]
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Nested(ImageAttention):
    """Attends to what another attention inside it gave."""

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


def through_the_compiler(model: nn.Module) -> list[Tensor]:
    return gradients(model, torch.compile(model, backend="aot_eager"))


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (Written, gradients),
        (OneMaskForAll, gradients),
        pytest.param(Written, through_the_compiler, marks=pytest.mark.full),
        pytest.param(OneMaskForAll, through_the_compiler, marks=pytest.mark.full),
    ],
)
def test_a_model_may_write_into_what_its_attention_took_or_gave(
    kind: Any, run: Callable[[nn.Module], list[Tensor]]
) -> None:
    model = model_of(kind(16, 2, 1) if kind is Written else kind(16, 2), ImageAttention(16, 2))
    expected = run(copy.deepcopy(model))
    torch._dynamo.reset()
    with attach(model, **QUIET) as agent:
        got = run(model)
        assert rows(agent)[2:] == [14, 14]
        assert not agent.faults
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("attention", WAYS)
def test_an_attention_that_holds_another_counts_its_own_calls_after_the_others(attention: Any) -> None:
    model = model_of(Nested(16, 2))
    expected = gradients(copy.deepcopy(model))
    with attach(model, **QUIET, attention=attention) as agent:
        gradients(model)
        assert rows(agent) == [14] * 2  # the inner one's: that the outer one attends too the first step shows
        agent.step(1.0)
        got = gradients(model)
        assert rows(agent) == [14, 14, 28, 28]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


# functions of PyTorch that have no types
forward_ad: Any = torch.autograd.forward_ad
functional: Any = torch.autograd.functional


def forward_mode(model: nn.Module) -> list[Tensor]:
    with forward_ad.dual_level():
        return [
            t for t in forward_ad.unpack_dual(model(forward_ad.make_dual(x(), torch.ones_like(x())))) if t is not None
        ]


def many_at_once(model: nn.Module) -> list[Tensor]:
    out = model(x())
    directions = torch.eye(out.numel(), dtype=out.dtype)[:5].view(5, *out.shape)
    return list(torch.autograd.grad(out, list(model.parameters()), directions, is_grads_batched=True))


def jacobian(model: nn.Module) -> list[Tensor]:
    return [functional.jacobian(lambda y: model(y).sum((0, 1)), x(), vectorize=True)]


def hessian_times_vector(model: nn.Module) -> list[Tensor]:
    return [functional.hvp(lambda y: model(y).square().sum(), x(), torch.ones_like(x()))[1]]


def function_transform(model: nn.Module) -> list[Tensor]:
    """Which sees the model without us."""
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x(),)).square().sum()  # type: ignore[no-any-return]

    return list(torch.func.grad(loss)(weights).values())


def penalty_on_a_gradient_that_depends_on_no_loss(model: nn.Module) -> list[Tensor]:
    """The gradient of a plain sum: autograd would take the attention's part of it for a constant."""
    first = torch.autograd.grad(model[0](x()).sum(), list(model[0].parameters()), create_graph=True)  # type: ignore[index]
    norm = torch.stack([g.square().sum() for g in first]).sum()
    return list(torch.autograd.grad(norm, list(model[0].parameters()), materialize_grads=True))  # type: ignore[index]


@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.parametrize(
    "way",
    [
        *(forward_mode, many_at_once, jacobian, hessian_times_vector, function_transform),
        penalty_on_a_gradient_that_depends_on_no_loss,
    ],
)
def test_a_model_is_differentiated_in_every_way_as_without_us(
    way: Callable[[nn.Module], list[Tensor]], attention: Any
) -> None:
    model = model_of(ImageAttention(16, 2), GroupedQueryAttention(16, 4, 2))
    expected = way(copy.deepcopy(model))
    with attach(model, **QUIET, attention=attention):
        got = way(model)
    assert len(got) == len(expected)
    for mine, own in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-8, atol=1e-10)


WIDTH, TOKENS = 12, 5


class Attention(nn.Module):
    """Attention over the last but one dimension of [..., S, W], however many stand before it."""

    heads_first = contiguous = False

    def __init__(self, heads: int, mask: Tensor | None = None, *, apart: bool = True) -> None:
        super().__init__()
        self.num_heads, self.apart = heads, apart
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, latents: Tensor | None = None) -> Tensor:
        projected = (self.to_q(x if latents is None else latents), self.to_k(x), self.to_v(x))
        if self.apart:
            projected = tuple(y.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for y in projected)
        if self.heads_first:  # [B, H, W, S, D], as timm's Hiera
            projected = tuple(y.transpose(1, 2) for y in projected)
        if self.contiguous:
            projected = tuple(y.contiguous() for y in projected)
        out = F.scaled_dot_product_attention(*projected, attn_mask=self.mask)  # type: ignore[arg-type]
        out = out.transpose(1, 2) if self.heads_first else out
        return out.transpose(-2, -3).flatten(-2) if self.apart else out


def attention(heads: int, mask: Tensor | None = None, *, apart: bool = True) -> Attention:
    torch.manual_seed(31)
    module = Attention(heads, mask, apart=apart)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def words(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(32))


def counted(module: nn.Module, *inputs: Tensor, attention: Any = "keep") -> tuple[Tensor, Tensor]:
    """What one step counts, and the gradient of the keys' weight."""
    module = copy.deepcopy(module)
    with attach(module, attention=attention, **QUIET) as agent:
        torch.autograd.backward(module(*inputs).square().sum())
        return agent._attached.state.clone(), module.to_k.weight.grad  # type: ignore[union-attr,return-value]


def rows_in(state: Tensor) -> int:
    return int(slot_values(state.numpy(), Slot.ROWS).sum())


def alike(state: Tensor, other: Tensor) -> None:
    """The same counts, and sums within the rounding of PyTorch's own attention, which takes each shape in a way of its
    own. Gradients are compared in calls of four dimensions alone."""
    for slot in set(Slot) - {Slot.WRONG_GRADIENT_ROWS, Slot.GRADIENT_ERROR_MAX}:
        counts, others = (slot_values(each.numpy(), slot) for each in (state, other))
        np.testing.assert_allclose(counts, others, rtol=1e-9, atol=1e-12, err_msg=slot.name)


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, TOKENS, TOKENS, generator=torch.Generator().manual_seed(33)) > 0.3


HIDDEN = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -5.0)
WINDOWS, FLAT = words(2, 3, TOKENS), words(2, 3, TOKENS).flatten(0, 1)
ENTRIES, LATENTS = words(4, TOKENS), words(1, 2)
Given = tuple[Attention, tuple[Tensor, ...]]
SHAPES: dict[str, tuple[Given, Given]] = {
    # a call of any shape, and one of four dimensions that counts the same
    "windows": ((attention(4), (WINDOWS,)), (attention(4), (FLAT,))),
    "as many windows as heads": (
        (attention(4), (words(2, 4, TOKENS),)),
        (attention(4), (words(2, 4, TOKENS).flatten(0, 1),)),
    ),
    "windows, biased": ((attention(4, HIDDEN), (WINDOWS,)), (attention(4, HIDDEN), (FLAT,))),
    "windows, masked by window": (
        (attention(4, drawn(3, 1)), (WINDOWS,)),
        (attention(4, drawn(3, 1).repeat(2, 1, 1, 1)), (FLAT,)),
    ),
    "queries that all entries of a batch share": (
        (attention(3), (ENTRIES, LATENTS)),
        (attention(3), (ENTRIES, LATENTS.expand(4, -1, -1))),
    ),
    "a single head": ((attention(1, apart=False), (ENTRIES,)), (attention(1), (ENTRIES,))),
    "a single head, masked": (
        (attention(1, drawn(4), apart=False), (ENTRIES,)),
        (attention(1, drawn(4, 1)), (ENTRIES,)),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_of_any_shape_counts_as_the_same_in_four_dimensions(shape: str, way: str) -> None:
    (module, inputs), (usual, flat) = SHAPES[shape]
    state, gradient = counted(module, *inputs, attention=way)
    expected, _ = counted(usual, *flat)
    assert rows_in(expected) > 0
    alike(state, expected)
    if "single" not in shape:  # which our kernels serve
        module = copy.deepcopy(module)
        module(*inputs).square().sum().backward()
        assert torch.equal(gradient, module.to_k.weight.grad)  # type: ignore[arg-type]


@pytest.mark.promise("A24")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("windows", [3, 2])
def test_windows_behind_the_heads_are_named_and_never_counted_as_heads(
    windows: int, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = attention(3)
    module.heads_first = True
    state, _ = counted(module, words(2, windows, TOKENS), attention=way)
    assert rows_in(state) == 0
    assert "which dimension holds its 3 heads is unclear" in caplog.text
    assert "announces others" not in caplog.text


@pytest.mark.promise("A24")
def test_as_many_windows_as_heads_are_not_counted_if_neither_are_parts_of_a_token_in_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = attention(3)
    module.contiguous = True
    state, _ = counted(module, words(2, 3, TOKENS))
    assert rows_in(state) == 0
    assert "which dimension holds its 3 heads is unclear" in caplog.text
