"""Wrong attention rows are reported in the first sample that contains one; correct attention never is."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.probing import EVERY_ROW, probed
from tests.monitor.test_clipping import two_layers, weights_change
from tests.monitor.watched_training import listening
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.contract import wire
from foreshock.contract.incident import RunContext, Warned, incidents
from foreshock.contract.slots import Slot, Words, slot_values
from foreshock.kernels.flash_attention import new_state
from foreshock.monitor.assessment import assess
from foreshock.monitor.attention.probe import Sampling, new_ticks, probe, start_sampling, stop_sampling
from foreshock.monitor.attention.self_check import wrong_attention

TYPES = (torch.bfloat16, torch.float16, torch.float32)
ATEN_SDPA: Any = torch.ops.aten.scaled_dot_product_attention
"""PyTorch's function under a name that the agent does not patch."""
SDPA = "foreshock.monitor.attention.interception.SDPA"


class WrongAttention:
    """PyTorch's attention with a corrupted result. `calls` counts two calls per step, one for each layer."""

    def __init__(self, wrong: Callable[[int, Tensor], Tensor]) -> None:
        self.wrong, self.calls = wrong, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self.wrong(self.calls, ATEN_SDPA(*args, **kwargs))


@contextmanager
def training(wrong: Callable[[int, Tensor], Tensor], **settings: Any) -> Iterator[Any]:
    """A model of two layers with a WrongAttention, under an agent: (agent, listener, model, attention)."""
    model, attention = two_layers(), WrongAttention(wrong)
    with listening(model, attention="keep", **settings) as (agent, listener), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SDPA, attention)
        yield agent, listener, model, attention


def with_wrong_second_head(wrong: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
    return torch.cat([out[:, :1], wrong(out[:, 1:])], 1)


def operands(dtype: torch.dtype, length: int, dim: int, sharpness: float, seed: int, *, repeats: int = 1) -> Any:
    """query, key, value, grad [2, 4, S, D]; each token is repeated `repeats` times so that rounding errors add up."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(2, 4, -(-length // repeats), dim, generator=generator) for _ in range(4))
    query, key, value, grad = (x.repeat_interleave(repeats, 2)[:, :, :length] for x in drawn)
    return tuple(x.to(dtype) for x in (query * sharpness, key * sharpness, value + 0.5, grad))


def attention_rounding_its_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A manual causal attention in 16 bits, which rounds each intermediate result."""
    scores = query @ key.mT * (1 / math.sqrt(query.shape[3]))
    scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def sdpa_with(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def check_output(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, out: Tensor, **options: Any) -> Words:
    options = {"causal": "top_left", "numerics": "float32" if query.dtype == torch.float32 else "kernel"} | options
    return probed(query, key, value, grad, out, Sampling(EVERY_ROW), **options)


@pytest.mark.promise("A29")
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    length=st.integers(1, 160),
    dim=st.sampled_from([4, 16, 64]),
    sharpness=st.floats(0.0, 12.0),
    repeats=st.sampled_from([1, 7, 160]),
    seed=st.integers(0, 2**16),
)
def test_correct_attention_has_no_wrong_rows(
    dtype: torch.dtype, length: int, dim: int, sharpness: float, repeats: int, seed: int
) -> None:
    query, key, value, grad = operands(dtype, length, dim, sharpness, seed, repeats=repeats)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        words = check_output(query, key, value, grad, sdpa_with(query, key, value, backend))
        assert slot_values(words, Slot.CHECKED_ROWS).tolist() == [2 * length] * 4
        assert not words[:, Slot.WRONG_ROWS].any(), slot_values(words, Slot.OUTPUT_ERROR_MAX)
    out = attention_rounding_its_scores(query, key, value)
    assert not check_output(query, key, value, grad, out, rounds="scores")[:, Slot.WRONG_ROWS].any()


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    length=st.integers(1, 64),
    sharpness=st.floats(0.0, 1.5),
    errors=st.lists(st.floats(-1.0, 1.0), min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_row_is_wrong_only_if_its_error_exceeds_rounding(
    dtype: torch.dtype, length: int, sharpness: float, errors: list[float], seed: int
) -> None:
    """The exact output is computed in float64 from the same operands. An error within the unit roundoff of the type is
    correct; an error above a tenth of the values' root mean square is wrong in every type."""
    query, key, value, grad = operands(dtype, length, 16, sharpness, seed)
    scores = query.double() @ key.double().mT / 4
    weights = (scores + torch.full_like(scores, -math.inf).triu(1)).softmax(-1)
    exact_output = weights @ value.double()
    size = (weights @ value.double().square().sum(-1, keepdim=True)).sqrt()
    error_added = torch.tensor(errors).double().view(1, 4, 1, 1) * size / 4
    words = check_output(query, key, value, grad, (exact_output + error_added).to(dtype))
    for head, error in enumerate(errors):
        wrong = int(words[head, Slot.WRONG_ROWS])
        if abs(error) > 0.1 + 0.02:
            assert wrong == 2 * length
        if abs(error) < 2**-9:
            assert wrong == 0


def check_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    wrong: Callable[[Tensor], Tensor] | None = None,
    operand: int = 0,
    flip_bit: Callable[[Tensor], None] | None = None,
    **options: Any,
) -> Words:
    """The probe's counters for PyTorch's attention.

    wrong: changes the gradient of an operand. flip_bit: changes the bits of the saved log-sum-exp.
    """
    state, tick, number = new_state(query.shape[1]), new_ticks(1, query.device)[0], start_sampling(Sampling(EVERY_ROW))
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    groups = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=groups, **options)
    if wrong is not None and out.grad_fn is not None:
        out.grad_fn.register_hook(lambda given, _: (*given[:operand], wrong(given[operand]), *given[operand + 1 :]))
    if flip_bit is not None:
        flip_bit(out.grad_fn._saved_logsumexp.data.view(torch.int32))  # type: ignore[union-attr]
    try:
        causal = "top_left" if options.get("is_causal") else "none"
        numerics = "float32" if query.dtype == torch.float32 else "kernel"
        given: dict[str, Any] = {"mask": options.get("attn_mask"), "causal": causal, "numerics": numerics}
        probe(out, query, key, value, state, tick, number, **given).backward(grad)  # type: ignore[no-untyped-call]
    finally:
        stop_sampling(number)
    return state.numpy()


