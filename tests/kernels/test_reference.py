"""Reference attention: outputs and gradients against float64, features against their definitions, and edge cases."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention, new_state, op
from foreshock.kernels.flash_attention.dropout import kept, philox_4x32

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def tensors(*shape: int, kv_heads: int | None = None, keys: int | None = None, seed: int = 0) -> list[Tensor]:
    """query, key, value and the output's gradient in float64."""
    batch, heads, queries, dim = shape
    generator = torch.Generator().manual_seed(seed)
    kv = (batch, kv_heads or heads, keys or queries, dim)
    sizes = [(batch, heads, queries, dim), kv, kv, (batch, heads, queries, dim)]
    return [torch.randn(*size, dtype=torch.float64, generator=generator) for size in sizes]


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    out: Tensor = flash_attention(query, key, value, **options)
    return out


def gradients(inputs: list[Tensor], grad: Tensor, **options: Any) -> list[Tensor]:
    """Output and the gradients of query, key and value."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def log_sum_exp(inputs: list[Tensor], **options: Any) -> Tensor:
    _, lse = flash_attention(*inputs, **options, return_lse=True)
    return lse.double()


def naive(inputs: list[Tensor], grad: Tensor, visible: Tensor, scale: float, softcap: float = 0.0) -> list[Tensor]:
    """The same from the definition by autograd, and the log-sum-exp."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    query, key, value = leaves
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.where(visible.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    out = weights @ value.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad), scores.logsumexp(-1).detach()]


def all_visible(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


def distance(queries: int, keys: int, offset: int) -> Tensor:
    return torch.arange(keys) - torch.arange(queries).view(-1, 1) - offset


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], Tensor]] = {
    "full": ({}, {}, all_visible(13, 13)),
    "cross": ({"keys": 7}, {}, all_visible(13, 7)),
    "causal": ({}, {"causal": True}, distance(13, 13, 0) <= 0),
    "top left, fewer keys": ({"keys": 7}, {"causal": "top_left"}, distance(13, 7, 0) <= 0),
    "top left, more keys": ({"keys": 20}, {"causal": "top_left"}, distance(13, 20, 0) <= 0),
    "bottom right, more keys": ({"keys": 20}, {"causal": "bottom_right"}, distance(13, 20, 7) <= 0),
    "grouped heads": ({"kv_heads": 2}, {"causal": True}, distance(13, 13, 0) <= 0),
    "one key head": ({"kv_heads": 1}, {}, all_visible(13, 13)),
    "window": ({}, {"window": (3, 2)}, (distance(13, 13, 0) >= -3) & (distance(13, 13, 0) <= 2)),
    "causal window": (
        {"keys": 20},
        {"causal": "bottom_right", "window": (4, 5)},
        (distance(13, 20, 7) >= -4) & (distance(13, 20, 7) <= 0),
    ),
    "softcap": ({"kv_heads": 2}, {"softcap": 1.5, "causal": True}, distance(13, 13, 0) <= 0),
    "scale": ({}, {"scale": 0.7}, all_visible(13, 13)),
}


