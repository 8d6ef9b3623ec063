"""The probe against brute force and the kernels: its statistics, its choice of rows, and its cost."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.probing import (
    EVERY_ROW,
    SAMPLED_ROW_SLOTS,
    assert_counts,
    probed,
    reference_statistics,
    scores_of,
    tensors,
    visible,
)
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, tiny_gpt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from foreshock.contract.metrics.catalog import read
from foreshock.contract.slots import COUNT_SLOTS, SUM_SLOTS, Slot, Words, fitted, merge_words, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, flash_attention, new_state
from foreshock.monitor import AgentConfig, attach
from foreshock.monitor.attached_model import GRADIENTS_EVERY
from foreshock.monitor.attention import probe
from foreshock.monitor.attention.probe import Sampling, new_ticks, probe_rows, start_sampling, stop_sampling
from foreshock.monitor.attention.probed_rows import HELD_BYTES, chosen_rows, drawn, sizes

KERNEL_SLOTS = [slot for slot in COUNT_SLOTS if slot not in SAMPLED_ROW_SLOTS]
"""The counters that the kernels have, too."""


def count_by_kernel_and_probe(
    operands: Iterable[Tensor], packed: dict[str, Any] | None = None, **options: Any
) -> tuple[Words, Words]:
    """The counters of kernel and probe for all rows. packed: the sequence arguments of the kernel."""
    query, key, value, grad = operands
    state, leaf = new_state(query.shape[1]), query.clone().requires_grad_()
    out = flash_attention(leaf, key, value, state=state, **options, **(packed or {}))
    out.backward(grad)
    ends: dict[str, Any] = {"cu_seqlens": (packed["cu_seqlens_q"], packed["cu_seqlens_k"])} if packed else {}
    return state.numpy(), probed(query, key, value, grad, out.detach(), Sampling(EVERY_ROW), **options, **ends)


SAME_SLOTS = (*KERNEL_SLOTS, Slot.SCORE_MAX, Slot.ROW_MAX_ABS, Slot.SCORE_OFFSET_SUM, Slot.SCORE_OFFSET_SUMSQ)


@pytest.mark.parametrize(
    "options", [{}, {"causal": "top_left"}, {"causal": "bottom_right", "window": (5, -1), "softcap": 20.0}]
)
@pytest.mark.parametrize(
    ("dtype", "numerics"),
    [(torch.bfloat16, "kernel"), (torch.float16, "kernel"), (torch.float32, "float32"), (torch.float64, "float64")],
)
def test_probe_of_all_rows_counts_like_the_kernel(dtype: torch.dtype, numerics: Any, options: dict[str, Any]) -> None:
    by_kernel, by_probe = count_by_kernel_and_probe(tensors(dtype), numerics=numerics, **options)
    assert slot_values(by_kernel, Slot.TIED_ROWS_BF16).min() > 0
    for slot in SAME_SLOTS:
        np.testing.assert_allclose(
            slot_values(by_probe, slot), slot_values(by_kernel, slot), rtol=2e-6, err_msg=slot.name
        )
    # The kernel reads the residual of O in 16 bits and the probe recomputes it, so they agree within its rounding.
    total = slot_values(by_kernel, Slot.DELTA_BIAS_ABS)
    assert numerics != "kernel" or total.min() > 0
    for slot in (Slot.DELTA_BIAS_SUM, Slot.DELTA_BIAS_ABS):
        near = 0.01 * total + 1e-4
        assert (np.abs(slot_values(by_probe, slot) - slot_values(by_kernel, slot)) <= near).all(), slot.name


@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (5, 2)}, {"causal": "top_left"}])
def test_probe_of_packed_sequences_counts_like_the_kernel(options: dict[str, Any]) -> None:
    ends: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 3, 11, 20]), "cu_seqlens_k": torch.tensor([0, 7, 9, 22])}
    packed = {name: each.int() for name, each in ends.items()} | {"max_seqlen_q": 9, "max_seqlen_k": 13}
    operands = (x[:1] for x in tensors(torch.float64))
    by_kernel, by_probe = count_by_kernel_and_probe(operands, packed=packed, numerics="float64", **options)
    for slot in SAME_SLOTS:
        np.testing.assert_allclose(slot_values(by_probe, slot), slot_values(by_kernel, slot), rtol=1e-12)
    assert slot_values(by_probe, Slot.EMPTY_ROWS).min() >= 4  # after the last sequence


def test_delta_bias_is_computed_from_the_given_output() -> None:
    query, key, value, grad = tensors(torch.float64, kv_heads=4)
    out = (query @ key.mT / 4).softmax(-1) @ value
    wrong_out = (out + 0.25).bfloat16().double()  # in all numerics, the bias is that of O in 16 bits
    words = probed(query, key, value, grad, wrong_out, Sampling(EVERY_ROW), numerics="float64")
    expected = (grad * (wrong_out - out)).sum((0, 2, 3))
    np.testing.assert_allclose(slot_values(words, Slot.DELTA_BIAS_SUM), expected, rtol=1e-9)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_nonfinite_rows_are_counted_by_input_output_and_gradient(dropout_p: float) -> None:
    query, key, value, grad = tensors(torch.float32, kv_heads=4)
    query[0, 1, 3] = math.nan
    value[1, 1, 5] = math.inf
    grad[2, 2, 7] = math.inf
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    out[1, 3, 2, 0] = math.nan  # like a broken kernel
    words = probed(query, key, value, grad, out, Sampling(EVERY_ROW), numerics="float32", dropout_p=dropout_p)
    rows = query.shape[2]
    assert slot_values(words, Slot.NONFINITE_ROWS).tolist() == [0, 1 + rows, 1, 1]
    assert slot_values(words, Slot.NONFINITE_INPUT_ROWS).tolist() == [0, 1 + rows, 0, 0]
    assert slot_values(words, Slot.NONFINITE_OUTPUT_ROWS).tolist() == [0, 0, 0, 1]
    assert slot_values(words, Slot.ROWS).tolist() == [72, 71 - rows, 71, 71]
    assert (slot_values(words, Slot.DELTA_BIAS_ABS) > 0).all() == (dropout_p == 0.0)
    assert np.isfinite([slot_values(words, slot) for slot in SUM_SLOTS]).all()


def test_captured_step_measures_fewer_rows_because_each_replay_does(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, grad = tensors(torch.float32)
    arguments = query, key, value, grad, grad
    assert slot_values(probed(*arguments, Sampling(12, 4), numerics="float32"), Slot.ROWS).tolist() == [12] * 4
    monkeypatch.setattr("foreshock.monitor.attention.probe._capturing", lambda query: True)
    not_due = Sampling(12, 4, due=False)
    assert slot_values(probed(*arguments, not_due, numerics="float32"), Slot.ROWS).tolist() == [3] * 4
    assert not_due.captured


@pytest.mark.parametrize("bounds", [(None, None), (torch.tensor([0, 3, 8], dtype=torch.int32),) * 2])
def test_probe_operator_passes_opcheck(bounds: Any) -> None:
    query, key, value, grad = tensors(torch.float32, length=8)
    state, tick = new_state(4), new_ticks(1, torch.device("cpu"))[0].clone()
    number = start_sampling(Sampling(3))
    operands = (grad, grad, query, key, value, None, *bounds)
    spec = AttentionSpec(0.25, "top_left", numerics="float32").text
    try:
        given = (*operands, state, tick, torch.full((4,), -math.inf), number, spec, [])
        torch.library.opcheck(torch.ops.foreshock.probe_rows.default, given)
    finally:
        stop_sampling(number)


@pytest.mark.parametrize(("count", "batch", "queries"), [(20, 3, 24), (70, 3, 24), (33, 7, 5), (40, 5, 30)])
def test_rows_are_sampled_uniformly_and_stratified_along_the_sequence(count: int, batch: int, queries: int) -> None:
    entries, of_each = sizes(count, batch, queries)
    ticks, hits = 3000, np.zeros((batch, queries))
    tick = new_ticks(3, torch.device("cpu"))[2]
    for _ in range(ticks):
        entry, row = (x.numpy() for x in chosen_rows(tick, count, batch, queries))
        assert len(set(entry)) == entries
        stretch = np.arange(of_each) * queries / of_each
        assert (row >= np.floor(stretch)).all()
        assert (row < np.ceil(stretch + queries / of_each)).all()
        np.add.at(hits, (entry[:, None], row), 1)
        tick += 1
    expected = ticks * entries * of_each / (batch * queries)
    deviation = np.abs(hits - expected) / np.sqrt(expected)
    assert deviation.max() < 4.5
    assert (hits.sum(1) - expected * queries).max() <= 6 * np.sqrt(ticks) * of_each


def test_layers_and_steps_draw_different_random_numbers() -> None:
    index = torch.arange(64)
    draws = [drawn(tick * 64 + index) for first in new_ticks(2, torch.device("cpu")) for tick in (first, first + 1)]
    numbers = torch.cat(draws).tolist()
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("rows", [20, 40, EVERY_ROW])
@pytest.mark.parametrize("held_bytes", [4 * 24 * 4 * 7, 4 * 24 * 4 * 40, 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 4, {"causal": "top_left"}),
        (6, 2, {"window": (7, 3)}),
        (3, 1, {"causal": "bottom_right", "scale": 0.3, "softcap": 12.0}),
    ],
)
def test_chunk_size_does_not_change_the_statistics(
    monkeypatch: pytest.MonkeyPatch, held_bytes: int, rows: int, heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    arguments = tensors(torch.float64, heads=heads, kv_heads=kv_heads, seed=rows, offset=0.0)
    sampling = Sampling(rows, strict=True)
    at_once = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    monkeypatch.setattr("foreshock.monitor.attention.probed_rows.HELD_BYTES", held_bytes)
    in_parts = probed(*arguments, arguments[0], sampling, 2, numerics="float64", **options)
    assert slot_values(at_once, Slot.ROWS).min() > 0
    for slot in Slot:
        np.testing.assert_allclose(
            slot_values(in_parts, slot), slot_values(at_once, slot), rtol=1e-11, atol=1e-11, err_msg=slot.name
        )


class CountWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that operations write, and the bytes of the largest tensor."""

    numbers = largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        outputs = given if isinstance(given, tuple | list) else (given,)
        for out in outputs:
            if isinstance(out, Tensor) and not func.is_view:
                self.numbers += out.numel()
                self.largest_bytes = max(self.largest_bytes, out.nbytes)
        return given


