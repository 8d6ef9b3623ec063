"""What softmax cannot see of the scores, beside scores that are computed whole."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from foreshock.lab.training.model import GPT, ModelConfig
from foreshock.lab.training.null_part import NullPart


def model(**shape: Any) -> GPT:
    torch.manual_seed(7)
    return GPT(ModelConfig(layers=2, heads=4, width=24, context=12, vocabulary=50, attention_dtype="float32", **shape))


def brute_force(gpt: GPT, tokens: Tensor) -> list[tuple[float, float, float]]:
    """Mean and RMS over all rows of the mean score of every row, from whole score matrices, and the RMS over sequences
    of the norm of the mean key, per head."""
    found: list[tuple[float, float, float]] = []
    given: list[Tensor] = []
    hooks = [
        cast(Any, b).attn.register_forward_pre_hook(lambda module, args: given.append(args[0])) for b in gpt.h
    ]  # each is called once, in order
    with torch.no_grad():
        gpt(tokens, tokens)
        for block, x in zip(gpt.h, given, strict=True):
            attention = cast(Any, block).attn
            query, key, _ = attention.operands(x)
            for head in range(4):
                keys = key[:, head // (4 // key.shape[1])].double()
                rows = (query[:, head].double() @ keys.mT / math.sqrt(query.shape[3])).mean(-1)
                norms = [sum(float(x) ** 2 for x in sequence.mean(0)) for sequence in keys]
                norm = math.sqrt(sum(norms) / len(norms))
                found.append((float(rows.mean()), float(rows.square().mean().sqrt()), norm))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("shape", [{}, {"kv_heads": 2}, {"kv_heads": 1, "rotary": True}, {"qk_norm": True}])
def test_the_common_score_is_the_mean_of_each_row_of_scores(shape: dict[str, Any]) -> None:
    gpt, tokens = model(**shape), torch.randint(50, (3, 12))
    for block in gpt.h:
        torch.nn.init.normal_(cast(Any, block).attn.c_attn.bias)
    measured = NullPart(gpt, tokens).measure()
    expected = np.array(brute_force(gpt, tokens))
    assert measured["common_mean"] == pytest.approx(expected[:, 0], rel=1e-4, abs=1e-6)
    assert measured["common_rms"] == pytest.approx(expected[:, 1], rel=1e-4, abs=1e-6)
    assert measured["common_key_norm"] == pytest.approx(expected[:, 2], rel=1e-4, abs=1e-6)


def test_a_key_bias_is_told_by_query_head_and_nothing_of_the_model_changes() -> None:
    gpt = model(kv_heads=2)
    bias = cast(Any, gpt.h[1]).attn.c_attn.bias
    with torch.no_grad():
        bias[24:30] = 2.0  # the first key head of the second layer
    before = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    measured = NullPart(gpt, torch.randint(50, (2, 12))).measure()
    assert measured["key_bias_norm"].tolist() == pytest.approx([0.0] * 4 + [math.sqrt(24.0)] * 2 + [0.0] * 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in gpt.state_dict().items())


def test_a_model_without_biases_has_none() -> None:
    assert NullPart(model(qkv_bias=False), torch.randint(50, (1, 12))).measure()["key_bias_norm"].tolist() == [0.0] * 8
