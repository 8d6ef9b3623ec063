"""Recipes on byte-pair text, with the settings that people train with: nothing is injected, and no values are offset.

Which of them fail is not known before they are run: a recipe with a bias on its keys may, at a high rate, and one
without is expected not to. `foreshock.lab.scoring` judges each run by what became of it.
"""

from dataclasses import replace
from typing import Any, Final, Literal

from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipe import Recipe

_KB256 = Recipe(
    name="kb256",
    summary="Four layers, four heads, on byte pairs, for a GPU: biases on queries, keys and values as GPT-2 has them, "
    "nothing injected. Heads of the first layer run away within 10,000 steps.",
    model=ModelConfig(layers=4, heads=4, width=256, context=256, vocabulary=8192, matmul_dtype="bfloat16"),
    batch=32,
    steps=14000,
    learning_rate=2e-3,
    warmup_steps=500,
    text="byte pairs",
    on_gpu=True,
)
_WIDE = replace(_KB256.model, layers=8, heads=8, width=512, context=512)
_GPT2 = replace(_KB256.model, layers=12, heads=12, width=768, context=1024)
_LIKE_LLAMA: Final[dict[str, Any]] = {"qkv_bias": False, "rotary": True, "norm": "rms", "gated": True}
_LLAMA = replace(_WIDE, kv_heads=2, **_LIKE_LLAMA)
_DEEP = replace(_KB256.model, layers=8)
_DEEP_LLAMA = replace(_DEEP, kv_heads=2, **_LIKE_LLAMA)
_NARROW = replace(_DEEP, width=128, context=128)
_SHORT = replace(_DEEP, context=128)
_SHORT_LLAMA = replace(_DEEP_LLAMA, context=128)
_FOUR = replace(_SHORT, layers=4)
_LONG_MEMORY: Final = (0.9, 0.999)


def _may_fail(name: str, summary: str, **settings: Any) -> Recipe:
    return replace(_KB256, name=name, summary=summary, **settings)


def _as_trained(name: str, summary: str, model: ModelConfig, **settings: Any) -> Recipe:
    """Warm-up and cosine, weight decay on matrices, clipping."""
    usual: dict[str, Any] = {
        "batch": 32,
        "steps": 10000,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "weight_decay": 0.1,
        "bias_decay": 0.0,
        "truth": "healthy",
    }
    return replace(_KB256, name=name, summary=summary, model=model, **(usual | settings))


def _long(name: str, summary: str, model: ModelConfig = _SHORT, **settings: Any) -> Recipe:
    """As `_as_trained`, compiled: 40,000 steps of 4,096 tokens, which a GPU makes several hundred of in a second."""
    return _as_trained(f"long-{name}", summary, model, **({"steps": 40000, "compiled": True} | settings))


def _at_rate(rate: float, *, schedule: Literal["constant", "cosine"]) -> Recipe:
    """kb256 without biases, where nothing is there for rounding to push along: what fails then fails by its rate."""
    return replace(
        _KB256,
        name=f"no-bias-{rate * 1000:g}e-3" + "-cosine" * (schedule == "cosine"),
        summary=f"kb256 without biases at a rate of {rate * 1000:g}e-3, {schedule} after the warm-up.",
        model=replace(_KB256.model, qkv_bias=False),
        steps=4000,
        learning_rate=rate,
        schedule=schedule,
        truth="score growth" if rate > 16e-3 else "healthy",
    )


