"""Dropout: the generator against its published vectors, and attention against a materialised mask."""

import math

import pytest
import torch
from torch import Tensor

from foreshock.kernels.flash_attention import flash_attention
from foreshock.kernels.flash_attention.dropout import kept, philox_4x32


@pytest.mark.parametrize(
    ("counter", "seed", "word"),
    [  # Random123's known answers for philox4x32-10
        ((0, 0, 0, 0), 0, 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, -1, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, 0xD16CFE09),
    ],
)
def test_the_generator_gives_the_published_words(counter: tuple[int, int, int, int], seed: int, word: int) -> None:
    assert philox_4x32(counter, torch.tensor(seed)).item() == word


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 20, 8, dtype=torch.float64, generator=generator) for _ in range(4)]


def test_dropout_equals_autograd_with_the_mask_written_out() -> None:
    *tensors, grad = inputs()
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, ())
    mask = kept(seed, (2, 4, 20, 20), 0.3)
    assert mask.double().mean().item() == pytest.approx(0.7, abs=0.03)
    query, key, value = (x.clone().requires_grad_() for x in tensors)
    scores = (query @ key.mT / math.sqrt(8)).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf)
    expected = (scores.softmax(-1) * mask / 0.7) @ value
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    torch.manual_seed(5)
    out = flash_attention(query, key, value, causal=True, dropout_p=0.3, numerics="float64")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(torch.autograd.grad(out, (query, key, value), grad), expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_kernel_numerics_drop_the_same_entries_as_float64() -> None:
    *tensors, grad = (x.bfloat16() for x in inputs())
    results = []
    for numerics in ("kernel", "paper", "float64"):
        dtype = torch.float64 if numerics == "float64" else torch.bfloat16
        query, key, value = (x.to(dtype).requires_grad_() for x in tensors)
        torch.manual_seed(7)
        out = flash_attention(query, key, value, dropout_p=0.5, numerics=numerics)
        results.append([out.detach(), *torch.autograd.grad(out, (query, key, value), grad.to(dtype))])
    for approximate in results[:2]:
        for got, want in zip(approximate, results[2], strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=5e-2)
