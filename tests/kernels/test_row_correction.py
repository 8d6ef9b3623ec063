"""Row correction in the reference: it computes the same attention, changes only its head, and is accurate."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.row_error import mean_error
from torch import Tensor

from foreshock.contract.modes import Mode, parse_mode
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import AttentionSpec, CausalAlignment, Numerics, new_state, reference
from foreshock.kernels.flash_attention.spec import Arguments, Saved

MITIGATIONS = (
    "row_corrected",
    "exact_delta+row_corrected",
    "paper_softmax+row_corrected",
)


class Shape(NamedTuple):
    """Size and options of one attention call."""

    queries: int = 20
    keys: int = 20
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    packed: bool = False
    causal: CausalAlignment = "top_left"
    window: tuple[int, int] = (-1, -1)
    cap: float = 0.0
    dropout: float = 0.0
    offset: float = 0.0
    seed: int = 0


GROUPED = {(2, 2), (4, 2), (3, 1)}
SHAPES = st.builds(
    lambda heads, **given: Shape(heads=heads[0], kv_heads=heads[1], **given),
    heads=st.sampled_from(sorted(GROUPED)),
    queries=st.integers(1, 24),
    keys=st.integers(1, 24),
    batch=st.integers(1, 2),
    packed=st.booleans(),
    causal=st.sampled_from(("none", "top_left", "bottom_right")),
    window=st.sampled_from(((-1, -1), (4, 2), (0, 7), (5, -1))),
    cap=st.sampled_from((0.0, 0.0, 3.0)),
    dropout=st.sampled_from((0.0, 0.0, 0.3)),
    offset=st.sampled_from((0.0, 30.0, 300.0, 3000.0, 1e4)),
    seed=st.integers(0, 2**31),
)


class Problem:
    """Random attention whose keys share a direction, which makes an offset; its values share one too."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(shape.seed)
        batch, kv_heads, dim = 1 if shape.packed else shape.batch, shape.kv_heads, 16

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        common = draw(batch, kv_heads, 1, dim)
        common /= common.norm(dim=-1, keepdim=True)
        query = draw(batch, shape.heads, shape.queries, dim)
        query += 4 * common.repeat_interleave(shape.heads // kv_heads, 1)
        key = draw(batch, kv_heads, shape.keys, dim) + common * shape.offset
        value = draw(batch, kv_heads, shape.keys, dim) + 3 * draw(batch, kv_heads, 1, dim)
        grad = draw(batch, shape.heads, shape.queries, dim)
        # Every dtype gets the same numbers, with 16 bits.
        self.tensors = [x.bfloat16().to(dtype) for x in (grad, query, key, value)]
        self.heads, self.shape = shape.heads, shape
        self.spec = AttentionSpec(0.25, shape.causal, *shape.window, shape.cap, shape.dropout)
        self.seed = torch.tensor(17) if shape.dropout else None
        self.cu_queries = _boundaries(shape.queries) if shape.packed else None
        self.cu_keys = _boundaries(shape.keys) if shape.packed else None

    def run(self, numerics: Numerics, *modes: Mode) -> tuple[list[Tensor], Tensor]:
        """out, lse, row_max, dQ, dK, dV; and the state."""
        grad, query, key, value = self.tensors
        spec = replace(self.spec, numerics=numerics)
        flags = torch.tensor([int(mode) for mode in modes], dtype=torch.int32) if modes else None
        lengths = (self.shape.queries, self.shape.keys)
        given = Arguments(flags, self.cu_queries, self.cu_keys, *lengths, self.seed, spec)
        saved = Saved(query, key, value, *reference.attention_forward(query, key, value, given))
        state = new_state(self.heads)
        grads = reference.attention_backward(grad, saved, state, given)
        return [saved.out, saved.lse, saved.row_max, *grads], state


def _boundaries(total: int) -> Tensor:
    """Boundaries of three sequences: the second is empty, and the last fifth of the rows belongs to none."""
    return torch.tensor([0, total // 3, total // 3, total - total // 5], dtype=torch.int32)


@pytest.mark.parametrize("name", MITIGATIONS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=SHAPES)
def test_mitigations_equal_plain_attention_in_float64(name: str, shape: Shape) -> None:
    mode, problem = parse_mode(name), Problem(shape, torch.float64)
    plain, _ = problem.run("float64")
    mitigated, _ = problem.run("float64", *[mode] * problem.heads)
    size = 1e-10 * max(1.0, *(x[x.isfinite()].abs().max().item() for x in plain if x.isfinite().any()))
    for got, want in zip(mitigated, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=size)


@pytest.mark.parametrize("numerics", ["kernel", "paper"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shape=SHAPES, mode=st.sampled_from(MITIGATIONS).map(parse_mode))
def test_mitigation_leaves_other_heads_bitwise_unchanged(numerics: Numerics, shape: Shape, mode: Mode) -> None:
    problem = Problem(shape, torch.bfloat16)
    plain, state = problem.run(numerics)
    mitigated, mitigated_state = problem.run(numerics, mode, *[Mode.PLAIN] * (problem.heads - 1))
    for before, after in zip(plain[:4], mitigated[:4], strict=True):
        assert torch.equal(before[:, 1:], after[:, 1:])
    for before, after in zip(plain[4:], mitigated[4:], strict=True):
        assert torch.equal(before[:, 1:], after[:, 1:]) or shape.kv_heads == 1
    assert torch.equal(state[1:], mitigated_state[1:])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shape=SHAPES)
def test_row_correction_does_not_change_the_forward_or_the_statistics(shape: Shape) -> None:
    problem = Problem(shape, torch.bfloat16)
    (plain, state), (mitigated, mitigated_state) = (
        problem.run("kernel", *[mode] * problem.heads) for mode in (Mode.PLAIN, Mode.ROW_CORRECTED)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], mitigated[:3], strict=True))
    assert torch.equal(plain[5], mitigated[5])
    assert torch.equal(state, mitigated_state)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=SHAPES, mode=st.sampled_from(MITIGATIONS).map(parse_mode))
