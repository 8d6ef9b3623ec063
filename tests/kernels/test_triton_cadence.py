"""Counting by a cadence: one in k blocks of rows is looked at, and nothing else changes."""

import math
from typing import Any

import pytest
import torch
from tests.kernels.triton_calls import (
    BY,
    DEVICE,
    INTERPRETED,
    Outputs,
    attend,
    attend_by_reference,
    random_inputs,
    scaled,
)
from torch import Tensor

from foreshock.contract.modes import Mode
from foreshock.contract.slots import COUNT_SLOTS, MAX_SLOTS, SUM_SLOTS, Slot
from foreshock.kernels.flash_attention import backward, forward, new_state, reference
from foreshock.kernels.flash_attention.spec import Arguments, Saved

pytestmark = INTERPRETED
RESULTS = ("out", "lse", "row_max", "grad_query", "grad_key", "grad_value")
ALWAYS = (Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS)
SOMETIMES = (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_ONE, Slot.SHIFTED_ROWS)


def cadence(every: int, tick: int = 0) -> Tensor:
    return torch.tensor([every, tick], device=DEVICE)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0).to(torch.int32)


def calls() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Inputs, spec and options of calls of several kinds."""
    flags = torch.tensor([0, 8, 1, 2, 16, 4], dtype=torch.int32, device=DEVICE)
    packed = starts(20, 0, 130, 30)
    return {
        "causal": (random_inputs(140, 140, 16, batch=2, seed=41), scaled(16, causal="top_left"), {}),
        "other lengths": (
            random_inputs(135, 40, 24, heads=3, kv_heads=1, dtype=torch.float16, seed=42),
            scaled(24, causal="bottom_right"),
            {},
        ),
        "every mode": (
            random_inputs(131, 131, 16, heads=6, kv_heads=3, seed=43),
            scaled(16, causal="top_left", window_left=20),
            {"modes": flags},
        ),
        "packed": (
            random_inputs(190, 190, 16, seed=44),
            scaled(16, causal="top_left"),
            {"cu_seqlens_q": packed, "cu_seqlens_k": packed, "longest": (130, 130)},
        ),
    }


CALLS = pytest.mark.parametrize("name", ["causal", "other lengths", "every mode", "packed"])


@BY
@CALLS
def test_one_in_one_is_the_same_as_no_cadence_to_the_bit(name: str, attention: Any) -> None:
    inputs, spec, options = calls()[name]
    plain, told = attention(inputs, spec, **options), attention(inputs, spec, **options, cadence=cadence(1, 17))
    for field in Outputs._fields:
        assert torch.equal(getattr(plain, field), getattr(told, field)), field


@CALLS
@pytest.mark.parametrize("every", [3, 1000])
def test_outputs_and_gradients_keep_their_bits_under_any_cadence(name: str, every: int) -> None:
    inputs, spec, options = calls()[name]
    plain, told = attend(inputs, spec, **options), attend(inputs, spec, **options, cadence=cadence(every, 3))
    for field in RESULTS:
        assert torch.equal(getattr(plain, field), getattr(told, field)), field


@BY
@CALLS
def test_after_k_ticks_every_row_was_looked_at_once(name: str, attention: Any) -> None:
    inputs, spec, options = calls()[name]
    full, ticking = attention(inputs, spec, **options).state, cadence(3, 5)
    parts = [attention(inputs, spec, **options, cadence=ticking).state for _ in range(3)]
    assert ticking.tolist() == [3, 8]
    for slot in SOMETIMES:
        assert torch.equal(torch.stack(parts)[:, :, slot].sum(0), full[:, slot]), slot
        assert int(full[:, slot].sum()) > 0 or slot != Slot.TIED_ROWS_BF16
    skipped = sum(part[:, Slot.SKIPPED_ROWS] for part in parts)
    assert torch.equal(skipped, 2 * full[:, Slot.ROWS])
    assert not full[:, Slot.SKIPPED_ROWS].any()
    total = sum(part.view(torch.float64)[:, list(SUM_SLOTS)] for part in parts)
    known = full.view(torch.float64)[:, list(SUM_SLOTS)]
    offsets = [SUM_SLOTS.index(slot) for slot in (Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ)]
    times = torch.ones(len(SUM_SLOTS), dtype=torch.float64, device=DEVICE)
    times[offsets] = 3.0
    torch.testing.assert_close(total, known * times, rtol=1e-12, atol=1e-12)
    for part in parts:
        assert torch.equal(part[:, list(ALWAYS)], full[:, list(ALWAYS)])
        assert torch.equal(part[:, list(MAX_SLOTS)], full[:, list(MAX_SLOTS)])


@CALLS
@pytest.mark.parametrize("every", [2])
def test_the_kernels_look_at_the_rows_that_the_reference_looks_at(name: str, every: int) -> None:
    inputs, spec, options = calls()[name]
    told, known = (by(inputs, spec, **options, cadence=cadence(every, 4)) for by in (attend, attend_by_reference))
    exact = [slot for slot in COUNT_SLOTS if slot not in (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_ONE, Slot.SHIFTED_ROWS)]
    assert torch.equal(told.state[:, exact], known.state[:, exact])
    assert 0 < int(told.state[:, Slot.SKIPPED_ROWS].sum()) < int(told.state[:, Slot.ROWS].sum())


def both_passes(
    inputs: Any, spec: Any, before: Arguments, after: Arguments, by_reference: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients and the state of a forward that was told one thing and a backward that was told another."""
    query, key, value, grad = inputs
    kernels = (reference, reference) if by_reference else (forward, backward)
    saved = Saved(query, key, value, *kernels[0].attention_forward(query, key, value, before))
    state = new_state(query.shape[1], DEVICE)
    return kernels[1].attention_backward(grad, saved, state, after), state


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_a_backward_counts_what_its_forward_looked_at_whatever_the_cadence_says_by_then(by_reference: bool) -> None:
    inputs, spec, _ = calls()["causal"]
    before = Arguments(None, None, None, 140, 140, None, spec, cadence(4, 2))
    _, wanted = both_passes(inputs, spec, before, before, by_reference)
    for every, tick in ((1, 0), (3, 1)):
        before = before._replace(cadence=cadence(4, 2))
        after = before._replace(cadence=cadence(every, tick))
        _, state = both_passes(inputs, spec, before, after, by_reference)
        assert torch.equal(state, wanted)
        assert after.cadence is not None
        assert after.cadence.tolist() == [every, tick + 1]