RATES: Final = tuple(
    _at_rate(rate, schedule=schedule) for schedule in ("constant", "cosine") for rate in (4e-3, 8e-3, 32e-3)
)
"""At 32e-3 scores grow until the loss goes, in float32 too; at 16e-3 they do not."""
TEXT_RECIPES: Final = (
    _as_trained(
        "text-small",
        "Four layers of width 128 with biases, for a CPU.",
        replace(_KB256.model, width=128, context=128, matmul_dtype="float32"),
        batch=8,
        steps=2500,
        learning_rate=2e-3,
        warmup_steps=200,
        on_gpu=False,
    ),
    _KB256,
    _may_fail("kb256b64", "The same at batch 64.", batch=64, steps=12000),
    _may_fail("kb256b128", "The same at batch 128, where it fails earlier in steps.", batch=128, steps=12000),
    _may_fail(
        "kb256cosine",
        "The same with a rate that falls by a cosine, and weight decay on matrices.",
        schedule="cosine",
        weight_decay=0.1,
        bias_decay=0.0,
        batch=64,
        steps=12000,
    ),
    _may_fail("kb256muon", "The same with Muon for the matrices inside the blocks.", optimizer="muon", steps=10000),
    _may_fail(
        "kb256llama",
        "A Llama of four layers with biases on queries, keys and values, as Qwen2 has them: rotary "
        "positions turn the key bias.",
        model=replace(_KB256.model, kv_heads=2, **_LIKE_LLAMA | {"qkv_bias": True}),
        batch=64,
        steps=12000,
    ),
    _may_fail("kb256compiled", "The same through torch.compile.", compiled=True),
    _may_fail("kb256deep", "Eight layers of width 256.", model=_DEEP, steps=12000),
    _may_fail("kb512", "Eight layers, eight heads, on byte pairs: it runs away slowly.", model=_WIDE),
    _as_trained("text-gpt", "Eight layers of width 256 with biases, at an ordinary rate.", _DEEP),
    _as_trained("text-gpt-no-bias", "The same without biases.", replace(_DEEP, qkv_bias=False)),
    _as_trained(
        "text-gpt-fast", "The same with biases at twice the rate, batch 64.", _DEEP, learning_rate=2e-3, batch=64
    ),
    _as_trained("text-gpt-slow", "The same at a low rate, batch 128.", _DEEP, learning_rate=3e-4, batch=128),
    _as_trained(
        "text-gpt-muon",
        "The same with Muon for the matrices, at a constant rate.",
        _DEEP,
        optimizer="muon",
        schedule="constant",
    ),
    _as_trained(
        "text-llama", "Rotary positions, grouped heads, RMSNorm and SwiGLU, eight layers of width 256.", _DEEP_LLAMA
    ),
    _as_trained(
        "text-llama-bias", "The same with biases on queries, keys and values.", replace(_DEEP_LLAMA, qkv_bias=True)
    ),
    _as_trained(
        "text-llama-qk-norm",
        "The same with qk-norm, at twice the rate, batch 64.",
        replace(_DEEP_LLAMA, qk_norm=True),
        learning_rate=2e-3,
        batch=64,
    ),
    _as_trained(
        "text-llama-muon",
        "The same with Muon for the matrices, at a constant rate.",
        _DEEP_LLAMA,
        optimizer="muon",
        schedule="constant",
        learning_rate=6e-4,
    ),
    _as_trained(
        "text-narrow", "Eight layers of width 128, batch 64.", _NARROW, learning_rate=2e-3, batch=64, steps=20000
    ),
    _as_trained(
        "text-narrow-no-bias",
        "The same without biases, batch 64.",
        replace(_NARROW, qkv_bias=False),
        batch=64,
        steps=20000,
    ),
    _as_trained(
        "text-narrow-long-memory",
        "The same with biases, an optimizer with a long memory and no clipping.",
        _NARROW,
        betas=(0.9, 0.999),
        clip=None,
        batch=64,
        steps=20000,
    ),
    _as_trained(
        "gpt2-small",
        "GPT-2 small on byte pairs, as people train it: biases on queries, keys and values.",
        _GPT2,
        batch=16,
        learning_rate=6e-4,
    ),
    _as_trained(
        "gpt2-small-no-bias", "The same without biases.", replace(_GPT2, qkv_bias=False), batch=16, learning_rate=6e-4
    ),
    _as_trained("gpt2-small-b32", "GPT-2 small at batch 32.", _GPT2, learning_rate=6e-4, steps=5000),
    _long("gpt", "Eight layers of width 256 with biases, 4,096 tokens a step, compiled, for 40,000 steps."),
    _long("gpt-fast", "The same at twice the rate.", learning_rate=2e-3),
    _long(
        "gpt-slow", "The same at a low rate, an optimizer with a long memory.", learning_rate=3e-4, betas=_LONG_MEMORY
    ),
    _long("gpt-constant", "The same at a rate that stays.", schedule="constant"),
    _long("gpt-no-bias", "The same without biases.", replace(_SHORT, qkv_bias=False)),
    _long("llama", "Rotary positions, grouped heads, RMSNorm and SwiGLU.", _SHORT_LLAMA),
    _long("llama-bias", "The same with biases on queries, keys and values.", replace(_SHORT_LLAMA, qkv_bias=True)),
    _long("llama-qk-norm", "The same with qk-norm.", replace(_SHORT_LLAMA, qk_norm=True), learning_rate=2e-3),
    _long("four", "Four layers of width 256 with biases.", _FOUR),
    _long("four-fast", "The same at twice the rate.", _FOUR, learning_rate=2e-3),
    _long("four-no-bias", "The same without biases.", replace(_FOUR, qkv_bias=False), learning_rate=2e-3),
    _long("four-llama", "Like a Llama, four layers.", replace(_SHORT_LLAMA, layers=4), learning_rate=2e-3),
    _as_trained("llama-small", "Rotary positions, grouped heads, RMSNorm and SwiGLU, on byte pairs.", _LLAMA, batch=16),
    _as_trained("llama-small-qk-norm", "The same with qk-norm.", replace(_LLAMA, qk_norm=True), learning_rate=2e-3),
)
