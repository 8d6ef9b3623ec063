"""The Hopper forward on a Hopper GPU: which calls use it, its accuracy compared with Triton's, and its side effects."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from tests.kernels.triton_calls import (
    ON_HOPPER,
    Inputs,
    Outputs,
    attend,
    flags,
    hidden,
    largest_error,
    random_inputs,
    scaled,
)
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, launch, new_state
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.spec import Arguments, Saved, residual_scale
from foreshock.kernels.flash_attention.triton_kernels import backward, forward, hopper
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

pytestmark = ON_HOPPER
MIXED = (
    Mode.PLAIN,
    Mode.ROW_CORRECTED,
    Mode.PAPER_SOFTMAX,
    Mode.PAPER_SOFTMAX,
    Mode.EXACT_DELTA,
    Mode.PAPER_SOFTMAX | Mode.ROW_CORRECTED,
    Mode.PAPER_SOFTMAX | Mode.EXACT_DELTA,
    Mode.PLAIN,
)
SHIFTED = [mode & (Mode.PAPER_SOFTMAX) != 0 for mode in MIXED]


@pytest.fixture(autouse=True)
def defaults_and_empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empties the cache of calls, which record their kernel. Backwards are Triton's, which are deterministic."""
    monkeypatch.delenv("FORESHOCK_KERNELS", raising=False)
    monkeypatch.setattr(hopper, "takes_backward", lambda *_: False)
    launch._CALLS.clear()
    yield
    launch._CALLS.clear()


class Forward(NamedTuple):
    """The outputs of a forward."""

    out: Tensor
    residual: Tensor
    lse: Tensor
    row_max: Tensor
    second: Tensor


def arguments(inputs: Inputs, spec: AttentionSpec, modes: Tensor | None = None) -> Arguments:
    return Arguments(modes, None, None, inputs.query.shape[2], inputs.key.shape[2], None, spec)


def by_triton(inputs: Inputs, spec: AttentionSpec, modes: Tensor | None = None) -> Forward:
    query, key, value, _ = inputs
    given = arguments(inputs, spec, modes)
    call = call_of(query, key, value, given)
    rows = torch.empty(query.shape[:-1], device="cuda")
    outputs = Forward(torch.empty_like(query), torch.empty_like(query), *(torch.empty_like(rows) for _ in range(3)))
    config = configs(call.capability, call.block_d, call.mean_keys).forward
    for shifted in (False, True) if modes is not None else (False,):
        forward.launch_forward(call, config, (query, key, value), outputs, given, shifted=shifted)
    return outputs


def dispatched(inputs: Inputs, spec: AttentionSpec, modes: Tensor | None = None) -> Forward:
    query, key, value, _ = inputs
    return Forward(*forward.attention_forward(query, key, value, arguments(inputs, spec, modes)))


def launched_forwards(
    inputs: Inputs, spec: AttentionSpec, packed: Tensor | None = None, modes: Tensor | None = None
) -> set[str]:
    """The forwards that are launched for a call."""
    query, key, value, _ = inputs
    given = arguments(inputs, spec, modes)._replace(cu_seqlens_q=packed, cu_seqlens_k=packed)
    call = call_of(query, key, value, given)
    call.ready.clear()
    forward.attention_forward(query, key, value, given)
    names = {known[0] if isinstance(known[0], str) else known[0][0] for known in call.ready}
    return names - {"rest"}


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_supported_calls_use_the_hopper_forward(causal: str) -> None:
    spec = scaled(128, causal=causal)
    for inputs in (
        random_inputs(300, 300, 128),
        random_inputs(300, 300, 128, 8, 2, 2, torch.float16),
        Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_inputs(300, 300, 128))),
    ):
        assert launched_forwards(inputs, spec) == {"hopper forward"}
    assert launched_forwards(random_inputs(300, 200, 128), scaled(128)) == {"hopper forward"}


def test_unsupported_calls_use_triton() -> None:
    inputs = random_inputs(256, 256, 128)
    moved = [torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x) for x in inputs]
    lengths = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    assert launched_forwards(inputs, scaled(128, window_left=64)) == {"forward"}
    assert launched_forwards(inputs, scaled(128, softcap=20.0)) == {"forward"}
    assert launched_forwards(Inputs(*moved), scaled(128)) == {"forward"}
    assert launched_forwards(inputs, scaled(128), packed=lengths) == {"forward"}
    assert launched_forwards(random_inputs(256, 256, 64), scaled(64)) == {"forward"}
    assert launched_forwards(random_inputs(256, 300, 128), scaled(128, causal="bottom_right")) == {"forward"}


