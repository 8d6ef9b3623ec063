"""Models of libraries other than transformers; each is an optional package (extra `zoo` of pyproject.toml)."""

import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from tests.zoo import more_libraries
from tests.zoo.judge import Entry
from tests.zoo.library_helpers import Named, draw, given, padding, words
from tests.zoo.running import Case, draw_weights, without_dropout
from torch import nn

_TIMM: Final[dict[str, dict[str, Any]]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "beit_base_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 28, "patch_size": 7, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "vit_relpos_small_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "cait_xxs24_224": {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "xcit_nano_12_p8_224": {"img_size": 32, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (1, 1),
        "num_heads": (2, 4),
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (1, 1),
        "num_heads": (2, 4),
    },
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "twins_svt_small": {"img_size": 64, "depths": (1, 1, 1, 1)},
    "mobilevit_xxs": {},
    "levit_128s": {"img_size": 64},
}


def entries() -> list[Entry]:
    """Every model of the packages that are installed."""
    made = []
    for package, of_package in _ZOOS.items():
        if package not in missing():
            made += [
                Entry(f"{package} {name}", package, _with_random_weights(build), cases)
                for name, build, cases in of_package()
            ]
    return made


def missing() -> list[str]:
    """The packages that are not installed."""
    return [name for name in _ZOOS if importlib.util.find_spec(name) is None]


def _with_random_weights(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def drawn() -> nn.Module:
        torch.manual_seed(0)
        model = build()
        draw_weights(model)
        without_dropout(model)
        return model

    return drawn


def _timm() -> list[Named]:
    import timm

    def build(name: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
        return lambda: timm.create_model(name, num_classes=7, **sizes)

    return [
        (name, build(name, sizes), given(x=draw(2, 3, sizes.get("img_size", 64), sizes.get("img_size", 64))))
        for name, sizes in _TIMM.items()
    ]


def _diffusers() -> list[Named]:
    import diffusers

    made: list[Named] = []
    text = draw(2, 6, 24)
    made.append((
        "UNet2DConditionModel",
        lambda: diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=24, norm_num_groups=4,
            attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        given(sample=draw(2, 4, 8, 8), timestep=3, encoder_hidden_states=text),
    ))  # fmt: skip
    made.append((
        "FluxTransformer2DModel",
        lambda: diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
        ),
        given(hidden_states=draw(2, 16, 4), encoder_hidden_states=text, pooled_projections=draw(2, 8),
               timestep=torch.tensor([1.0, 0.5]), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(6, 3)),
    ))  # fmt: skip
    made.append((
        "SD3Transformer2DModel",
        lambda: diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=8, out_channels=4,
        ),
        given(hidden_states=draw(2, 4, 8, 8), encoder_hidden_states=text, pooled_projections=draw(2, 8),
               timestep=torch.tensor([3, 7])),
    ))  # fmt: skip
    made.append((
        "PixArtTransformer2DModel",
        lambda: diffusers.PixArtTransformer2DModel(
            sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=4, in_channels=4,
            cross_attention_dim=32, caption_channels=24, out_channels=8, use_additional_conditions=False,
        ),
        given(hidden_states=draw(2, 4, 8, 8), encoder_hidden_states=text, timestep=torch.tensor([3, 7]),
               added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ))  # fmt: skip
    made.append((
        "DiTTransformer2DModel",
        lambda: diffusers.DiTTransformer2DModel(
            sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=4, in_channels=4,
            out_channels=8, num_embeds_ada_norm=10, norm_num_groups=4,
        ),
        given(hidden_states=draw(2, 4, 8, 8), timestep=torch.tensor([3, 7]), class_labels=torch.tensor([1, 2])),
    ))  # fmt: skip
    made.append((
        "WanTransformer3DModel",
        lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=24, freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
        ),
        given(hidden_states=draw(2, 4, 2, 8, 8), timestep=torch.tensor([3, 7]), encoder_hidden_states=text),
    ))  # fmt: skip
    return made


def _torchtune() -> list[Named]:
    from torchtune.models.gemma2 import gemma2
    from torchtune.models.llama3 import llama3
    from torchtune.models.mistral import mistral
    from torchtune.models.qwen2 import qwen2

    sizes = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "max_seq_len": 32}
    cases = given(tokens=words(2, 12))
    return [
        ("llama3", lambda: llama3(**sizes), cases),
        ("qwen2", lambda: qwen2(intermediate_dim=96, **sizes), cases),
        ("mistral", lambda: mistral(intermediate_dim=96, **sizes), cases),
        ("gemma2", lambda: gemma2(intermediate_dim=96, head_dim=16, sliding_window_size=4, **sizes), cases),
    ]