@pytest.mark.parametrize("name", FEATURES)
def test_float64_matches_autograd_of_the_definition(name: str) -> None:
    shapes, options, visible = FEATURES[name]
    *inputs, grad = tensors(2, 4, 13, 8, **shapes)
    scale = options.get("scale", 1 / math.sqrt(8))
    expected = naive(inputs, grad, visible, scale, options.get("softcap", 0.0))
    options = options | {"numerics": "float64"}
    given = [*gradients(inputs, grad, **options), log_sum_exp(inputs, **options)]
    for got, want in zip(given, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.promise("K1")
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("numerics", ["kernel", "paper", "float32"])
def test_all_numerics_are_accurate_against_float64(name: str, numerics: str) -> None:
    shapes, options, _ = FEATURES[name]
    *inputs, grad = [x.bfloat16() for x in tensors(2, 4, 13, 8, **shapes)]
    truth = gradients([x.double() for x in inputs], grad.double(), numerics="float64", **options)
    for got, want in zip(gradients(inputs, grad, numerics=numerics, **options), truth, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
    exact = log_sum_exp([x.double() for x in inputs], numerics="float64", **options)
    slack = 2.0**-7 if numerics == "paper" else 1e-5  # paper numerics round scores and row sums to bf16
    torch.testing.assert_close(log_sum_exp(inputs, numerics=numerics, **options), exact, rtol=slack, atol=slack)


@pytest.mark.promise("K1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 64, 32), (1, 2, 200, 64), (1, 1, 128, 128)])
def test_errors_are_at_most_twice_those_of_pytorch(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    *inputs, grad = [x.to(dtype) for x in tensors(*shape)]
    truth = gradients([x.double() for x in inputs], grad.double(), numerics="float64", causal=causal)
    foreshock_results = gradients(inputs, grad, causal=causal)
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value = leaves
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    pytorch_results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for got, peer, want in zip(foreshock_results, pytorch_results, truth, strict=True):
        assert (got.double() - want).abs().max() <= 2 * (peer.double() - want).abs().max()
        assert (got.double() - want).norm() <= 2 * (peer.double() - want).norm()


@pytest.mark.promise("K1")
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp_error_is_at_most_twice_that_of_pytorch(causal: bool) -> None:
    query, key, value, _ = [x.bfloat16() for x in tensors(2, 4, 200, 64)]
    _, truth = flash_attention(
        query.double(), key.double(), value.double(), causal=causal, numerics="float64", return_lse=True
    )
    _, foreshock_results = flash_attention(query, key, value, causal=causal, return_lse=True)
    _, pytorch_results = CPU_FLASH(query, key, value, 0.0, causal)
    assert foreshock_results.dtype == torch.float32
    assert (foreshock_results - truth).abs().max() <= 2 * (pytorch_results - truth).abs().max()
    assert (foreshock_results - truth).mean().abs() <= 2 * (pytorch_results - truth).abs().max()


@pytest.mark.parametrize("numerics", ["kernel", "paper", "float32", "float64"])
@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
def test_values_of_one_give_outputs_of_one(numerics: str, size: float) -> None:
    query, key, value, _ = [x.bfloat16() for x in tensors(2, 4, 100, 32)]
    out = attention(query * size, key, torch.ones_like(value), causal=True, numerics=numerics)
    assert (out.double().mean() - 1).abs() < 2e-4
    tolerance = 2.0**-8 if numerics == "paper" else 0.0  # the error of a row sum rounded to bf16
    assert (out.double() - 1).abs().max() <= tolerance


def test_tied_rows_with_values_of_one_sign_have_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, _ = [x.bfloat16() for x in tensors(4, 2, 64, 32)]
    key[:, :, 32:] = key[:, :, :32]  # every row ties
    value = -(torch.rand(value.shape, generator=generator) + 0.5).bfloat16()
    truth = attention(query.double(), key.double(), value.double(), numerics="float64")
    error = attention(query, key, value).double() - truth
    step = 2.0**-8  # of bf16 between 1/2 and 1
    assert error.mean().abs() < 0.02 * step


@pytest.mark.promise("K8")
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_saturated_rows_return_the_value_of_the_key_with_the_largest_score(size: float) -> None:
    query = torch.zeros(1, 1, 8, 8)
    query[0, 0] = torch.eye(8) * size
    key = torch.eye(8).view(1, 1, 8, 8)
    value = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = attention(query.bfloat16(), key.bfloat16(), value, scale=1.0)
    assert torch.equal(out, value)


@pytest.mark.promise("K4")
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_sizes_of_zero_and_one_work(batch: int, heads: int, length: int) -> None:
    *inputs, grad = [x.bfloat16() for x in tensors(batch, heads, 2, 8)]
    inputs, grad = [x[:, :, :length] for x in inputs], grad[:, :, :length]
    shapes = [x.shape for x in gradients(inputs, grad, causal=True)]
    assert shapes == [grad.shape, *[x.shape for x in inputs]]


@pytest.mark.promise("K6")
@pytest.mark.parametrize("layout", ["transposed", "sliced", "padded", "expanded"])
def test_strides_are_respected_and_inputs_are_unchanged(layout: str) -> None:
    *inputs, grad = [x.bfloat16() for x in tensors(2, 4, 12, 8)]
    if layout == "expanded":
        inputs = [x[:, :1].expand(2, 4, 12, 8) for x in inputs]
    plain = [x.contiguous().clone() for x in inputs]
    expected = gradients(plain, grad, causal=True)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda x: torch.cat([x, x, x], -1)[..., 8:16],
        "padded": lambda x: F.pad(x, (3, 5, 2, 1))[:, :, 2:-1, 3:-5],
        "expanded": lambda x: x,
    }
    change_layout = layouts[layout]
    strided = [change_layout(x) for x in inputs]
    leaves = [x.requires_grad_() for x in strided]
    out = attention(*leaves, causal=True)
    got = [out.detach(), *torch.autograd.grad(out, leaves, change_layout(grad))]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


def test_packed_sequences_match_separate_calls() -> None:
    lengths = [5, 0, 9, 1]
    parts = [[x.bfloat16() for x in tensors(1, 4, 9, 8, kv_heads=2, seed=i)] for i in range(len(lengths))]
    parts = [[x[:, :, :length] for x in part] for part, length in zip(parts, lengths, strict=True)]
    *inputs, grad = [torch.cat(pieces, 2) for pieces in zip(*parts, strict=True)]
    cu_seqlens = torch.tensor([0, 5, 5, 14, 15], dtype=torch.int32)
    packed = gradients(inputs, grad, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=9)
    separate = [gradients(list(part[:3]), part[3], causal=True) for part in parts]
    for got, pieces in zip(packed, zip(*separate, strict=True), strict=True):
        torch.testing.assert_close(got, torch.cat(pieces, 2), rtol=1e-2, atol=1e-3)


def test_gradients_are_computed_for_any_subset_of_the_inputs() -> None:
    *inputs, grad = [x.bfloat16() for x in tensors(1, 2, 6, 8)]
    all_gradients = gradients(inputs, grad)[1:]
    for wanted in range(1, 8):
        leaves = [x.clone().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate(inputs)]
        torch.autograd.backward(attention(*leaves), grad)
        for i, (leaf, expected) in enumerate(zip(leaves, all_gradients, strict=True)):
            if wanted >> i & 1:
                assert leaf.grad is not None
                assert torch.equal(leaf.grad, expected)
            else:
                assert leaf.grad is None


@pytest.mark.parametrize("numerics", ["kernel", "paper"])
def test_float32_inputs_are_first_rounded_to_bf16(numerics: str) -> None:
    *inputs, grad = [x.float() for x in tensors(2, 2, 9, 8)]
    got = gradients(inputs, grad, numerics=numerics)
    rounded = gradients([x.bfloat16() for x in inputs], grad.bfloat16(), numerics=numerics)
    assert [x.dtype for x in got] == [torch.float32] * 4
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(got, rounded, strict=True))


@pytest.mark.promise("K10")
def test_autocast_rounds_inputs_as_for_pytorchs_attention() -> None:
    query, key, value, _ = [x.float() for x in tensors(2, 2, 9, 8)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(query, key, value, numerics="float32")
    assert out.dtype == torch.bfloat16
    expected = attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), numerics="float32")
    assert torch.equal(out, expected)


@pytest.mark.promise("K9")
def test_random_generator_is_used_once_with_dropout_and_never_without() -> None:
    query, key, value, _ = tensors(1, 2, 6, 8)
    before = torch.get_rng_state()
    attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), causal=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randint(2**63 - 1, ())
    after_one_draw = torch.get_rng_state()
    torch.set_rng_state(before)
    attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), dropout_p=0.3)
    assert torch.equal(torch.get_rng_state(), after_one_draw)


