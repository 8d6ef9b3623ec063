"""Small transformers models with peaked attention.

With default initialisation, attention is almost uniform, which hides errors of the mask, so weights have a standard
deviation of 0.3.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

X = torch.arange(3, 15)[None]


def tiny(kind: str, head: str = "ForCausalLM", **sizes: Any) -> nn.Module:
    """A small transformers model with peaked attention, in evaluation mode."""
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": 99, "pad_token_id": 0, **sizes})
    std = 0.3 * min(1.0, (32 / sizes.get("hidden_size", 32)) ** 0.5)  # keeps wider models equally peaked
    torch.manual_seed(11)
    model: nn.Module = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, std)
    return model


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
TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: tiny("GPT2", "LMHeadModel", n_layer=2, n_head=4, n_embd=32, n_positions=64),
    "Llama": lambda: tiny("Llama", **DECODER),
    "Qwen2": lambda: tiny("Qwen2", **DECODER),
    "Mistral": lambda: tiny("Mistral", **DECODER, sliding_window=5),
    "Gemma2": lambda: tiny("Gemma2", **DECODER, query_pre_attn_scalar=8, attn_logit_softcapping=20.0, sliding_window=5),
}
"""Each model has two layers of four heads."""