@pytest.mark.promise("A29")
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    length=st.integers(1, 160),
    dim=st.sampled_from([8, 16, 64]),
    sharpness=st.floats(0.0, 12.0),
    repeats=st.sampled_from([1, 7, 160]),
    groups=st.sampled_from([1, 2]),
    masked=st.sampled_from(["none", "causal", "mask"]),
    size=st.sampled_from([1e-4, 1.0, 100.0]),
    seed=st.integers(0, 2**16),
)
def test_correct_attention_has_no_wrong_gradient_rows(
    dtype: torch.dtype,
    length: int,
    dim: int,
    sharpness: float,
    repeats: int,
    groups: int,
    masked: str,
    size: float,
    seed: int,
) -> None:
    query, key, value, grad = operands(dtype, length, dim, sharpness, seed, repeats=repeats)
    key, value = key[:, ::groups].contiguous(), value[:, ::groups].contiguous()
    options: dict[str, Any] = {"is_causal": True} if masked == "causal" else {}
    if masked == "mask":
        options["attn_mask"] = torch.ones(length, length, dtype=torch.bool).tril(1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        words = check_gradients(query, key, value, grad * size, **options)
    assert np.isfinite(slot_values(words, Slot.GRADIENT_ERROR_MAX)).all()
    assert not words[:, Slot.WRONG_GRADIENT_ROWS].any(), slot_values(words, Slot.GRADIENT_ERROR_MAX)


def zero_a_third_of_rows(out: Tensor) -> Tensor:
    return torch.where(torch.arange(out.shape[2]).view(-1, 1) % 3 == 0, 0.0, out)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a third of the rows zeroed": zero_a_third_of_rows,
    "a third of the rows doubled": lambda out: out + out - zero_a_third_of_rows(out),
    "rows shifted by one token": lambda out: out.roll(1, 2),
    "softmax sum a tenth too large": lambda out: out / 1.1,
    "one element of each row scaled": lambda out: torch.cat([out[..., :1] * 64, out[..., 1:]], -1),
}


