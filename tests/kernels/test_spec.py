"""Invalid and unsupported inputs are rejected with a message that says what to do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from foreshock.contract.slots import SLOT_COUNT
from foreshock.kernels.flash_attention import flash_attention, new_state


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


Q, K = zeros(1, 4, 6, 8), zeros(1, 2, 6, 8)
CU = torch.tensor([0, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("inputs", "options", "sentence"),
    [
        ((Q, K, K), {"numerics": "fp8"}, "numerics 'fp8' does not exist; use one of float64, float32, kernel, paper"),
        ((Q, K, K), {"causal": "diagonal"}, "causal 'diagonal' is unknown; use True, False, none, top_left"),
        (
            (Q, zeros(1, 2, 7, 8), zeros(1, 2, 7, 8)),
            {"causal": True},
            r"ambiguous when lengths differ \(6 queries, 7 keys",
        ),
        ((Q, K, K), {"attn_mask": zeros(6, 6)}, "attn_mask .* is not supported; use causal, window or cu_seqlens"),
        ((Q, zeros(1, 3, 6, 8), zeros(1, 3, 6, 8)), {}, "4 query heads do not divide into 3 key heads"),
        ((Q[0], K, K), {}, r"attention takes query \[B, H, Sq, D\]"),
        ((Q, K, zeros(1, 2, 5, 8)), {}, "key and value must have the same shape"),
        ((Q, zeros(1, 2, 6, 4), zeros(1, 2, 6, 4)), {}, "batch size and head dim"),
        ((Q, K.float(), K), {}, "must share one of bfloat16, float16, float32, float64"),
        ((Q.int(), K.int(), K.int()), {}, "inputs are torch.int32"),
        ((Q.double(), K.double(), K.double()), {}, "float64 inputs need numerics='float64', got 'kernel'"),
        ((Q, K, K), {"scale": float("nan")}, "scale is nan; give a finite number or None"),
        ((Q, K, K), {"window": (-2, 0)}, r"window is \(-2, 0\); give \(left, right\)"),
        ((Q, K, K), {"softcap": -1.0}, "softcap is -1.0; give a positive number, or 0"),
        ((Q, K, K), {"dropout_p": 1.0}, "dropout_p is 1.0; give a probability from 0"),
        ((Q, K, K), {"cu_seqlens_q": CU}, "only one of cu_seqlens_q and cu_seqlens_k"),
        ((Q, K, K), {"cu_seqlens_q": CU.long(), "cu_seqlens_k": CU.long()}, r"cu_seqlens_q is torch.int64 \[2\]"),
        ((Q, K, K), {"cu_seqlens_q": CU, "cu_seqlens_k": CU[:1]}, r"cu_seqlens_k is torch.int32 \[1\]"),
        (
            (zeros(2, 4, 6, 8), zeros(2, 2, 6, 8), zeros(2, 2, 6, 8)),
            {"cu_seqlens_q": CU, "cu_seqlens_k": CU},
            r"packed sequences take tensors \[1, H, total, D\]; the batch size given is 2",
        ),
        ((Q, K, K), {"state": torch.zeros(4, 3)}, rf"give int64 \[4, {SLOT_COUNT}\]"),
        ((Q, K, K), {"modes": torch.zeros(4)}, r"modes is torch.float32 \[4\]; give int32 \[4\]"),
        ((Q, K, K), {"modes": torch.zeros(4, dtype=torch.int32, device="meta")}, "modes is on meta; move it to cpu"),
    ],
)
def test_invalid_input_is_rejected_with_advice(
    inputs: tuple[Tensor, ...], options: dict[str, Any], sentence: str
) -> None:
    query, key, value = inputs
    with pytest.raises(ValueError, match=sentence):
        flash_attention(query, key, value, **options)


@pytest.mark.parametrize("heads", [0, -3])
def test_state_without_heads_is_rejected(heads: int) -> None:
    with pytest.raises(ValueError, match=rf"heads is {heads}; pass the number of query heads"):
        new_state(heads)