def truth(inputs: Inputs, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O, log-sum-exp, the largest score of each row and the second largest in float64."""
    group = inputs.query.shape[1] // inputs.key.shape[1]
    query, key, value = (x.double() for x in inputs[:3])
    scores = spec.scale * (query @ key.repeat_interleave(group, 1).transpose(-1, -2))
    scores.masked_fill_(hidden(spec, query.shape[2], key.shape[2]), -math.inf)
    lse = scores.logsumexp(-1)
    row_max, second = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).topk(2).values.unbind(-1)
    weights = torch.exp(scores.sub_(lse.nan_to_num(neginf=0.0)[..., None]))
    return weights @ value.repeat_interleave(group, 1), lse, row_max, second


def errors(given: Forward, exact: tuple[Tensor, ...], head: int) -> dict[str, float]:
    """Errors of one head: of O relative to its norm, with and without the residual; otherwise the largest error."""
    out, lse, row_max, second = (x[:, head] for x in exact)
    finite, several = lse.isfinite(), second.isfinite()
    high, low = given.out[:, head].double(), given.residual[:, head].double()
    restored = high + low / residual_scale(given.out.dtype)
    assert torch.equal(given.lse[:, head].isfinite(), finite)
    assert torch.equal(given.second[:, head] == -math.inf, ~several)
    return {
        "out": float((high - out).norm() / out.norm()),
        "out and residual": float((restored - out).norm() / out.norm()),
        "lse": largest_error(given.lse[:, head][finite], lse[finite]),
        "row_max": largest_error(given.row_max[:, head][finite], row_max[finite]),
        "second": largest_error(given.second[:, head][several], second[several]) if several.any() else 0.0,
    }


def assert_as_accurate(result: Forward, triton_result: Forward, inputs: Inputs, spec: AttentionSpec) -> None:
    exact = truth(inputs, spec)
    assert torch.equal(result.row_max, triton_result.row_max)
    assert torch.equal(result.second, triton_result.second)
    for head in range(inputs.query.shape[1]):
        for (name, error), allowed in zip(
            errors(result, exact, head).items(), errors(triton_result, exact, head).values(), strict=True
        ):
            assert error <= 1.1 * allowed + 2e-6, (
                f"the error of {name} of head {head} is {error:.2e}, Triton's is {allowed:.2e}"
            )


CASES = [
    *((torch.bfloat16, n, n, causal, 4, 4) for n in (1, 2, 64, 127, 128, 129, 1000) for causal in ("none", "top_left")),
    (torch.bfloat16, 333, 777, "none", 4, 1),
    (torch.bfloat16, 777, 333, "none", 2, 2),
    (torch.bfloat16, 1111, 1111, "top_left", 8, 2),
    (torch.bfloat16, 2048, 2048, "bottom_right", 16, 16),
    (torch.float16, 777, 777, "none", 4, 2),
    (torch.float16, 1111, 1111, "top_left", 4, 2),
]


@pytest.mark.parametrize(("dtype", "length_q", "length_k", "causal", "heads", "kv_heads"), CASES)
def test_every_length_is_as_accurate_as_triton_and_bitwise_reproducible(
    dtype: torch.dtype, length_q: int, length_k: int, causal: str, heads: int, kv_heads: int
) -> None:
    inputs, spec = random_inputs(length_q, length_k, 128, heads, kv_heads, 3, dtype), scaled(128, causal=causal)
    assert launched_forwards(inputs, spec) == {"hopper forward"}
    result = dispatched(inputs, spec)
    assert_as_accurate(result, by_triton(inputs, spec), inputs, spec)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(result, dispatched(inputs, spec), strict=True))
    other_layout = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    assert all(torch.equal(a, b) for a, b in zip(result, dispatched(other_layout, spec), strict=True))
    no_residual = dispatched(inputs, scaled(128, causal=causal, residual=False))
    assert no_residual.residual.numel() == 0
    assert all(torch.equal(result[i], no_residual[i]) for i in (0, 2, 3))


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_key_of_minus_infinity_is_ignored_and_memory_around_outputs_is_not_written(causal: str) -> None:
    inputs, spec = random_inputs(400, 400, 128), scaled(128, causal=causal, scale=0.3)
    inputs.query.abs_()
    inputs.key[:, :, 0] = -math.inf
    assert_as_accurate(dispatched(inputs, spec), by_triton(inputs, spec), inputs, spec)
    wide = [torch.full((1, 2, 464, 128), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    long = [torch.full((2 * 400 + 128,), 7.0, device="cuda") for _ in range(3)]
    out, residual = (x[:, :, :400] for x in wide)
    rows = [x[:800].view(1, 2, 400) for x in long]
    query, key, value, _ = inputs
    launch._CALLS.clear()  # the cache ignores the strides of outputs, which are usually those of the query
    call = call_of(query, key, value, arguments(inputs, spec))
    assert hopper.launched(call, inputs[:3], (out, residual, rows[0], rows[1], rows[2]), None)
    launch._CALLS.clear()
    assert all(bool((x[:, :, 400:] == 7.0).all()) for x in wide)
    assert all(bool((x[800:] == 7.0).all()) for x in long)


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("length", [1, 2, 64, 127, 129, 1000])
def test_second_largest_score_equals_the_largest_if_all_keys_are_equal(length: int, causal: str) -> None:
    inputs, several = random_inputs(length, length, 128), torch.arange(length) > 0
    inputs.key[:] = inputs.key[:, :, :1].clone()
    given = dispatched(inputs, scaled(128, causal=causal))
    if causal == "none":
        several[:] = length > 1
    assert torch.equal(given.second[:, :, several], given.row_max[:, :, several])
    assert (given.second[:, :, ~several] == -math.inf).all()
    assert given.row_max.isfinite().all()


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("places", [(0, 1), (0, 2), (1, 8), (63, 64), (5, 133), (256, 383), (640, 999)])
def test_only_rows_that_see_the_largest_key_twice_are_tied(places: tuple[int, int], causal: str) -> None:
    (first, again), inputs, rows = places, random_inputs(1000, 1000, 128), torch.arange(1000)
    inputs.query.abs_()
    inputs.key[:, :, [first, again]] = 4.0
    given = dispatched(inputs, scaled(128, causal=causal))
    equal = given.second == given.row_max
    assert equal[:, :, (rows >= again) | (causal == "none")].all()
    if causal != "none":
        assert not equal[:, :, (rows >= first) & (rows < again)].any()


def tied_inputs(
    length: int, causal: str, dtype: torch.dtype = torch.bfloat16, kv_heads: int = 8
) -> tuple[Inputs, AttentionSpec]:
    """Inputs of eight heads in which many rows have several largest scores, in one tile or in different tiles."""
    inputs = random_inputs(length, length, 128, 8, kv_heads, 2, dtype)
    inputs.key[:, :, length // 2 : length // 2 * 2] = inputs.key[:, :, : length // 2]
    inputs.key[:, :, 1:40:2] = inputs.key[:, :, :40:2]
    return inputs, scaled(128, causal=causal)


@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize(("length", "dtype", "kv_heads"), [(640, torch.bfloat16, 8), (1000, torch.float16, 2)])
def test_heads_of_mixed_modes_are_as_accurate_as_triton(
    length: int, dtype: torch.dtype, kv_heads: int, causal: str
) -> None:
    (inputs, spec), modes = tied_inputs(length, causal, dtype, kv_heads), flags(*MIXED)
    assert launched_forwards(inputs, spec, modes=modes) == {"hopper forward", "forward of shifted heads"}
    plain, result, triton_result = (
        dispatched(inputs, spec),
        dispatched(inputs, spec, modes),
        by_triton(inputs, spec, modes),
    )
    assert_as_accurate(result, triton_result, inputs, spec)
    for head, shifted in enumerate(SHIFTED):
        assert torch.equal(plain.out[:, head], result.out[:, head]) != shifted
    zeros = dispatched(inputs, spec, torch.zeros_like(modes))
    assert all(torch.equal(a, b) for a, b in zip(plain, zeros, strict=True))
    for _ in range(10):
        again = dispatched(inputs, spec, modes)
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))


def test_long_call_with_only_shifted_heads_terminates_and_is_correct() -> None:
    (inputs, spec), modes = tied_inputs(2048, "top_left"), flags(*[Mode.PAPER_SOFTMAX] * 8)
    result = [dispatched(inputs, spec, modes) for _ in range(5)]
    assert_as_accurate(result[0], by_triton(inputs, spec, modes), inputs, spec)
    assert all(torch.equal(a, b) for other in result[1:] for a, b in zip(result[0], other, strict=True))


def test_backward_has_the_same_statistics_and_gradients_as_after_tritons_forward() -> None:
    (inputs, spec), modes = tied_inputs(640, "top_left"), flags(*MIXED)
    result = attend(inputs, spec, modes)
    state = new_state(8, "cuda")
    saved = Saved(*inputs[:3], *by_triton(inputs, spec, modes))
    grads = backward.attention_backward(inputs.grad, saved, state, arguments(inputs, spec, modes))
    triton_result = Outputs(*saved[3:], *grads, state)
    for slot in (
        Slot.ROWS,
        Slot.EMPTY_ROWS,
        Slot.NONFINITE_ROWS,
        Slot.TIED_ROWS_BF16,
        Slot.TIED_ROWS_ONE,
        Slot.SHIFTED_ROWS,
    ):
        assert result.counts(slot) == triton_result.counts(slot), slot
    assert min(result.counts(Slot.TIED_ROWS_BF16)) > 0
    shifted = result.counts(Slot.SHIFTED_ROWS)
    assert [count > 0 for count in shifted] == SHIFTED
    for name in ("grad_query", "grad_key", "grad_value"):
        given, wanted = getattr(result, name).double(), getattr(triton_result, name).double()
        assert (given - wanted).norm() <= 1e-2 * wanted.norm(), name


def test_cuda_graph_matches_eager_and_applies_changed_modes() -> None:
    (inputs, spec), modes = tied_inputs(640, "top_left"), flags(*[Mode.PLAIN] * 8)
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    state = new_state(8, "cuda")

    def step() -> tuple[Tensor, ...]:
        out = flash_attention(query, key, value, causal=True, state=state, modes=modes)
        assert isinstance(out, Tensor)
        return out.detach(), *torch.autograd.grad(out, (query, key, value), inputs.grad)

    plain = [Mode.PLAIN] * 8
    eager = []
    for given in (plain, list(MIXED)):
        modes.copy_(flags(*given))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            eager.append([x.clone() for x in step()])
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for given, wanted in zip((plain, list(MIXED), plain), (*eager, eager[0]), strict=True):
        modes.copy_(flags(*given))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))
    assert not torch.equal(eager[0][0], eager[1][0])
    assert torch.equal(eager[0][0], dispatched(inputs, spec).out)


def test_forward_is_bitwise_equal_when_compiled_or_without_gradients() -> None:
    inputs, spec = tied_inputs(640, "top_left")
    modes = flags(*MIXED)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attention(query, key, value, causal=True, modes=modes)
        assert isinstance(out, Tensor)
        return out

    wanted = dispatched(inputs, spec, modes).out
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    compiled = torch.compile(model, fullgraph=True)(query, key, value)
    assert torch.equal(compiled, wanted)
    grads = [torch.autograd.grad(out, (query, key, value), inputs.grad) for out in (compiled, model(query, key, value))]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        assert torch.equal(model(query, key, value), wanted)
    with torch.inference_mode():
        assert torch.equal(model(*inputs[:3]), wanted)


def test_gradients_are_as_accurate_as_with_tritons_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, spec = random_inputs(500, 500, 128, 4, 2, 2), scaled(128, causal="top_left")
    query, key, value = (x.double().requires_grad_() for x in inputs[:3])
    scores = spec.scale * (query @ key.repeat_interleave(2, 1).transpose(-1, -2))
    weights = scores.masked_fill(hidden(spec, 500, 500), -math.inf).softmax(-1)
    out = weights @ value.repeat_interleave(2, 1)
    exact = torch.autograd.grad(out, (query, key, value), inputs.grad.double())
    result = attend(inputs, spec)
    monkeypatch.setattr(hopper, "launched", lambda *_: False)
    triton_result = attend(inputs, spec)
    for name, true_gradient in zip(("grad_query", "grad_key", "grad_value"), exact, strict=True):
        error, allowed = (
            (getattr(x, name).double() - true_gradient).norm() / true_gradient.norm() for x in (result, triton_result)
        )
        assert error <= 1.05 * allowed, name


def test_failed_launch_falls_back_to_triton_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_load() -> object:
        raise ImportError("no such Gluon")

    inputs, spec = random_inputs(300, 300, 128), scaled(128)
    monkeypatch.setattr(hopper.FORWARD, "load", fail_to_load)
    monkeypatch.setattr(hopper.FORWARD, "failed", set())
    with pytest.warns(UserWarning, match="no such Gluon"):
        first = dispatched(inputs, spec)
    assert all(
        torch.equal(a, b)
        for x in (first, dispatched(inputs, spec))
        for a, b in zip(x, by_triton(inputs, spec), strict=True)
    )


def test_cached_launch_computes_the_same_as_a_new_one() -> None:
    modes = flags(*MIXED)
    turns = [
        (*tied_inputs(length, causal), given)
        for length in (640, 1000)
        for causal in ("none", "top_left")
        for given in (None, modes)
    ]
    first = [dispatched(*turn) for turn in turns]
    moved = [(Inputs(*(x.clone() for x in inputs)), spec, given) for inputs, spec, given in turns]
    again = [dispatched(*turn) for turn in moved]
    launch._CALLS.clear()
    uncached = [dispatched(*turn) for turn in turns]
    for one, other, third in zip(first, again, uncached, strict=True):
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, other, third, strict=True))
