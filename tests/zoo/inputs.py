"""Inputs of a small model, told by the names of its forward's arguments."""

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

ROWS: Final = 2
LENGTH: Final = 12
FIRST_WORD: Final = 3
WORDS: Final = 70
"""Ids are drawn from [FIRST_WORD, WORDS): special tokens lie outside."""


_MAIN: Final = ("pixel_values", "input_features", "input_values", "inputs_embeds", "hidden_states")
"""What a model without words may take, the likeliest first."""


def forward_arguments(model: nn.Module) -> list[str]:
    """The names that forward takes."""
    return list(inspect.signature(model.forward).parameters)


def inputs_of(model: Any, *, length: int = LENGTH, seed: int = 7) -> dict[str, Any]:
    """What forward needs, drawn with the seed."""
    random = torch.Generator().manual_seed(seed)
    names, config = forward_arguments(model), model.config
    ids = torch.randint(FIRST_WORD, WORDS, (ROWS, length), generator=random)
    given: dict[str, Any] = {}
    if "input_ids" in names:
        given["input_ids"] = ids
    if "decoder_input_ids" in names and ("input_ids" in names or model.main_input_name != "input_ids"):
        given["decoder_input_ids"] = torch.randint(FIRST_WORD, WORDS, (ROWS, length), generator=random)
    main = model.main_input_name
    if main not in names:
        main = next((name for name in _MAIN if name in names), main)
    if "grid_thw" in names:
        return {
            "hidden_states": torch.randn(16, _patch_width(config), generator=random),
            "grid_thw": torch.tensor([[1, 4, 4]]),
        }
    both = "pixel_values" in names and hasattr(config, "text_config") and hasattr(config, "vision_config")
    if both and not any("image_token" in name for name in vars(config)):
        given |= _senses("pixel_values", names, config, random)
    if main not in given and ("input_ids" not in given or main.startswith("pixel")):
        given |= _senses(main, names, config, random)
    if "use_cache" in names:
        given["use_cache"] = False
    return given


def _patch_width(config: Any) -> int:
    """Numbers in a patch of Qwen2-VL's kind of image."""
    channels: Any = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
    return int(channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2)


def _senses(main: str, names: list[str], config: Any, random: torch.Generator) -> dict[str, Any]:
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
        return torch.randn(*shape, generator=random)

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
        given = {main: draw(ROWS, length)}
        if "past_values_padding" in names:
            given["past_values_padding"] = (torch.arange(length) < length // 3).float().repeat(ROWS, 1)
            given["freq"] = torch.zeros(ROWS, 1, dtype=torch.long)
        return given
    return {main: draw(ROWS, LENGTH, 64)}
