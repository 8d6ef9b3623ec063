"""Compare the kernels with float64 attention on this machine (promise K12): no later check can find a wrong kernel."""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from foreshock.contract.slots import COUNT_SLOTS, SLOT_COUNT, Slot
from foreshock.kernels.flash_attention import flash_attention, new_state
from foreshock.kernels.flash_attention.op import each_version

_SHAPES: Final = ((4, 96, 64), (4, 300, 128), (2, 300, 128))
"""(key heads, length, head dim) of each case, with HEADS query heads. At head dim 128, Hopper has kernels of its own:
these lengths cover several full tiles and a partial one. If query heads share a key head, other versions run."""
_BATCH: Final = 2
_HEADS: Final = 4


def _inputs(device: str, kv_heads: int, length: int, dim: int) -> list[Tensor]:
    """Return random query, key, value and gradient of O."""
    generator = torch.Generator().manual_seed(0)
    heads = (_HEADS, kv_heads, kv_heads, _HEADS)
    return [torch.randn(_BATCH, h, length, dim, generator=generator).to(torch.bfloat16).to(device) for h in heads]


def _peer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _gradients(inputs: list[Tensor], attention: object) -> list[Tensor]:
    query, key, value, grad = inputs
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    out: Tensor = attention(*leaves)  # type: ignore[operator]
    out.backward(grad.to(out.dtype))  # type: ignore[no-untyped-call]
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def run(device: str) -> str:
    """Compare O, dQ, dK, dV and the counts on `device` with float64; return the result as a sentence.

    The allowed error is twice that of PyTorch's own attention in bf16 (promise K1). Raises RuntimeError with the
    figures if an error is larger, or if the counts differ.
    """
    worst = max(
        _compare(device, kv_heads, length, dim)
        for kv_heads, length, dim in _SHAPES
        for _ in each_version(dim, _HEADS // kv_heads)
    )
    return f"O, dQ, dK, dV within {worst:.2f} of PyTorch's own bf16 error (allowed 2); every row counted"


def _compare(device: str, kv_heads: int, length: int, dim: int) -> float:
    """Return the largest error of foreshock's kernels, as a multiple of PyTorch's error."""
    inputs = _inputs(device, kv_heads, length, dim)
    truth = _gradients([tensor.cpu().double() for tensor in inputs], _peer)
    peer = _gradients(inputs, _peer)
    state = new_state(_HEADS, device)
    modes = torch.zeros(_HEADS, dtype=torch.int32, device=device)  # a watched layer passes modes too
    ours = _gradients(inputs, lambda q, k, v: flash_attention(q, k, v, causal=True, state=state, modes=modes))
    at = f"at head dim {dim} with {kv_heads} key heads"
    worst = 0.0
    for name, mine, theirs, true in zip(("O", "dQ", "dK", "dV"), ours, peer, truth, strict=True):
        error = (mine.cpu().double() - true).abs().max().item()
        bound = (theirs.cpu().double() - true).abs().max().item()
        worst = max(worst, error / bound)
        if not error <= 2 * bound:
            raise RuntimeError(f"{at}: {name} is off by {error:.2e} from float64; PyTorch's own bf16 by {bound:.2e}")
    rows = state[:, Slot.ROWS].tolist()
    if state.shape != (_HEADS, SLOT_COUNT) or rows != [_BATCH * length] * _HEADS:
        raise RuntimeError(f"{at}: {rows} rows were counted per head instead of {_BATCH * length}")
    if device != "cpu":
        expected, on_cpu = new_state(_HEADS), [t.cpu() for t in inputs]
        _gradients(on_cpu, lambda q, k, v: flash_attention(q, k, v, causal=True, state=expected))
        # The last bit of a score decides a tie, and depends on the order of a sum: allow one row in a hundred.
        counts = list(COUNT_SLOTS)
        if (state.cpu()[:, counts] - expected[:, counts]).abs().max().item() > _BATCH * length / 100:
            raise RuntimeError(f"{at}: the kernel's counts differ from the reference's")
    return worst
