"""Inputs of a small model, derived from the argument names of its forward."""

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

ROWS: Final = 2
LENGTH: Final = 12
FIRST_ID: Final = 3
LAST_ID: Final = 70
"""Token ids are drawn from [FIRST_ID, LAST_ID), which excludes special tokens."""


_MAIN: Final = ("pixel_values", "input_features", "input_values", "inputs_embeds", "hidden_states")
"""Possible main inputs of a model without token ids, most likely first."""


def forward_arguments(model: nn.Module) -> list[str]:
    """The argument names of forward."""
    return list(inspect.signature(model.forward).parameters)


def inputs_of(model: Any, *, length: int = LENGTH, seed: int = 7) -> dict[str, Any]:
    """Random inputs for forward."""
    generator = torch.Generator().manual_seed(seed)
    names, config = forward_arguments(model), model.config
    ids = torch.randint(FIRST_ID, LAST_ID, (ROWS, length), generator=generator)
    inputs: dict[str, Any] = {}
    if "input_ids" in names:
        inputs["input_ids"] = ids
    if "decoder_input_ids" in names and ("input_ids" in names or model.main_input_name != "input_ids"):
        inputs["decoder_input_ids"] = torch.randint(FIRST_ID, LAST_ID, (ROWS, length), generator=generator)
    main = model.main_input_name
    if main not in names:
        main = next((name for name in _MAIN if name in names), main)
    if "grid_thw" in names:
        return {
            "hidden_states": torch.randn(16, _patch_width(config), generator=generator),
            "grid_thw": torch.tensor([[1, 4, 4]]),
        }
    has_text_and_images = (
        "pixel_values" in names and hasattr(config, "text_config") and hasattr(config, "vision_config")
    )
    if has_text_and_images and not any("image_token" in name for name in vars(config)):
        inputs |= _media_inputs("pixel_values", names, config, generator)
    if main not in inputs and ("input_ids" not in inputs or main.startswith("pixel")):
        inputs |= _media_inputs(main, names, config, generator)
    if "use_cache" in names:
        inputs["use_cache"] = False
    return inputs


def _patch_width(config: Any) -> int:
    """The size of a flattened patch in Qwen2-VL's image format."""
    channels: Any = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
    return int(channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2)


def _media_inputs(main: str, names: list[str], config: Any, generator: torch.Generator) -> dict[str, Any]:
    def number(*choices: str, default: int) -> Any:
        for holder in (
            config,
            *(
                getattr(config, n, None)
                for n in ("vision_config", "backbone_config", "audio_config", "encoder", "encoder_config")
            ),
        ):
            for choice in choices:
                value = getattr(holder, choice, None)
                if value is not None:
                    return value
        return default

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if main.startswith("pixel_values"):
        size = number("image_size", "img_size", default=32)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        channels = number("num_channels", "in_channels", "in_chans", default=3)
        if main == "pixel_values_videos" or ("num_frames" in vars(config)):
            return {main: draw(ROWS, number("num_frames", "frames_per_clip", default=4), channels, height, width)}
        return {main: draw(ROWS, channels, height, width)}
    if main == "input_values" and "num_mel_bins" not in vars(config):
        return {main: draw(ROWS, 1600)}
    if main in ("input_features", "input_values"):
        mels = number("num_mel_bins", "feature_size", "input_feat_per_channel", default=16)
        time = number("max_length", "max_source_positions", default=48)
        if "max_source_positions" in vars(config):
            time *= 2
        return {
            main: draw(ROWS, mels, time)
            if config.model_type.startswith("whisper") or "max_source_positions" in vars(config)
            else draw(ROWS, time, mels)
        }
    if main == "past_values":
        length = number("context_length", default=32)
        inputs = {main: draw(ROWS, length)}
        if "past_values_padding" in names:
            inputs["past_values_padding"] = (torch.arange(length) < length // 3).float().repeat(ROWS, 1)
            inputs["freq"] = torch.zeros(ROWS, 1, dtype=torch.long)
        return inputs
    return {main: draw(ROWS, LENGTH, 64)}