@pytest.mark.promise("K9")
def test_1000_repeats_are_bitwise_equal() -> None:
    *inputs, grad = [x.bfloat16() for x in tensors(1, 2, 9, 8)]
    first = gradients(inputs, grad, causal=True)
    for _ in range(1000):
        again = gradients(inputs, grad, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("counter", "seed", "word"),
    [  # Random123's known answers for philox4x32-10
        ((0, 0, 0, 0), 0, 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, -1, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, 0xD16CFE09),
    ],
)
def test_dropout_generator_matches_the_published_philox_words(
    counter: tuple[int, int, int, int], seed: int, word: int
) -> None:
    assert philox_4x32(counter, torch.tensor(seed)).item() == word


def test_dropout_matches_autograd_with_an_explicit_mask() -> None:
    *inputs, grad = tensors(2, 4, 20, 8)
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, ())
    mask = kept(seed, (2, 4, 20, 20), 0.3)
    assert mask.double().mean().item() == pytest.approx(0.7, abs=0.03)
    query, key, value = (x.clone().requires_grad_() for x in inputs)
    scores = (query @ key.mT / math.sqrt(8)).masked_fill(distance(20, 20, 0) > 0, -math.inf)
    out = (scores.softmax(-1) * mask / 0.7) @ value
    expected = [out, *torch.autograd.grad(out, (query, key, value), grad)]
    torch.manual_seed(5)
    given = gradients(inputs, grad, causal=True, dropout_p=0.3, numerics="float64")
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numerics", ["kernel", "paper"])
def test_dropout_drops_the_same_entries_with_all_numerics(numerics: str) -> None:
    *inputs, grad = [x.bfloat16() for x in tensors(2, 4, 20, 8)]
    torch.manual_seed(7)
    given = gradients(inputs, grad, dropout_p=0.5, numerics=numerics)
    torch.manual_seed(7)
    truth = gradients([x.double() for x in inputs], grad.double(), dropout_p=0.5, numerics="float64")
    torch.testing.assert_close([x.double() for x in given], truth, rtol=2e-2, atol=5e-2)


