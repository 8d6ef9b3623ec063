"""More optional model libraries (extra `zoo` of pyproject.toml): those without named inputs, or with custom
attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo.library_helpers import LENGTH, Cases, Named, draw, padding, words
from tests.zoo.running import Case
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS = 64, 4, 2, 64


class _NamedInputs(nn.Module):
    """Adapts a model so that it can be called with named inputs."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, **given: Any) -> Any:
        return self._call(self.model, **given)


def _with_named_inputs(build: Callable[[], nn.Module], call: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: _NamedInputs(build(), call)


def open_clip() -> list[Named]:
    """Image and text: nn.MultiheadAttention, a custom attention, a pooler with cross-attention, CoCa."""
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIP, CustomTextCLIP

    text = {"context_length": LENGTH, "vocab_size": WORDS, "width": WIDTH, "heads": HEADS, "layers": LAYERS}
    vision = {"image_size": 32, "patch_size": 8, "width": WIDTH, "head_width": WIDTH // HEADS, "layers": LAYERS}
    pooled = vision | {"attentional_pool": True, "attn_pooler_heads": HEADS}
    custom = {"block_type": "custom"}

    def read(model: Any, image: Tensor, text: Tensor) -> Any:
        out = model(image, text)
        return dict(out) if isinstance(out, dict) else list(out)

    def cases(_: nn.Module) -> list[Case]:
        return [Case("unpadded", {"image": draw(2, 3, 32, 32), "text": words(2, LENGTH)})]

    def coca() -> nn.Module:
        return CoCa(WIDTH, text, text | {"embed_cls": True, "output_tokens": True}, pooled | {"output_tokens": True})  # type: ignore[no-any-return]

    models: dict[str, Callable[[], nn.Module]] = {
        "CLIP": lambda: CLIP(32, vision, text),
        "CustomTextCLIP": lambda: CustomTextCLIP(32, pooled, text),
        "CustomTextCLIP with blocks of its own": lambda: CustomTextCLIP(32, vision | custom, text | custom),
        "CustomTextCLIP with norms of heads": lambda: CustomTextCLIP(
            32, vision | custom | {"qk_norm": True}, text | custom | {"qk_norm": True}
        ),
        "CoCa": coca,
    }
    return [(name, _with_named_inputs(build, read), cases) for name, build in models.items()]


def vit_pytorch() -> list[Named]:
    """Images: handwritten attention, PyTorch's function, and several images packed into one row."""
    from vit_pytorch import na_vit, simple_flash_attn_vit, simple_vit, vivit

    sizes = {"image_size": 32, "num_classes": 7, "dim": WIDTH, "heads": HEADS, "mlp_dim": WIDTH}
    images = sizes | {"patch_size": 8, "depth": LAYERS}
    videos = sizes | {"frames": 4, "image_patch_size": 16, "frame_patch_size": 2}

    def single_case(x: Any) -> Cases:
        return lambda _: [Case("unpadded", {"x": x})]

    image_case = single_case(draw(2, 3, 32, 32))
    packed = single_case([[draw(3, 32, 32), draw(3, 16, 32)], [draw(3, 16, 16), draw(3, 32, 16)]])
    models: list[Named] = [
        ("SimpleViT", lambda: simple_vit.SimpleViT(**images), image_case),
        ("SimpleViT (flash)", lambda: simple_flash_attn_vit.SimpleViT(**images), image_case),
        ("NaViT, images packed", lambda: na_vit.NaViT(**images), packed),
        (
            "ViViT",
            lambda: vivit.ViViT(**videos, spatial_depth=1, temporal_depth=1),
            single_case(draw(2, 3, 4, 32, 32)),
        ),
    ]
    return [(name, _with_named_inputs(build, lambda model, x: model(x)), cases) for name, build, cases in models]


def whisper() -> list[Named]:
    """OpenAI's Whisper, with PyTorch's attention function, imported by name, and with handwritten attention."""
    from whisper.model import ModelDimensions, Whisper, disable_sdpa

    sizes = (8, LENGTH, WIDTH, HEADS, LAYERS, WORDS, LENGTH + 4, WIDTH, HEADS, LAYERS)

    def by_hand(model: Any, **given: Any) -> Any:
        with disable_sdpa():
            return model(**given)

    def cases(_: nn.Module) -> list[Case]:
        return [Case("unpadded", {"mel": draw(2, 8, 2 * LENGTH), "tokens": words(2, LENGTH)})]

    def build() -> nn.Module:
        return Whisper(ModelDimensions(*sizes))  # type: ignore[no-any-return]

    return [
        ("Whisper", build, cases),
        ("Whisper by hand", _with_named_inputs(build, by_hand), cases),
    ]


def esm() -> list[Named]:
    """Proteins: handwritten attention like fairseq's, with rotary embeddings and padding."""
    from esm.model.esm2 import ESM2

    filler = 1

    def cases(_: nn.Module) -> list[Case]:
        tokens = words(2, LENGTH, first=4, last=24)
        padded = {f"padded {place}": padding(place) for place in ("right", "left")}
        return [
            Case("unpadded", {"tokens": tokens}),
            *(Case(name, {"tokens": tokens.masked_fill(pad, filler)}, ~pad) for name, pad in padded.items()),
        ]

    build = _with_named_inputs(
        lambda: ESM2(num_layers=LAYERS, embed_dim=WIDTH, attention_heads=HEADS),
        lambda model, tokens: model(tokens)["logits"],
    )
    return [("ESM2", build, cases)]


def timesfm() -> list[Named]:
    """Time series: a decoder layer with normalised heads and left-masked patches; fused or separate projections."""
    from timesfm import configs
    from timesfm.torch.transformer import Transformer

    def build(fused: bool) -> Callable[[], nn.Module]:
        config = configs.TransformerConfig(
            model_dims=WIDTH, hidden_dims=WIDTH, num_heads=HEADS, attention_norm="rms", feedforward_norm="rms",
            qk_norm="rms", use_bias=False, use_rotary_position_embeddings=True, ff_activation="swish", fuse_qkv=fused,
        )  # fmt: skip
        return _with_named_inputs(lambda: Transformer(config), lambda model, x, mask: model(x, mask, None)[0])

    def cases(_: nn.Module) -> list[Case]:
        x = draw(2, LENGTH, WIDTH)
        no_mask = torch.zeros(2, LENGTH, dtype=torch.bool)
        left = padding("left")
        return [
            Case("unpadded", {"x": x, "mask": no_mask}),
            Case("padded left", {"x": x, "mask": left}, ~left),
        ]

    return [("Transformer", build(False), cases), ("Transformer, fused", build(True), cases)]