def test_mitigations_are_as_accurate_as_plain_attention(shape: Shape, mode: Mode) -> None:
    problem = Problem(shape, torch.bfloat16)
    plain, _ = problem.run("kernel")
    mitigated, _ = problem.run("kernel", *[mode] * problem.heads)
    truth, _ = Problem(shape, torch.float64).run("float64")
    for name, got, peer, want in zip(("out", "dQ", "dK", "dV"), mitigated[:1] + mitigated[3:], plain[:1] + plain[3:],
                                     truth[:1] + truth[3:], strict=True):  # fmt: skip
        allowed = (peer.double() - want).norm() + 0.02 * want.norm() + 1e-5
        assert (got.double() - want).norm() <= allowed, name


OFFSETS = [0.0, 30.0, 300.0, 3000.0, 1e4]


@pytest.mark.parametrize("offset", OFFSETS)
def test_row_correction_error_is_at_most_twice_that_of_float32(offset: float) -> None:
    """With values that share a component, which makes O and its rounding error large."""
    float32, given = mean_error(offset, Mode.PLAIN, "float32"), mean_error(offset, Mode.ROW_CORRECTED, "kernel")
    assert given.weight <= 2 * float32.weight
    assert given.row_sum <= 2 * float32.row_sum
    assert given.key_sum <= 2 * float32.key_sum


@pytest.mark.parametrize("offset", OFFSETS[2:])
def test_row_correction_reduces_the_query_gradient_error_of_large_offsets(offset: float) -> None:
    plain, mitigated = (mean_error(offset, mode, "kernel") for mode in (Mode.PLAIN, Mode.ROW_CORRECTED))
    assert 500 * mitigated.weight <= plain.weight


@pytest.mark.promise("K3")
def test_nan_key_affects_only_the_rows_that_see_it() -> None:
    problem = Problem(Shape(queries=12, keys=12, seed=9), torch.bfloat16)
    problem.tensors[2][0, 0, 7, 3] = math.nan
    (out, _, _, grad_query, *_), state = problem.run("kernel", Mode.ROW_CORRECTED)
    assert out[:, :, :7].isfinite().all()
    others = [column for column in range(16) if column != 3]  # 0 times NaN is NaN, in plain attention too
    assert grad_query[:, :, :7, others].isfinite().all()
    assert slot_values(state.numpy(), Slot.NONFINITE_ROWS).item() == 5