def leaves(length: int) -> list[Tensor]:
    return [x.bfloat16().requires_grad_() for x in tensors(1, 2, length, 24)[:3]]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_compiled_graph_supports_every_length(scale: float | None) -> None:
    torch._dynamo.reset()
    state = new_state(2, "cpu")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_attention(query * 1.0, key, value, causal=True, scale=scale, state=state)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=graphs)
    rows, compilations = 0, []
    for length in (31, 47, 20):
        inputs = leaves(length)
        plain = flash_attention(*inputs, causal=True, scale=scale)
        grads = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
        wanted = torch.autograd.grad(plain.square().sum(), inputs)
        assert all(torch.equal(x, y) for x, y in zip(grads, wanted, strict=True))
        rows += length
        compilations.append(graphs.frame_count)
    assert state[:, Slot.ROWS].tolist() == [rows] * 2
    assert len(set(compilations)) == 1  # compiled only before the second length
    torch._dynamo.reset()


@pytest.mark.parametrize("side", ["q", "k"])
def test_max_seqlen_is_optional_and_rejected_if_too_small(side: str) -> None:
    (query, key, value), ends = leaves(50), torch.tensor([0, 13, 13, 44], dtype=torch.int32)
    packed: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": "top_left"}
    longest: dict[str, Any] = {"max_seqlen_q": 31, "max_seqlen_k": 31}
    with_lengths = attention(query, key, value, **packed, **longest)
    assert torch.equal(attention(query, key, value, **packed), with_lengths)
    with pytest.raises(
        ValueError, match=f"max_seqlen_{side} is 30, but the longest sequence has 31 rows; pass at least that"
    ):
        attention(query, key, value, **packed, **longest | {f"max_seqlen_{side}": 30})


def test_retained_graph_counts_its_rows_once() -> None:
    inputs, state = leaves(17), new_state(2, "cpu")
    out = flash_attention(*inputs, causal=True, state=state)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    counted = state.clone()
    again = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert torch.equal(state, counted)
    assert state[:, Slot.ROWS].tolist() == [17, 17]


def test_forward_without_gradients_saves_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def record_sizes(forward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def recording_forward(*inputs: object) -> tuple[Tensor, ...]:
            result = forward(*inputs)
            sizes.append(result[1].numel())
            return result

        return recording_forward

    for name in ("attention_forward", "_attention_forward"):  # through PyTorch's dispatcher and without it
        monkeypatch.setattr(op, name, record_sizes(getattr(op, name)))
    inputs = leaves(21)
    with_gradients = flash_attention(*inputs, causal=True)
    with torch.no_grad():
        assert torch.equal(flash_attention(*inputs, causal=True), with_gradients)
    assert torch.equal(flash_attention(*(x.detach() for x in inputs), causal=True), with_gradients)
    flash_attention(inputs[0].detach(), inputs[1], inputs[2].detach())
    assert sizes == [with_gradients.numel(), 0, 0, with_gradients.numel()]
