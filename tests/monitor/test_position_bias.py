"""What is added to the scores by the distance of two positions is part of what the probe measures of them."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.monitor.doubles import Listener
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.monitor import attach

LENGTH = 9
NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "conformer_conv_dropout"), 0.0
)
CONFORMER: dict[str, Any] = {
    **NO_DROPOUT,
    "vocab_size": 11,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 16,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        vocab_size=23, d_model=24, d_kv=8, num_heads=3, num_layers=2, num_decoder_layers=1, d_ff=16, dropout_rate=0.0
    )
    words = torch.arange(LENGTH).view(1, -1) * 2 + 3
    return transformers.T5Model(config), {"input_ids": words, "decoder_input_ids": words[:, :5] + 1}


def conformer() -> tuple[nn.Module, dict[str, Tensor]]:
    """Queries and positions have biases of their own, and the scores of positions are shifted (Transformer-XL)."""
    config = transformers.Wav2Vec2ConformerConfig(
        **CONFORMER,
        position_embeddings_type="relative",
        num_feat_extract_layers=1,
        conv_dim=(8,),
        conv_stride=(4,),
        conv_kernel=(4,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ConformerModel(config), {"input_values": torch.randn(1, 4 * LENGTH)}


def conformer_of_distances() -> tuple[nn.Module, dict[str, Tensor]]:
    """The score of a distance is a product with the query."""
    config = transformers.Wav2Vec2BertConfig(
        **CONFORMER,
        position_embeddings_type="relative_key",
        feature_projection_input_dim=10,
        left_max_position_embeddings=3,
        right_max_position_embeddings=2,
    )
    return transformers.Wav2Vec2BertModel(config), {"input_features": torch.randn(1, LENGTH, 10)}


def true_scores(model: Any, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the eager attention of each layer takes the softmax of, [H, Sq, Sk], in the order of the layers."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    scores, softmax = [], nn.functional.softmax

    def recording(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scores.append(x[0].detach().double())
        return softmax(x, *args, **kwargs)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(nn.functional, "softmax", recording)
        model(**given)
    return scores


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [t5, conformer, conformer_of_distances])
def test_a_position_bias_is_part_of_the_scores_that_are_measured(
    build: Any, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(41)
    model, given = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    scores = true_scores(model, given, monkeypatch)
    model.set_attn_implementation(implementation)
    listener = Listener()
    every_row: dict[str, Any] = {"attention": "keep", "probe_rows": 10**6, "strict": True}
    with attach(model, url=None, quiet=True, **every_row) as agent:
        agent.subscribe(listener)
        torch.autograd.backward(model(**given).last_hidden_state.square().mean())
        agent.step(1.0)
        names = [layer.name for layer in agent._attached.layers]
    assert len(scores) == len(names) > 1
    words = listener.of(wire.Sample)[0].words().reshape(len(names), 3, -1)
    for name, measured, true in zip(names, words, scores, strict=True):
        seen = true > torch.finfo(torch.float32).min / 2  # the decoder's causal mask hides the others
        offset = true.masked_fill(~seen, -math.inf).logsumexp(-1) - seen.sum(-1).log()
        np.testing.assert_allclose(
            slot_values(measured, Slot.SCORE_OFFSET_SUM), offset.sum(1), rtol=1e-4, atol=1e-5, err_msg=name
        )
    assert "native attention, sampled" in agent.report()