@pytest.mark.parametrize(("dtype", "numerics"), [(torch.bfloat16, "kernel"), (torch.float32, "float32")])
def test_temporary_memory_is_bounded_for_any_number_of_rows(dtype: torch.dtype, numerics: Any) -> None:
    query, key, value, grad = (x[:2].repeat(1, 1, 90, 1) for x in tensors(dtype, heads=4, kv_heads=2))  # 2160 tokens
    state, tick = new_state(4), new_ticks(1, query.device)[0]
    number = start_sampling(Sampling(EVERY_ROW, strict=True))
    spec = AttentionSpec(0.25, "top_left", numerics=numerics).text
    try:
        with CountWrites() as written:  # type: ignore[no-untyped-call]
            probe_rows(grad, grad, query, key, value, None, None, None, state, tick, None, number, spec)
    finally:
        stop_sampling(number)
    assert slot_values(state.numpy(), Slot.ROWS).tolist() == [2 * 2160] * 4
    assert written.largest_bytes <= HELD_BYTES


SHARE = 0.05
"""The probe's maximal share of a step's FLOPs, averaged over all steps."""
PASSES = 20
"""The maximal count of numbers written for each score and feature of a measured row."""


def step(model: TinyGPT, ids: Tensor) -> tuple[int, int]:
    """FLOPs of the matrix products in a forward and backward, and the count of numbers written."""
    with FlopCounterMode(display=False) as flops, CountWrites() as written:  # type: ignore[no-untyped-call]
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    return flops.get_total_flops(), written.numbers


