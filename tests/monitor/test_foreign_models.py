"""Models that the agent was not written for: their logits, gradients and training are the same with it and without.

Weights are drawn at a standard deviation of 0.3: as initialised, attention is so even that an error of its mask hides.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from foreshock.monitor import attach

WAYS: list[Any] = ["kernels", "keep"]
QUIET: dict[str, Any] = {"quiet": True, "url": None, "strict": True}
X = torch.arange(3, 15)[None]
FIRST_HALF = (torch.arange(12) < 6).long()[None]


def tiny(kind: str, head: str = "ForCausalLM", **sizes: Any) -> nn.Module:
    """A small model of a family of transformers, with weights that make its attention sharp; in evaluation."""
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": 99, "pad_token_id": 0, **sizes})
    spread = 0.3 * min(1.0, (32 / sizes.get("hidden_size", 32)) ** 0.5)  # of wider ones as sharp, and no sharper
    torch.manual_seed(11)
    model: nn.Module = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, spread)
    return model


def encoder_decoder(**more: Any) -> dict[str, Any]:
    return {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        **more,
    }


DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
}
ACROSS: dict[str, Any] = {"attention_mask": FIRST_HALF, "decoder_input_ids": X}
"""The source is padded, and as long as the target."""

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "BART over a padded source": (lambda: tiny("Bart", "ForConditionalGeneration", **encoder_decoder()), ACROSS),
    "Marian over a padded source": (
        lambda: tiny("Marian", "MTModel", **encoder_decoder(), decoder_vocab_size=99),
        ACROSS,
    ),
    "M2M100 over a padded source": (lambda: tiny("M2M100", "ForConditionalGeneration", **encoder_decoder()), ACROSS),
    "PegasusX over a padded source": (
        lambda: tiny("PegasusX", "ForConditionalGeneration", **encoder_decoder(block_size=4, num_global_tokens=2)),
        ACROSS,
    ),
    "BigBirdPegasus, causal by its mask": (
        lambda: tiny("BigBirdPegasus", "ForConditionalGeneration", **encoder_decoder(attention_type="original_full")),
        {"decoder_input_ids": X},
    ),
    "NllbMoe, causal by its mask": (
        lambda: tiny("NllbMoe", "ForConditionalGeneration", **encoder_decoder(num_experts=2, expert_capacity=12)),
        ACROSS,
    ),
    "gpt-oss, sinks": (lambda: tiny("GptOss", **DECODER, **EXPERTS, sliding_window=4), {}),
    "DeepSeek-V4, sinks": (lambda: tiny("DeepseekV4", **DECODER | LATENT), {}),
    "Granite with windows, sinks": (lambda: tiny("GraniteSWA", **DECODER, sliding_window=4), {}),
    "MiMo-V2-Flash, sinks": (lambda: tiny("MiMoV2Flash", **DECODER, **EXPERTS, sliding_window=4), {}),
    "DeepSeek-V3.2, sparse indices": (lambda: tiny("DeepseekV32", **DECODER | LATENT), {}),
    "GLM-MoE-DSA, sparse indices": (lambda: tiny("GlmMoeDsa", **DECODER | LATENT), {}),
    "Phimoe, a window": (lambda: tiny("Phimoe", **DECODER, **EXPERTS, sliding_window=4), {}),
    "Mistral, a window": (lambda: tiny("Mistral", **DECODER, sliding_window=4), {}),
    "Mistral, padding inside, a window": (
        lambda: tiny("Mistral", **DECODER, sliding_window=4),
        {"attention_mask": ((torch.arange(12) < 4) | (torch.arange(12) >= 8)).long()[None]},
    ),
    "Llama, padding on the left": (lambda: tiny("Llama", **DECODER), {"attention_mask": FIRST_HALF.flip(1)}),
    "Gemma 2, a softcap": (lambda: tiny("Gemma2", **DECODER, sliding_window=4, query_pre_attn_scalar=8), {}),
    "Qwen 3, norms of queries": (lambda: tiny("Qwen3", **DECODER), {}),
}


def logits_and_gradients(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    model.zero_grad()
    logits = model(X, **inputs).logits
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    torch.autograd.backward((logits * weights).sum())
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_the_same(got: list[Tensor], expected: list[Tensor], *, to_the_bit: bool) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if to_the_bit:
            assert torch.equal(a, b), float((a - b).abs().max())
        else:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(1.0, float(b.abs().max())))


INFORMER: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


@pytest.mark.parametrize(("kind", "unwatched"), [("prob", 3), ("full", 0)])
def test_no_layer_of_an_informer_goes_unseen(kind: str, unwatched: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(3)
    config = transformers.InformerConfig(**INFORMER, attention_type=kind, sampling_factor=2)
    model = transformers.InformerModel(config)
    given = {
        "past_values": torch.randn(2, 14),
        "past_time_features": torch.randn(2, 14, 2),
        "past_observed_mask": torch.ones(2, 14),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 2),
    }

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(4)  # it draws the keys that it looks at
        torch.autograd.backward(model(**given).last_hidden_state.square().sum())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    agent = attach(model, **QUIET, sample_every_seconds=0.0)
    with agent:
        assert_the_same(gradients(), expected, to_the_bit=True)
        agent.step(1.0)
        said = agent.report()
    attention = [name for name, _ in model.named_modules() if name.endswith(("self_attn", "encoder_attn"))]
    assert len(attention) == 4
    by_hand = [line for line in caplog.text.splitlines() if "is not watched: it computes its attention by hand" in line]
    assert sum(f"{name}," in line or f"{name} " in line for line in by_hand for name in attention) == unwatched
    assert "counted nothing" not in caplog.text
    assert all(name in said for name in attention)


@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_what_it_computes_without_us(name: str, attention: Any) -> None:
    make, inputs = CASES[name]
    model = make()
    expected = logits_and_gradients(model, inputs)
    with attach(model, **QUIET, attention=attention):
        got = logits_and_gradients(model, inputs)
    assert_the_same(got, expected, to_the_bit=attention != "kernels")
    assert_the_same(logits_and_gradients(model, inputs), expected, to_the_bit=True)
