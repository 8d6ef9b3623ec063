"""The edges of what the kernels serve: sizes near the ends of their types, odd strides, tiny and huge scores."""

import math

import pytest
import torch
from tests.kernels.triton_calls import (
    BY,
    DEVICE,
    INTERPRETED,
    attend,
    largest_error,
    random_inputs,
    scaled,
    truth,
)
from torch import Tensor

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("kernels_serve_the_operators")]


@BY
@pytest.mark.parametrize("softcap", [2e5, 5e7])
def test_a_softcap_far_above_every_score_is_none(attention: object, softcap: float) -> None:
    inputs = random_inputs(45, 39, 32, seed=21)
    capped, plain = (attention(inputs, scaled(32, softcap=cap)) for cap in (softcap, 0.0))  # type: ignore[operator]
    exact = truth(inputs, scaled(32))
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        error, allowed = (largest_error(getattr(x, name), getattr(exact, name)) for x in (capped, plain))
        assert error <= 1.5 * allowed, name


@BY
@pytest.mark.parametrize("softcap", [0.02, 3.0])
def test_a_softcap_is_as_exact_near_its_knee_as_without_one(attention: object, softcap: float) -> None:
    inputs = random_inputs(45, 39, 32, seed=22)
    spec = scaled(32, softcap=softcap)
    given, exact = attention(inputs, spec), truth(inputs, spec)  # type: ignore[operator]
    assert largest_error(given.lse, exact.lse) < 2e-6 * (1 + softcap)


def test_rows_past_a_length_told_too_small_are_nan_and_all_others_right() -> None:
    inputs = random_inputs(40, 40, 32, seed=27)
    starts = torch.tensor([0, 11, 36], dtype=torch.int32, device=DEVICE)  # and four rows of no sequence
    spec = scaled(32, causal="top_left")
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    right = attend(inputs, spec, longest=(25, 25), **options)  # type: ignore[arg-type]
    short = attend(inputs, spec, longest=(20, 20), **options)  # type: ignore[arg-type]
    for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
        given, wanted = getattr(short, name), getattr(right, name)
        assert given[:, :, 31:36].isnan().all(), name
        assert torch.equal(given[:, :, 36:], wanted[:, :, 36:]), name
        whole = 31 if name in ("out", "lse", "grad_query") else 11  # a key is seen by queries that were lost
        assert torch.equal(given[:, :, :whole], wanted[:, :, :whole]), name


@pytest.mark.promise("K9")
@pytest.mark.parametrize(("packed", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_what_memory_held_before_reaches_no_result(
    packed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = random_inputs(23, 23, 24, heads=6, kv_heads=2, dtype=dtype, seed=28)
    modes = torch.tensor([0, 1, 2, 8, 16, 32], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 5, 5, 20], dtype=torch.int32, device=DEVICE)
    spec = scaled(24, causal="top_left", window_left=12)
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "longest": (15, 15)} if packed else {}
    results = []
    for float_word, word in ((0.0, 0), (math.nan, 77)):
        for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            plain = getattr(home, name)

            def filled(
                *given: object, _plain: object = plain, _words: tuple[float, int] = (float_word, word), **named: object
            ) -> Tensor:
                made: Tensor = _plain(*given, **named)  # type: ignore[operator]
                return made.fill_(_words[0] if made.is_floating_point() else _words[1])

            monkeypatch.setattr(home, name, filled)
        results.append(attend(inputs, spec, modes=modes, **options))  # type: ignore[arg-type]
        monkeypatch.undo()
    for name, one, other in zip(results[0]._fields, *results, strict=True):
        assert torch.equal(one, other), name