@pytest.mark.parametrize(("width", "heads", "rows", "length"), [(192, 6, 4, 63), (128, 2, 2, 512)])
def test_probe_costs_at_most_5_percent_of_flops_by_default(
    monkeypatch: pytest.MonkeyPatch, width: int, heads: int, rows: int, length: int
) -> None:
    monkeypatch.setattr(probe, "_operator", probe.probe_rows)  # dispatch modes do not see inside operators
    ids = torch.randint(48, (rows, length), generator=torch.Generator().manual_seed(0))

    class Block(torch.nn.Module):
        """A transformer block."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = CausalSelfAttention(width, heads)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norms[0](x))
            out: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
            return out

    model = tiny_gpt(Block(), width=width)
    plain_flops, plain_written = step(model, ids)
    every = AgentConfig().stride
    with attach(model, run="cost", attention="keep", quiet=True, strict=True) as agent:
        compared_flops, compared_written = step(model, ids)  # the first step is measured, and its gradients are checked
        agent.step()
        model.zero_grad()
        other_flops, other_written = step(model, ids)
    with attach(model, run="cost", attention="keep", quiet=True, strict=True) as agent:
        agent._attached.sampling.gradients = False
        flops, written = step(model, ids)
    # An unmeasured step writes one sum per head, and their sum.
    assert (other_flops, other_written - plain_written) == (plain_flops, rows * heads + 1)
    mean_flops = flops - plain_flops + (compared_flops - flops) / GRADIENTS_EVERY
    assert 0 < mean_flops <= SHARE * every * plain_flops
    measured = min(rows * length, AgentConfig().probe_rows)
    most = PASSES * measured * (heads * length + width)
    assert 0 < written - plain_written <= most
    assert 0 < (compared_written - written) / GRADIENTS_EVERY <= most / 10


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top_left"},
        {"causal": "bottom_right", "window": (5, -1)},
        {"window": (3, 2)},
        {"causal": "top_left", "softcap": 5.0},
    ],
)
@pytest.mark.parametrize(
    ("dtype", "numerics", "rtol"), [(torch.float64, "float64", 1e-12), (torch.bfloat16, "kernel", 3e-6)]
)
def test_entropies_equal_a_float64_reference(
    dtype: torch.dtype, numerics: Any, rtol: float, options: dict[str, Any]
) -> None:
    query, key, value, grad = (x[:1] for x in tensors(dtype, length=12))
    words = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), numerics=numerics, **options)
    softcap = options.get("softcap", 0.0)
    hits = visible(12, 12, options.get("causal", "none"), options.get("window", (-1, -1)))
    assert_counts(words, reference_statistics(scores_of(query, key, hits, softcap=softcap)), rtol, *ENTROPY)
    uniform = probed(torch.zeros_like(query), key, value, grad, grad, Sampling(EVERY_ROW), numerics=numerics, **options)
    most = slot_values(uniform, Slot.ENTROPY_SUM)  # zero scores give uniform attention
    np.testing.assert_allclose(slot_values(words, Slot.MOST_ENTROPY_SUM), most, rtol=3e-6)


ENTROPY = (Slot.ENTROPY_ROWS, Slot.ENTROPY_SUM)


def test_mean_entropy_uses_sampled_rows_only() -> None:
    query, key, value, grad = tensors(torch.float32)
    state = new_state(4)
    out: Tensor = flash_attention(query.clone().requires_grad_(), key, value, state=state, numerics="float32")
    torch.autograd.backward(out, grad)
    counted = state.numpy()
    assert slot_values(counted, Slot.ROWS).min() > 0
    assert np.isnan(read("head.entropy", counted)).all()
    sampled = probed(query, key, value, grad, grad, Sampling(EVERY_ROW), numerics="float32")
    without_entropy = fitted(sampled[:, : Slot.ENTROPY_ROWS])
    assert np.isnan(read("head.entropy", without_entropy)).all()
    merged = merge_words([counted, sampled, without_entropy])
    np.testing.assert_array_equal(read("head.entropy", merged), read("head.entropy", sampled))
