"""Dropout masks computed from a seed and each entry's position, so that forward and backward compute the same mask."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def philox_4x32(counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], seed: Tensor) -> Tensor:
    """Return the first word of Philox-4x32-10 (Salmon et al. 2011), as `tl.philox` of Triton does: uint32 in int64.

    Counters are uint32 values in int64, broadcast together; `seed` is int64 [], and its low word is key word 0.
    """
    c0, c1, c2, c3 = (torch.as_tensor(c, device=seed.device) for c in counter)
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps without losing bits of the product
        c0, c2 = ((product2 >> 32) & _WORD) ^ c1 ^ key0, ((product0 >> 32) & _WORD) ^ c3 ^ key1
        c1, c3 = product2 & _WORD, product0 & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return c0


def kept(seed: Tensor, shape: Sequence[int], dropout_p: float) -> Tensor:
    """Return which entries of P are not dropped, bool of `shape` [B, H, Sq, Sk].

    Entry (b, h, i, j) survives if the word at counter (j, i, b * H + h, 0) is at least dropout_p * 2^32.
    """
    batch, heads, queries, keys = shape
    key = torch.arange(keys, device=seed.device)
    query = torch.arange(queries, device=seed.device).view(-1, 1)
    plane = torch.arange(batch * heads, device=seed.device).view(batch, heads, 1, 1)
    return philox_4x32((key, query, plane, 0), seed) >= round(dropout_p * 2**32)