@pytest.mark.parametrize("where", ["output", "queries", "keys", "values"])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dtype", TYPES)
def test_wrong_rows_or_gradients_are_counted_in_their_head(dtype: torch.dtype, kind: str, where: str) -> None:
    query, key, value, grad = operands(dtype, 96, 32, 1.0, 0)

    def corrupt_one_head(given: Tensor) -> Tensor:
        given = given.clone()
        given[:, 2] = WRONG[kind](given)[:, 2]
        return given

    if where == "output":
        out = corrupt_one_head(sdpa_with(query, key, value, SDPBackend.FLASH_ATTENTION))
        words, slot, other = check_output(query, key, value, grad, out), Slot.WRONG_ROWS, Slot.WRONG_GRADIENT_ROWS
    else:
        operand = ("queries", "keys", "values").index(where)
        words = check_gradients(query, key, value, grad, corrupt_one_head, operand, is_causal=True)
        slot, other = Slot.WRONG_GRADIENT_ROWS, Slot.WRONG_ROWS
    wrong = slot_values(words, slot)
    assert wrong.sum() == wrong[2]
    assert not words[:, other].any()
    if "one element" in kind:
        assert wrong[2] >= 60 or where != "output"
    elif where in ("output", "queries"):
        assert wrong[2] >= (60 if where == "output" else 30)
    elif "tenth" not in kind:  # sums over queries cancel, and 16-bit rounding may reach a tenth of them
        assert wrong[2] >= 2


def test_flipped_bit_of_a_log_sum_exp_is_reported_if_it_exceeds_the_bound() -> None:
    query, key, value, grad = operands(torch.bfloat16, 64, 32, 1.0, 0)
    reported = []
    for bit in range(31):
        moved = 0.0

        def flip_bit(bits: Tensor, bit: int = bit) -> None:
            nonlocal moved
            before = float(bits.view(torch.float32)[1, 3, 40])
            bits[1, 3, 40] ^= 1 << bit
            moved = abs(float(bits.view(torch.float32)[1, 3, 40]) - before)

        words = check_gradients(query, key, value, grad, flip_bit=flip_bit, is_causal=True)
        found = slot_values(words, Slot.WRONG_GRADIENT_ROWS)
        assert found[:3].tolist() == [0.0, 0.0, 0.0]
        reported.append(bool(found[3]))
        assert reported[-1] == (moved > 0.01) or 1e-4 < moved <= 0.01 or not moved < math.inf, (bit, moved)
    assert sum(reported) >= 12
    assert not any(reported[:8])


def test_output_is_not_checked_with_dropout_or_unknown_rounding() -> None:
    query, key, value, grad = operands(torch.bfloat16, 32, 16, 1.0, 0)
    for options in ({"dropout_p": 0.1}, {"rounds": "unknown"}):
        words = check_output(query, key, value, grad, torch.zeros_like(query), **options)
        assert not words[:, [Slot.CHECKED_ROWS, Slot.WRONG_ROWS]].any()
        assert np.isneginf(slot_values(words, Slot.OUTPUT_ERROR_MAX)).all()


@pytest.mark.promise("A29")
def test_wrong_kernel_raises_an_incident_in_its_first_sample() -> None:
    def wrong(call: int, out: Tensor) -> Tensor:  # in the second layer, from step 3
        return with_wrong_second_head(torch.zeros_like, out) if call >= 6 and call % 2 == 0 else out

    with training(wrong) as (agent, listener, model, _):
        weights_change(agent, model, 5)
    [found] = listener.of(wire.Verdict)
    assert (found.step, found.layer, found.head, found.cause) == (3, 1, 1, "attention kernel")
    assert (found.severity, found.state) == ("critical", "raised")
    assert f"scaled_dot_product_attention (torch {torch.__version__.partition('+')[0]}" in found.sentence
    assert found.evidence["wrong_share"] == 1.0
    assert found.evidence["output_error"] > 1.0
    [incident] = incidents([Warned(4, 3, found)], RunContext("row_corrected", policy="auto"))
    assert (incident.id, incident.state, incident.act, incident.opened_step) == ("attention-kernel", "open", "none", 3)
    assert "layer 1 head 1, since step 3" in incident.sentence
    assert "only one rank reports it, drain its GPU" in incident.to_do


def test_compiled_code_reports_wrong_rows_without_checking_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        return with_wrong_second_head(lambda out: 2 * out, ATEN_SDPA(*args, **kwargs))

    model = two_layers()
    with listening(model, attention="keep") as (agent, listener):
        monkeypatch.setattr(SDPA, wrong)
        model.compile(backend="aot_eager")
        weights_change(agent, model, 3)
    found = listener.of(wire.Verdict)
    assert {(one.layer, one.head, one.cause) for one in found} == {(n, 1, "attention kernel") for n in (0, 1)}
    words = [words for one in listener.of(wire.Sample) if (words := one.words()) is not None]
    assert all(np.isneginf(slot_values(each, Slot.GRADIENT_ERROR_MAX)).all() for each in words[1:])