def _litgpt() -> list[Named]:
    from litgpt.config import Config
    from litgpt.model import GPT

    def build(**changes: Any) -> Callable[[], nn.Module]:
        sizes = {"block_size": 32, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}
        return lambda: GPT(Config(**{**sizes, **changes}))

    cases = given(idx=words(2, 12))
    return [
        ("GPT", build(), cases),
        ("GPT with grouped heads", build(n_query_groups=2), cases),
        ("GPT with one key head", build(n_query_groups=1), cases),
        ("GPT with norms of heads", build(norm_qk=True, n_query_groups=2), cases),
    ]


def _x_transformers() -> list[Named]:
    from x_transformers import Decoder, Encoder, TransformerWrapper

    def build(kind: Any, **changes: Any) -> Callable[[], nn.Module]:
        return lambda: TransformerWrapper(
            num_tokens=64, max_seq_len=32, attn_layers=kind(dim=64, depth=2, heads=4, attn_dim_head=16, **changes)
        )

    cases = given(x=words(2, 12))

    def padded(_: nn.Module) -> list[Case]:
        masks = {f"padded {place}": ~padding(place) for place in ("right", "left", "inside")}
        x = words(2, 12)
        return [Case("unpadded", {"x": x}), *(Case(name, {"x": x, "mask": m}, m) for name, m in masks.items())]

    return [
        ("Decoder", build(Decoder), cases),
        ("Decoder (flash)", build(Decoder, attn_flash=True), cases),
        (
            "Decoder (flash, rotary, grouped)",
            build(Decoder, attn_flash=True, rotary_pos_emb=True, attn_kv_heads=2),
            cases,
        ),
        ("Decoder (alibi)", build(Decoder, alibi_pos_bias=True, alibi_num_heads=2), cases),
        ("Encoder (flash)", build(Encoder, attn_flash=True), padded),
        ("Decoder (flash, norms of heads)", build(Decoder, attn_flash=True, attn_qk_norm=True), padded),
        ("Decoder (flash, keys of memory)", build(Decoder, attn_flash=True, attn_num_mem_kv=3), padded),
        (
            "Decoder (flash, latent)",
            build(Decoder, attn_flash=True, attn_use_latent_kv=True, attn_dim_latent_kv=16),
            padded,
        ),
        ("Decoder (flash, forgetting)", build(Decoder, attn_flash=True, attn_data_dependent_alibi=True), padded),
        ("Decoder (talking heads)", build(Decoder, attn_pre_talking_heads=True, attn_post_talking_heads=True), cases),
        ("Decoder (sparse)", build(Decoder, attn_sparse_topk=4), cases),
    ]


_ZOOS: Final[dict[str, Callable[[], list[Named]]]] = {
    "timm": _timm,
    "diffusers": _diffusers,
    "torchtune": _torchtune,
    "litgpt": _litgpt,
    "x_transformers": _x_transformers,
    "open_clip": more_libraries.open_clip,
    "vit_pytorch": more_libraries.vit_pytorch,
    "whisper": more_libraries.whisper,
    "esm": more_libraries.esm,
    "timesfm": more_libraries.timesfm,
}