@pytest.mark.parametrize("by_reference", [False, True], ids=["kernels", "reference"])
def test_a_head_that_is_switched_between_the_passes_is_exact_where_the_residual_was_kept_and_plain_elsewhere(
    by_reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, spec, _ = calls()["causal"]
    plain, exact = (torch.full((2,), int(mode), dtype=torch.int32, device=DEVICE) for mode in (0, Mode.EXACT_DELTA))
    if not by_reference:  # memory that nothing was written to must reach nothing
        own = torch.empty_like
        monkeypatch.setattr(
            torch, "empty_like", lambda x, **o: y.fill_(math.nan) if (y := own(x, **o)).is_floating_point() else y
        )
    before = Arguments(plain, None, None, 140, 140, None, spec, cadence(2, 0))
    switched, _ = both_passes(inputs, spec, before, before._replace(modes=exact), by_reference)
    unswitched, _ = both_passes(inputs, spec, before, before, by_reference)
    full = before._replace(cadence=None, modes=exact)
    wanted, _ = both_passes(inputs, spec, full, full, by_reference)
    for batch in range(2):
        for head in range(2):
            for block in range(2):
                rows = (batch, head, slice(128 * block, 128 * (block + 1)))
                source = wanted if (batch + head + block) % 2 == 0 else unswitched
                assert torch.equal(switched[0][rows], source[0][rows]), rows


def test_a_switched_head_is_exact_under_any_cadence() -> None:
    inputs, spec, _ = calls()["causal"]
    modes = torch.tensor([int(Mode.EXACT_DELTA), int(Mode.CENTRED_VALUES)], dtype=torch.int32, device=DEVICE)
    full, told = attend(inputs, spec, modes=modes), attend(inputs, spec, modes=modes, cadence=cadence(9))
    for field in ("residual", *RESULTS):
        assert torch.equal(getattr(full, field), getattr(told, field)), field


@pytest.mark.parametrize("size", [1e-5, 3e4])
def test_rows_that_are_counted_slowly_are_counted_in_their_turn(size: float) -> None:
    inputs = random_inputs(136, 136, 16, seed=45)
    inputs = inputs._replace(query=(inputs.query * size).to(inputs.query.dtype))
    spec = scaled(16, causal="top_left")
    full, ticking = attend(inputs, spec).state, cadence(2)
    parts = [attend(inputs, spec, cadence=ticking).state for _ in range(2)]
    for slot in SOMETIMES:
        assert torch.equal(torch.stack(parts)[:, :, slot].sum(0), full[:, slot]), slot
    assert int(full[:, Slot.TIED_ROWS_BF16].sum()) > 0
