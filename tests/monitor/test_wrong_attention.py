"""An attention that computes wrong rows is reported in the first sample that holds one; a correct one never is."""

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
from tests.monitor.test_clipping import changed, two_layers
from tests.monitor.watching import listening
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
OWN: Any = torch.ops.aten.scaled_dot_product_attention
"""PyTorch's function under a name that no agent rebinds."""
SDPA = "foreshock.monitor.attention.interception.SDPA"


class Attention:
    """PyTorch's function, of whose result something is wrong; counts its calls, of which two layers make two a step."""

    def __init__(self, wrong: Callable[[int, Tensor], Tensor]) -> None:
        self.wrong, self.calls = wrong, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self.wrong(self.calls, OWN(*args, **kwargs))


@contextmanager
def training(wrong: Callable[[int, Tensor], Tensor], **settings: Any) -> Iterator[Any]:
    """A model of two layers with such an attention under an agent: the agent, what it says, model and attention."""
    model, attention = two_layers(), Attention(wrong)
    with listening(model, attention="keep", **settings) as (agent, listener), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SDPA, attention)
        yield agent, listener, model, attention


def with_wrong_second_head(wrong: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
    return torch.cat([out[:, :1], wrong(out[:, 1:])], 1)


def operands(dtype: torch.dtype, length: int, dim: int, sharpness: float, seed: int, *, repeats: int = 1) -> Any:
    """query, key, value, grad [2, 4, S, D]; each token comes `repeats` times, so that rounding errors add up."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(2, 4, -(-length // repeats), dim, generator=generator) for _ in range(4))
    query, key, value, grad = (x.repeat_interleave(repeats, 2)[:, :, :length] for x in drawn)
    return tuple(x.to(dtype) for x in (query * sharpness, key * sharpness, value + 0.5, grad))


def rounding_its_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As code that is written by hand computes a causal attention in 16 bits: each result is rounded."""
    scores = query @ key.mT * (1 / math.sqrt(query.shape[3]))
    scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def of_one(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def compared(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, out: Tensor, **options: Any) -> Words:
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
def test_no_row_of_a_correct_attention_is_reported(
    dtype: torch.dtype, length: int, dim: int, sharpness: float, repeats: int, seed: int
) -> None:
    query, key, value, grad = operands(dtype, length, dim, sharpness, seed, repeats=repeats)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        words = compared(query, key, value, grad, of_one(query, key, value, backend))
        assert slot_values(words, Slot.CHECKED_ROWS).tolist() == [2 * length] * 4
        assert not words[:, Slot.WRONG_ROWS].any(), slot_values(words, Slot.OUTPUT_ERROR_MAX)
    out = rounding_its_scores(query, key, value)
    assert not compared(query, key, value, grad, out, rounds="scores")[:, Slot.WRONG_ROWS].any()


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(TYPES),
    length=st.integers(1, 64),
    sharpness=st.floats(0.0, 1.5),
    errors=st.lists(st.floats(-1.0, 1.0), min_size=4, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_a_row_is_reported_when_it_is_farther_from_the_truth_than_any_rounding_goes(
    dtype: torch.dtype, length: int, sharpness: float, errors: list[float], seed: int
) -> None:
    """The truth is computed in float64 from the same operands. Within its own type's unit roundoff an output is right;
    a row that lost more than a tenth of what its values weigh is wrong in every type."""
    query, key, value, grad = operands(dtype, length, 16, sharpness, seed)
    scores = query.double() @ key.double().mT / 4
    weights = (scores + torch.full_like(scores, -math.inf).triu(1)).softmax(-1)
    truth = weights @ value.double()
    size = (weights @ value.double().square().sum(-1, keepdim=True)).sqrt()
    off = torch.tensor(errors).double().view(1, 4, 1, 1) * size / 4
    words = compared(query, key, value, grad, (truth + off).to(dtype))
    for head, error in enumerate(errors):
        wrong = int(words[head, Slot.WRONG_ROWS])
        if abs(error) > 0.1 + 0.02:
            assert wrong == 2 * length
        if abs(error) < 2**-9:
            assert wrong == 0


def with_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    wrong: Callable[[Tensor], Tensor] | None = None,
    operand: int = 0,
    flipped: Callable[[Tensor], None] | None = None,
    **options: Any,
) -> Words:
    """What a probe counts of PyTorch's attention, whose gradient of an operand `wrong` may change, and whose saved
    log-sum-exp `flipped`, which is given its bits."""
    state, tick, number = new_state(query.shape[1]), new_ticks(1, query.device)[0], start_sampling(Sampling(EVERY_ROW))
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    groups = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=groups, **options)
    if wrong is not None and out.grad_fn is not None:
        out.grad_fn.register_hook(lambda given, _: (*given[:operand], wrong(given[operand]), *given[operand + 1 :]))
    if flipped is not None:
        flipped(out.grad_fn._saved_logsumexp.data.view(torch.int32))  # type: ignore[union-attr]
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
def test_no_gradient_of_a_correct_attention_is_reported(
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
        words = with_gradients(query, key, value, grad * size, **options)
    assert np.isfinite(slot_values(words, Slot.GRADIENT_ERROR_MAX)).all()
    assert not words[:, Slot.WRONG_GRADIENT_ROWS].any(), slot_values(words, Slot.GRADIENT_ERROR_MAX)


def rows_zeroed(out: Tensor) -> Tensor:
    return torch.where(torch.arange(out.shape[2]).view(-1, 1) % 3 == 0, 0.0, out)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a third of the rows zeroed": rows_zeroed,
    "a third of the rows doubled": lambda out: out + out - rows_zeroed(out),
    "rows of the next token": lambda out: out.roll(1, 2),
    "normalised by a sum that is a tenth too large": lambda out: out / 1.1,
    "one element of each row of another size": lambda out: torch.cat([out[..., :1] * 64, out[..., 1:]], -1),
}


@pytest.mark.parametrize("where", ["output", "queries", "keys", "values"])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dtype", TYPES)
def test_wrong_rows_or_gradients_of_one_head_are_counted_in_that_head(
    dtype: torch.dtype, kind: str, where: str
) -> None:
    query, key, value, grad = operands(dtype, 96, 32, 1.0, 0)

    def of_one_head(given: Tensor) -> Tensor:
        given = given.clone()
        given[:, 2] = WRONG[kind](given)[:, 2]
        return given

    if where == "output":
        out = of_one_head(of_one(query, key, value, SDPBackend.FLASH_ATTENTION))
        words, slot, other = compared(query, key, value, grad, out), Slot.WRONG_ROWS, Slot.WRONG_GRADIENT_ROWS
    else:
        operand = ("queries", "keys", "values").index(where)
        words = with_gradients(query, key, value, grad, of_one_head, operand, is_causal=True)
        slot, other = Slot.WRONG_GRADIENT_ROWS, Slot.WRONG_ROWS
    wrong = slot_values(words, slot)
    assert wrong.sum() == wrong[2]
    assert not words[:, other].any()
    if "one element" in kind:
        assert wrong[2] >= 60 or where != "output"
    elif where in ("output", "queries"):
        assert wrong[2] >= (60 if where == "output" else 30)
    elif "tenth" not in kind:  # sums over queries cancel, and their rounding may come to a tenth in 16 bits
        assert wrong[2] >= 2


def test_a_flipped_bit_of_a_log_sum_exp_is_reported_when_it_moves_it_past_its_bound() -> None:
    query, key, value, grad = operands(torch.bfloat16, 64, 32, 1.0, 0)
    reported = []
    for bit in range(31):
        moved = 0.0

        def flipped(bits: Tensor, bit: int = bit) -> None:
            nonlocal moved
            before = float(bits.view(torch.float32)[1, 3, 40])
            bits[1, 3, 40] ^= 1 << bit
            moved = abs(float(bits.view(torch.float32)[1, 3, 40]) - before)

        words = with_gradients(query, key, value, grad, flipped=flipped, is_causal=True)
        found = slot_values(words, Slot.WRONG_GRADIENT_ROWS)
        assert found[:3].tolist() == [0.0, 0.0, 0.0]
        reported.append(bool(found[3]))
        assert reported[-1] == (moved > 0.01) or 1e-4 < moved <= 0.01 or not moved < math.inf, (bit, moved)
    assert sum(reported) >= 12
    assert not any(reported[:8])


def test_nothing_is_compared_where_it_is_unknown_what_the_attention_rounds_or_drops() -> None:
    query, key, value, grad = operands(torch.bfloat16, 32, 16, 1.0, 0)
    for options in ({"dropout_p": 0.1}, {"rounds": "unknown"}):
        words = compared(query, key, value, grad, torch.zeros_like(query), **options)
        assert not words[:, [Slot.CHECKED_ROWS, Slot.WRONG_ROWS]].any()
        assert np.isneginf(slot_values(words, Slot.OUTPUT_ERROR_MAX)).all()


@pytest.mark.promise("A29")
def test_a_wrong_kernel_is_an_incident_of_its_own_from_the_first_sample_that_holds_a_wrong_row() -> None:
    def wrong(call: int, out: Tensor) -> Tensor:  # in the second layer from the third step on
        return with_wrong_second_head(torch.zeros_like, out) if call >= 6 and call % 2 == 0 else out

    with training(wrong) as (agent, listener, model, _):
        changed(agent, model, 5)
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


def test_wrong_rows_are_reported_in_compiled_code_whose_gradients_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        return with_wrong_second_head(lambda out: 2 * out, OWN(*args, **kwargs))

    model = two_layers()
    with listening(model, attention="keep") as (agent, listener):
        monkeypatch.setattr(SDPA, wrong)
        model.compile(backend="aot_eager")
        changed(agent, model, 3)
    found = listener.of(wire.Verdict)
    assert {(one.layer, one.head, one.cause) for one in found} == {(n, 1, "attention kernel") for n in (0, 1)}
    words = [words for one in listener.of(wire.Sample) if (words := one.words()) is not None]
    assert all(np.isneginf(slot_values(each, Slot.GRADIENT_ERROR_MAX)).all() for each in words[1:])


@pytest.mark.parametrize(("policy", "allowed"), [("auto", True), ("auto", False), ("observe", True)])
def test_the_policy_auto_moves_a_layer_with_wrong_rows_to_our_kernels_if_the_user_allowed_it(
    policy: Any, allowed: bool
) -> None:
    settings: dict[str, Any] = {"policy": policy, "replace_wrong_attention": allowed}
    with training(lambda call, out: out if call == 1 else 2 * out, **settings) as (agent, listener, model, attention):
        for _ in range(5):
            attention.calls = 0
            changed(agent, model, 1)
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
def test_a_gradient_that_is_wrong_while_the_output_is_right_is_an_incident_of_the_same_cause() -> None:
    def zeroed(given: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
        return (with_wrong_second_head(torch.zeros_like, given[0]), *given[1:])

    def wrong(call: int, out: Tensor) -> Tensor:
        if call % 2 == 0 and out.grad_fn is not None:
            out.grad_fn.register_hook(zeroed)
        return out

    with training(wrong) as (agent, listener, model, _):
        changed(agent, model, 3)
    [found] = listener.of(wire.Verdict)
    assert (found.step, found.layer, found.head, found.cause) == (1, 1, 1, "attention kernel")
    assert "rows of its gradients or log-sum-exp are wrong" in found.sentence
    assert "scaled_dot_product_attention (torch" in found.sentence
    assert found.evidence["gradient_error"] > 1.0


class Broken(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def broken(x: Tensor, factor: float) -> Tensor:
    return Broken.apply(x, factor)  # type: ignore[no-any-return,no-untyped-call]


OF_LIBRARIES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Callable[..., Tensor]], Tensor], str]] = {
    "rows zeroed": (lambda q, k, v, own: rows_zeroed(own(q, k, v)), "its output is wrong at length 129"),
    "rows of another head": (lambda q, k, v, own: own(q, k, v).roll(1, 1), "its output is wrong at length 7"),
    "keys' gradient at small lengths": (
        lambda q, k, v, own: own(q, broken(k, 1.2 if k.shape[2] < 16 else 1.0), v),
        "its gradient of the keys is wrong at length 7",
    ),
    "queries' gradient, forward right": (
        lambda q, k, v, own: own(broken(q, 0.0), k, v),
        "its gradient of the queries is wrong at length 129",
    ),
    "a log-sum-exp of one key that is off in the backward": (
        lambda q, k, v, own: own(q, k, broken(v, math.e if v.shape[2] == 1 else 1.0)),
        "its gradient of the values is wrong at length 1,",
    ),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", OF_LIBRARIES)
def test_the_defects_of_attention_libraries_are_found_on_random_inputs_of_a_models_shapes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str
) -> None:
    own = F.scaled_dot_product_attention
    broken_call, said = OF_LIBRARIES[kind]
    assert wrong_attention(4, 2, 16, dtype, "cpu") == []

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return broken_call(query, key, value, lambda *operands: own(*operands, **options))

    monkeypatch.setattr(F, "scaled_dot_product_attention", call)
    found = wrong_attention(4, 2, 16, dtype, "cpu")
    assert any(each.startswith(said) for each in found), found
    monkeypatch.undo()
    assert assess(two_layers()).lines[2].startswith("Checked: PyTorch's attention with 2 heads of 8 on cpu")


def test_a_sample_batch_shows_wrong_rows_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layers()

    def loss() -> Tensor:
        monkeypatch.setattr(SDPA, lambda *args, **options: 2 * OWN(*args, **options))
        value: Tensor = model(torch.arange(24).view(2, 12)).square().mean()
        monkeypatch.undo()
        return value

    wrong = [line for line in assess(model, loss=loss).lines if line.startswith("Wrong attention")]
    assert [line[: len("Wrong attention: Layer 0")] for line in wrong] == [
        f"Wrong attention: Layer {n}" for n in (0, 1)
    ]
