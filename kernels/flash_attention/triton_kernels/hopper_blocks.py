"""Device functions of the forward for Hopper: which block comes next, which keys are seen, by how much rows shift."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from foreshock.contract.modes import Mode
from foreshock.kernels.flash_attention import spec
from foreshock.kernels.flash_attention.shift import PAPER_SHIFT_CAP, PAPER_TOLERANCE
from foreshock.kernels.flash_attention.triton_kernels.hopper import DIM

BLOCK: gl.constexpr = gl.constexpr(128)
"""Queries of a block, half of them for each group of warps, and keys of a tile."""
ROWS: gl.constexpr = gl.constexpr(64)
HEAD_DIM: gl.constexpr = gl.constexpr(DIM)
STAGES: gl.constexpr = gl.constexpr(2)
"""Tiles of keys, and of values, that lie in shared memory."""
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
STABLE_SOFTMAX: gl.constexpr = gl.constexpr(int(Mode.STABLE_SOFTMAX))
PAPER_SOFTMAX: gl.constexpr = gl.constexpr(int(Mode.PAPER_SOFTMAX))
TOLERANCE: gl.constexpr = gl.constexpr(PAPER_TOLERANCE)
PAPER_CAP_BF16: gl.constexpr = gl.constexpr(PAPER_SHIFT_CAP[torch.bfloat16])
PAPER_CAP_FP16: gl.constexpr = gl.constexpr(PAPER_SHIFT_CAP[torch.float16])
RESIDUAL_SCALE_FP16: gl.constexpr = gl.constexpr(spec.residual_scale(torch.float16))


@gluon.jit
def next_block(turn, sizes, CAUSAL: gl.constexpr):
    """From this turn on the first that has a block to compute: the turn, its plane, block and number of key tiles, and
    whether there is any.

    Under a causal mask a program takes blocks in pairs, one as many blocks from the end as the other from the start:
    all pairs see as many keys, so that programs that take every num_programs-th pair end together.
    """
    blocks, planes, _, _, _, tiles = sizes
    turn = gl.to_tensor(turn)
    tiles = gl.to_tensor(tiles)
    if CAUSAL:
        pairs = (blocks + 1) // 2
        pair = (gl.program_id(0) + (turn // 2) * gl.num_programs(0)) % pairs
        if (turn % 2 == 1) & (2 * pair + 1 == blocks):  # of an odd number the middle one is its own pair
            turn += 1
        item = gl.program_id(0) + (turn // 2) * gl.num_programs(0)
        plane = item // pairs
        pair = item % pairs
        block = pair + (1 - turn % 2) * (blocks - 1 - 2 * pair)
        tiles = block + 1
    else:
        item = gl.program_id(0) + turn * gl.num_programs(0)
        plane = item // blocks
        block = item % blocks
    return turn, plane, block, tiles, plane < planes


@gluon.jit
def masked(scores, first, start, local, column, length_k, CAUSAL: gl.constexpr, TAIL: gl.constexpr):
    """Scores of queries from `first` on and keys from `start` on: minus infinity where a query does not see a key."""
    if CAUSAL:
        # Where the compiler knew what this is, it would hold each column's place in a register.
        limit = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [first - start + local], gl.int32, False, 1)
        scores = gl.where(limit[:, None] >= column[None, :], scores, float("-inf"))
    elif TAIL:
        scores = gl.where((start + column < length_k)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def shift_of(largest, units, paper_shift, stable):
    """What is subtracted from a row's scores, in powers of two. Without modes paper_shift is None; `stable` adds what
    forward.stable_shift says."""
    unit, score_unit = units
    # A row whose scores are all minus infinity: -inf - -inf would be NaN.
    shift = gl.where(largest == float("-inf"), 0.0, largest * unit)
    if paper_shift is not None:
        shift += paper_shift
        if stable:
            bits = (largest * score_unit).to(gl.uint32, bitcast=True)
            odd = (153 + 2 * ((bits * 0x9E3779B1) >> 27)).to(gl.float32)
            shift += 8.0 - gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [odd], gl.float32, True, 1)
    return shift


@gluon.jit
def rounded_to(x, DTYPE: gl.constexpr):
    """x rounded to a 16-bit type, in fp32. Triton would convert bf16 back one by one, at a quarter of this speed."""
    if gl.float16 == DTYPE:
        return x.to(DTYPE).to(gl.float32)
    return gl.inline_asm_elementwise(
        """{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }""",
        "=r,=r,r,r", [x], gl.float32, True, 2,
    )  # fmt: skip
