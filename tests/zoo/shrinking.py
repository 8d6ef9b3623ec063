"""A small configuration of any transformers architecture, created by shrinking the fields of its default.

Field names determine the sizes: widths become 64, heads 4 (key heads 2, if there are fewer), layers 2, and the
vocabulary 99. Exceptions are in `overrides.json`, by model type.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Final

from transformers import CONFIG_MAPPING, PreTrainedConfig

WIDTH: Final = 64
HEADS: Final = 4
VOCABULARY: Final = 99
IMAGE: Final = 32
OVERRIDES: Final[dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("overrides.json").read_text())

_BASE_FIELDS: Final = {field.name for field in dataclasses.fields(PreTrainedConfig)}

_RULES: Final[tuple[tuple[str, int], ...]] = (
    (r"rotary_dim|\w*_rotary_dim", 8),
    (r"layer_(freq|type_freq|interval)|_(freq|interval|every\w*|pattern|step|stride)$", 0),
    (r"num_experts_per_tok(en)?|experts_per_token|moe_topk|moe_k|top_k_experts|num_selected_experts", 2),
    (r"n_shared_experts|num_shared_experts|shared_experts?|n_group|topk_group|expert_groups?|moe_layer_start\w*", 1),
    (r"(num|n|moe_num|num_local|n_routed)_?(routed_)?experts|num_\w*experts|n_routed_experts", 4),
    (r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers|mtp_\w*", 1),
    (r"num_kv_shared_layers|num_buckets|relative_attention_num_buckets", 0),
    (r"(num_\w*layers|n_layers?|\w*_layers|num_blocks|\w*_depth|depth|num_\w*_blocks|layers)", 2),
    (r"num_\w*key_value_heads|num_\w*kv_heads|n_kv_heads?|num_\w*kv_head", 2),
    (r"\w*d_head|dim_head", WIDTH // HEADS),
    (r"(num_|n_)?(\w*_)?(heads?|nhead)", HEADS),
    (r"(\w*_)?(qk_nope_head_dim)", 16),
    (r"(\w*_)?(qk_rope_head_dim|index_head_dim)", 8),
    (r"(\w*_)?(v_head_dim)", 24),
    (r"(\w*_)?(head_dim|d_kv|d_head|head_size|kv_channels|attention_head_size|head_width)", WIDTH // HEADS),
    (r"\w*lora_rank|\w*_rank", 16),
    (r"max_\w*position\w*|n_positions|n_ctx|max_seq\w*|seq_length|\w*max_length|max_\w*sequence\w*", 128),
    (r"sliding_window\w*|attention_window|local_attention|\w*_window_size|window_size|attention_chunk_size", 4),
    (r"(\w*_)?vocab_size\w*", VOCABULARY),
    (
        r"\w*intermediate\w*(size|dim)|ffn_\w*(dim|size)|\w*_ffn_\w*(dim|size)|\w*ffn_dim|d_ff|d_inner|n_inner|dim_feedforward|inner_dim|mlp_dim",
        96,
    ),
    (r"(\w*_)?image_size|img_size|crop_size", IMAGE),
    (r"(\w*_)?patch_size", 8),
    (r"(\w*_)?num_mel_bins|mel_bins|\w*num_mels", 16),
    (r"num_frames|frames", 4),
    (r"num_queries|num_\w*query_tokens|num_labels|num_latents|num_\w*queries", 8),
    (
        r"(\w*_)?(hidden_size\w*|d_model|n_embd|embed_dim\w*|emb_dim|hidden_dim|dim|width|\w*_dim|\w*_hidden_size|\w*_width|\w*embedding_size|channels|\w*_channels|\w*_size|d_latents|\w*_features)",
        WIDTH,
    ),
)
_UNCHANGED: Final = re.compile(
    r"num_channels|in_channels|\w*in_chans|(\w*_)?kernel_size\w*|\w*stride\w*|\w*_ratio|\w*groups?|type_vocab_size|"
    r"\w*batch_size|\w*merge_size|temporal_patch_size|\w*_factor|scale\w*|\w*chunk_size\w*|\w*kernel\w*|num_hash\w*"
)
_REQUIRED: Final = {"head_dim": WIDTH // HEADS, "num_experts_per_tok": 2, "n_routed_experts": 4, "prediction_length": 4}
"""Fields that some models require although their default is None."""
_LISTS: Final[tuple[tuple[str, int], ...]] = (
    (r"depths|num_blocks|layers|\w*_layers|num_\w*layers|\w*depths", 1),
    (r"\w*hidden_sizes|\w*embed_dims?|channels|\w*_channels|dims|\w*_dims?|conv_dim|\w*hidden_size", 64),
    (r"num_\w*heads|\w*_heads|num_heads|heads", 4),
    (r"image_size|\w*_image_size", IMAGE),
)


def small_config(model_type: str, changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """The small configuration of a model type, with `changes`. Errors of its class are passed through."""
    return _shrink(CONFIG_MAPPING[model_type], {}, OVERRIDES.get(model_type, {}) | (changes or {}))


def _shrink(kind: type[PreTrainedConfig], given: dict[str, Any], overrides: dict[str, Any]) -> PreTrainedConfig:
    default = kind(**given)
    fields = [f for f in dataclasses.fields(kind) if f.name not in _BASE_FIELDS]
    values = {f.name: vars(default).get(f.name) for f in fields}
    grouped_keys = any(
        isinstance(v, int)
        and v
        and re.fullmatch(r"num_\w*key_value_heads|num_\w*kv_heads", n)
        and _is_fewer(n, v, values)
        for n, v in values.items()
    )
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in overrides and not isinstance(overrides[name], dict):
            continue
        if value is None and name in _REQUIRED:
            small[name] = _REQUIRED[name]
        elif isinstance(value, PreTrainedConfig):
            inner = overrides.get(name, {})
            model_type = inner.get("model_type")
            sub = type(value)
            small[name] = _shrink(
                CONFIG_MAPPING[model_type] if model_type else sub,
                {} if model_type else _special(value),
                {**OVERRIDES.get(getattr(sub, "model_type", ""), {}), **inner},
            )
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _number(name, value, grouped_keys)
        elif isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
            new = _list(name, list(value))
            if new is not None:
                small[name] = type(value)(new)
        elif isinstance(value, dict) and name.startswith("rope"):
            small[name] = _rope(value)
    small = {n: v for n, v in small.items() if v is not None}
    small |= {n: v for n, v in overrides.items() if not isinstance(v, dict) or n not in values}
    small.pop("model_type", None)
    for n in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if n in {f.name for f in dataclasses.fields(kind)} and n not in small:
            value = vars(default).get(n)
            small[n] = None if value is None else {"pad": 0, "bos": 1, "eos": 2, "dec": 1}[n[:3]]
    config = kind(**{**given, **small})
    _fit_sections(config)
    return config


def _fit_sections(config: Any) -> None:
    """Fit the rotary sections of images to a small head, for models that read them without a default."""
    settings = vars(config).get("rope_parameters")
    if isinstance(settings, dict) and "rope_theta" in settings and "mrope_section" not in settings:
        if not re.search("vl|glm|vision|omni|image|colqwen|v_", str(config.model_type)):
            return
        rotary_size = int(vars(config).get("head_dim") or WIDTH // HEADS) * settings.get("partial_rotary_factor", 1.0)
        settings["mrope_section"] = [2, 3, 3] if rotary_size == 16 else [2, 1, 1]


def _special(value: PreTrainedConfig) -> dict[str, Any]:
    """Fields of an inner configuration that the outer one changed and that are not sizes."""
    default = type(value)()
    inner, default_fields = vars(value), vars(default)
    return {
        f.name: inner[f.name]
        for f in dataclasses.fields(type(value))
        if f.name not in _BASE_FIELDS
        and isinstance(inner.get(f.name), bool | str | float)
        and inner.get(f.name) != default_fields.get(f.name)
    }


def _is_fewer(name: str, keys: int, values: dict[str, Any]) -> bool:
    heads = [
        v for n, v in values.items() if isinstance(v, int) and re.fullmatch(r"num_\w*attention_heads|num_heads", n)
    ]
    return bool(heads) and keys < max(heads)


def _number(name: str, value: int, grouped_keys: bool) -> int | None:
    if re.fullmatch(r"\w*token_(id|index)|\w*_token", name) and value is not None:
        if name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            return None
        return VOCABULARY - 1 - sum(map(ord, name)) % 20
    if name in ("n_group", "topk_group"):
        return 1
    if _UNCHANGED.fullmatch(name) or value <= 1:
        return None
    for pattern, size in _RULES:
        if re.fullmatch(pattern, name):
            if "key_value" in pattern and not grouped_keys:
                size = HEADS
            return min(value, size) if size else None
    return None


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings with sections of a small head dim."""
    return {n: _rope(v) if isinstance(v, dict) else [2, 3, 3] if n == "mrope_section" else v for n, v in value.items()}


def _list(name: str, value: list[int]) -> list[int] | None:
    if _UNCHANGED.fullmatch(name):
        return None
    for pattern, size in _LISTS:
        if re.fullmatch(pattern, name):
            return [size if v == 3 else min(v, size) for v in value]  # three heads divide no width here
    return None
