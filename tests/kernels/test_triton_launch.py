"""Arguments of kernel launches, rejected calls, and the limits of supported calls."""

import math
from typing import Any

import pytest
import torch
from tests.kernels.triton_calls import (
    BY_BOTH,
    DEVICE,
    INTERPRETED,
    Inputs,
    attend,
    flags,
    largest_error,
    random_inputs,
    scaled,
    truth,
)
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import new_state, op
from foreshock.kernels.flash_attention.known_modes import note_modes
from foreshock.kernels.flash_attention.launch import call_of
from foreshock.kernels.flash_attention.op import attention_backward, attention_forward
from foreshock.kernels.flash_attention.spec import Arguments
from foreshock.kernels.flash_attention.triton_kernels import forward
from foreshock.kernels.flash_attention.triton_kernels.forward import launch_forward
from foreshock.kernels.flash_attention.triton_kernels.tuning import configs

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("operators_use_kernels")]


def test_too_many_sequences_times_heads_are_rejected() -> None:
    many = torch.empty(8192, 8, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    given = Arguments(None, None, None, 1, 1, None, scaled(16))
    with pytest.raises(ValueError, match=r"8192 sequences of 8 heads are 65536 planes; .* split the batch"):
        call_of(many, many, many, given)
    assert call_of(many[1:], many[1:], many[1:], given).sequences == 8191


UNLIMITED = 2**31 - 1


@BY_BOTH
@pytest.mark.parametrize(
    ("window", "equivalent"),
    [
        ((-1, UNLIMITED), (-1, -1)),
        ((UNLIMITED, -1), (-1, -1)),
        ((9, UNLIMITED), (9, -1)),
        ((UNLIMITED - 39, 4), (-1, 4)),
        ((2**40, 2**40), (-1, -1)),
    ],
)
@pytest.mark.parametrize("lengths", [(41, 23)])
def test_window_wider_than_any_tensor_is_unlimited(
    attention: object, window: tuple[int, int], equivalent: tuple[int, int], lengths: tuple[int, int]
) -> None:
    inputs = random_inputs(*lengths, 32, seed=23)
    given, want = (
        attention(inputs, scaled(32, window_left=left, window_right=correct))  # type: ignore[operator]
        for left, correct in (window, equivalent)
    )
    for name, one, other in zip(given._fields, given, want, strict=True):
        assert torch.equal(one, other), name


def run_operators(inputs: Inputs, modes: Tensor | None, lengths: Tensor | None) -> list[Tensor]:
    """Outputs, gradients and state from the operators, which receive a user's tensors with any strides."""
    query, key, value, grad = inputs
    spec = scaled(query.shape[3], causal="top_left")
    longest = (query.shape[2], key.shape[2])
    sizes = (modes, lengths, lengths, *longest, None, spec.text)
    state = new_state(query.shape[1], query.device)
    out, *saved = attention_forward(query, key, value, state, *sizes)
    grads = attention_backward(grad, query, key, value, out, *saved, state, *sizes)
    return [out, *saved, *grads, state]


@pytest.mark.parametrize("implementation", ["kernels", "reference"])
def test_modes_and_lengths_may_be_strided_or_expanded_tensors(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "reference":
        monkeypatch.setattr(op, "_kernels", lambda query, spec: None)
    inputs = random_inputs(37, 37, 32, heads=4, kv_heads=2, seed=24)
    table = torch.tensor([[2, 9], [0, 9], [1, 9], [4, 9]], dtype=torch.int32, device=DEVICE)
    one = torch.tensor([2, 0, 0, 0, 0], dtype=torch.int32, device=DEVICE)[:1].expand(4)
    starts = torch.tensor([[0, 7], [15, 7], [15, 7], [37, 7]], dtype=torch.int32, device=DEVICE)
    for modes, lengths in ((one, None), (table[:, 0], starts[:, 0])):
        given = run_operators(inputs, modes, lengths)
        packed = [None if x is None else x.contiguous() for x in (modes, lengths)]
        for value, other in zip(given, run_operators(inputs, *packed), strict=True):
            assert torch.equal(value, other)


def test_mode_written_before_a_queued_launch_leaves_no_output_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, spec = random_inputs(37, 37, 32, heads=4, kv_heads=2, seed=26), scaled(32, causal="top_left")
    modes, empty = flags(*[Mode.PLAIN] * 4), torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *given, **options: empty(*given, **options).fill_(7.0))
    note_modes(modes, [Mode.PLAIN] * 4)
    given = Arguments(modes, None, None, 37, 37, None, spec)
    before = forward.attention_forward(*inputs[:3], given)
    modes.data[1] = int(Mode.PAPER_SOFTMAX)  # .data hides the write, like one on another stream
    for one, other in zip(before, forward.attention_forward(*inputs[:3], given), strict=True):
        assert torch.equal(one, other)


def test_mode_written_between_two_launches_leaves_no_output_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, by a signal handler that ends a step during a forward."""
    inputs, spec = random_inputs(37, 37, 32, heads=4, kv_heads=2, seed=26), scaled(32, causal="top_left")
    modes, empty = flags(Mode.PLAIN, Mode.PAPER_SOFTMAX, Mode.PLAIN, Mode.PAPER_SOFTMAX), torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *given, **options: empty(*given, **options).fill_(7.0))
    given = Arguments(modes, None, None, 37, 37, None, spec)
    before = forward.attention_forward(*inputs[:3], given)

    def interrupted(*launched: Any, shifted: bool = False) -> None:
        launch_forward(*launched, shifted=shifted)
        modes[0], modes[1] = int(Mode.PAPER_SOFTMAX), int(Mode.PLAIN)

    monkeypatch.setattr(forward, "launch_forward", interrupted)
    for one, other in zip(before, forward.attention_forward(*inputs[:3], given), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shifted", [False, True])
def test_launch_for_shifted_or_for_other_heads_writes_only_those_heads(shifted: bool) -> None:
    inputs, spec = random_inputs(37, 37, 32, heads=4, kv_heads=2, seed=25), scaled(32, causal="top_left")
    query, key, value, _ = inputs
    modes = flags(Mode.PLAIN, Mode.PAPER_SOFTMAX, Mode.ROW_CORRECTED, Mode.PAPER_SOFTMAX)
    given = Arguments(modes, None, None, 37, 37, None, spec)
    call = call_of(query, key, value, given)
    config = configs(call.capability, call.block_d, call.mean_keys).forward
    rows = torch.full(query.shape[:-1], 7.0, device=DEVICE)
    outputs = (torch.full_like(query, 7.0), torch.full_like(query, 7.0), rows, rows.clone(), rows.clone())
    launch_forward(call, config, (query, key, value), outputs, given, shifted=shifted)
    for one in outputs:
        assert bool((one[:, 1 - shifted :: 2] == 7.0).all())
        assert not bool((one[:, int(shifted) :: 2] == 7.0).all(-1).any())


@BY_BOTH
@pytest.mark.parametrize("softcap", [2e5, 5e7])
def test_softcap_far_above_every_score_has_no_effect(attention: object, softcap: float) -> None:
    inputs = random_inputs(45, 39, 32, seed=21)
    capped, plain = (attention(inputs, scaled(32, softcap=cap)) for cap in (softcap, 0.0))  # type: ignore[operator]
    exact = truth(inputs, scaled(32))
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        error, allowed = (largest_error(getattr(x, name), getattr(exact, name)) for x in (capped, plain))
        assert error <= 1.5 * allowed, name


@BY_BOTH
@pytest.mark.parametrize("softcap", [0.02, 3.0])
def test_softcap_is_accurate_for_scores_near_the_cap(attention: object, softcap: float) -> None:
    inputs = random_inputs(45, 39, 32, seed=22)
    spec = scaled(32, softcap=softcap)
    given, exact = attention(inputs, spec), truth(inputs, spec)  # type: ignore[operator]
    assert largest_error(given.lse, exact.lse) < 2e-6 * (1 + softcap)


def test_rows_beyond_a_too_small_max_seqlen_are_nan_and_all_others_correct() -> None:
    inputs = random_inputs(40, 40, 32, seed=27)
    starts = torch.tensor([0, 11, 36], dtype=torch.int32, device=DEVICE)  # the last four rows belong to no sequence
    spec = scaled(32, causal="top_left")
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    correct = attend(inputs, spec, longest=(25, 25), **options)  # type: ignore[arg-type]
    short = attend(inputs, spec, longest=(20, 20), **options)  # type: ignore[arg-type]
    for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
        given, wanted = getattr(short, name), getattr(correct, name)
        assert given[:, :, 31:36].isnan().all(), name
        assert torch.equal(given[:, :, 36:], wanted[:, :, 36:]), name
        whole = 31 if name in ("out", "lse", "grad_query") else 11  # key gradients depend on the lost queries
        assert torch.equal(given[:, :, :whole], wanted[:, :, :whole]), name


@pytest.mark.promise("K9")
@pytest.mark.parametrize(("packed", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_results_do_not_depend_on_uninitialised_memory(
    packed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = random_inputs(23, 23, 24, heads=6, kv_heads=2, dtype=dtype, seed=28)
    modes = torch.tensor([0, 1, 2, 8, 16, 32], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 5, 5, 20], dtype=torch.int32, device=DEVICE)
    spec = scaled(24, causal="top_left", window_left=12)
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "longest": (15, 15)} if packed else {}
    results = []
    for float_word, word in ((0.0, 0), (math.nan, 77)):
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            plain = getattr(owner, name)

            def filled_with_words(
                *given: object, _plain: object = plain, _words: tuple[float, int] = (float_word, word), **named: object
            ) -> Tensor:
                tensor: Tensor = _plain(*given, **named)  # type: ignore[operator]
                return tensor.fill_(_words[0] if tensor.is_floating_point() else _words[1])

            monkeypatch.setattr(owner, name, filled_with_words)
        results.append(attend(inputs, spec, modes=modes, **options))  # type: ignore[arg-type]
        monkeypatch.undo()
    for name, one, other in zip(results[0]._fields, *results, strict=True):
        assert torch.equal(one, other), name