@pytest.mark.parametrize(("policy", "allowed"), [("auto", True), ("auto", False), ("observe", True)])
def test_auto_moves_a_wrong_layer_to_the_kernels_only_if_allowed(policy: Any, allowed: bool) -> None:
    settings: dict[str, Any] = {"policy": policy, "replace_wrong_attention": allowed}
    with training(lambda call, out: out if call == 1 else 2 * out, **settings) as (agent, listener, model, attention):
        for _ in range(5):
            attention.calls = 0
            weights_change(agent, model, 1)
        modes = agent.modes()
    [found] = listener.of(wire.Verdict)
    moved = policy == "auto" and allowed
    assert {mode for (layer, _), mode in modes.items() if layer == 0} == {"plain"}
    assert {mode for (layer, _), mode in modes.items() if layer == 1} == {"row_corrected" if moved else "plain"}
    assert attention.calls == (1 if moved else 2)
    assert [(one.outcome, one.verdict, one.heads) for one in listener.of(wire.Switched)] == (
        [("applied", found.id, ((1, 0), (1, 1)))] if moved else []
    )
    [incident] = incidents([Warned(0, 1, found)], RunContext("row_corrected", modes=modes))
    assert ("runs on foreshock's kernels now" in incident.done) == moved


@pytest.mark.promise("A29")
def test_wrong_gradient_with_correct_output_raises_the_same_incident() -> None:
    def zeroed(given: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
        return (with_wrong_second_head(torch.zeros_like, given[0]), *given[1:])

    def wrong(call: int, out: Tensor) -> Tensor:
        if call % 2 == 0 and out.grad_fn is not None:
            out.grad_fn.register_hook(zeroed)
        return out

    with training(wrong) as (agent, listener, model, _):
        weights_change(agent, model, 3)
    [found] = listener.of(wire.Verdict)
    assert (found.step, found.layer, found.head, found.cause) == (1, 1, 1, "attention kernel")
    assert "rows of its gradients or log-sum-exp are wrong" in found.sentence
    assert "scaled_dot_product_attention (torch" in found.sentence
    assert found.evidence["gradient_error"] > 1.0


class ScaledGradient(torch.autograd.Function):
    """The identity with a scaled gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    return ScaledGradient.apply(x, factor)  # type: ignore[no-any-return,no-untyped-call]


LIBRARY_DEFECTS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Callable[..., Tensor]], Tensor], str]] = {
    "rows zeroed": (lambda q, k, v, sdpa: zero_a_third_of_rows(sdpa(q, k, v)), "its output is wrong at length 129"),
    "rows of another head": (lambda q, k, v, sdpa: sdpa(q, k, v).roll(1, 1), "its output is wrong at length 7"),
    "keys' gradient at small lengths": (
        lambda q, k, v, sdpa: sdpa(q, scale_gradient(k, 1.2 if k.shape[2] < 16 else 1.0), v),
        "its gradient of the keys is wrong at length 7",
    ),
    "queries' gradient, correct forward": (
        lambda q, k, v, sdpa: sdpa(scale_gradient(q, 0.0), k, v),
        "its gradient of the queries is wrong at length 129",
    ),
    "log-sum-exp of a single key wrong in the backward": (
        lambda q, k, v, sdpa: sdpa(q, k, scale_gradient(v, math.e if v.shape[2] == 1 else 1.0)),
        "its gradient of the values is wrong at length 1,",
    ),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", LIBRARY_DEFECTS)
def test_known_library_defects_are_found_on_random_inputs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str
) -> None:
    sdpa = F.scaled_dot_product_attention
    broken_call, message = LIBRARY_DEFECTS[kind]
    assert wrong_attention(4, 2, 16, dtype, "cpu") == []

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return broken_call(query, key, value, lambda *operands: sdpa(*operands, **options))

    monkeypatch.setattr(F, "scaled_dot_product_attention", call)
    found = wrong_attention(4, 2, 16, dtype, "cpu")
    assert any(each.startswith(message) for each in found), found
    monkeypatch.undo()
    assert assess(two_layers()).lines[2].startswith("Checked: PyTorch's attention with 2 heads of 8 on cpu")


def test_assess_reports_wrong_rows_of_a_sample_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layers()

    def loss() -> Tensor:
        monkeypatch.setattr(SDPA, lambda *args, **options: 2 * ATEN_SDPA(*args, **options))
        value: Tensor = model(torch.arange(24).view(2, 12)).square().mean()
        monkeypatch.undo()
        return value

    wrong = [line for line in assess(model, loss=loss).lines if line.startswith("Wrong attention")]
    assert [line[: len("Wrong attention: Layer 0")] for line in wrong] == [
        f"Wrong attention: Layer {n}" for n in (0, 1)
    ]
