"""The run of arXiv 2510.04212, section 3.1, whose loss exploded near step 6,600: GPT-2 small on flash attention.

Settings are those of the paper and of the authors' train.py: AdamW (0.9, 0.95) without weight decay, 2000 steps up to a
rate of 1e-3 and a cosine to 1e-5 over 600,000, clipped at 1, half a million tokens a step, no biases. nanoGPT's own
default is a weight decay of 0.1 on matrices: the recipes with `decay` in their name. Ours is another text, without a
mark between files. Train them as the variants flash-untreated and flash-rescued; `control` is the float32 control.
"""

from itertools import product
from typing import Final

from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.recipe import Recipe

_SEQUENCES: Final = {"": 512, "-64k": 64}
"""Of a step, 1,024 tokens each."""


def _recipe(size: str, *, biases: bool, decay: bool) -> Recipe:
    batch = _SEQUENCES[size]
    return Recipe(
        name=f"paper-gpt2{size}{'-bias' if biases else ''}{'-decay' if decay else ''}",
        summary=f"GPT-2 small as the paper trains it, {batch * 1024:,} tokens a step, "
        f"{'biases on queries, keys and values' if biases else 'no biases'}, weight decay {0.1 if decay else 0:g}.",
        model=ModelConfig(
            layers=12,
            heads=12,
            width=768,
            context=1024,
            vocabulary=50_304,
            qkv_bias=biases,
            matmul_dtype="bfloat16",
        ),
        batch=batch,
        micro_batch=32,
        steps=600_000,
        learning_rate=1e-3,
        warmup_steps=2000,
        schedule="cosine",
        last_rate_share=0.01,
        weight_decay=0.1 if decay else 0.0,
        bias_decay=0.0,
        text="folders",
        on_gpu=True,
        compiled=True,
    )


PAPER_RECIPES: Final = tuple(
    _recipe(size, biases=biases, decay=decay)
    for decay, size, biases in product((False, True), _SEQUENCES, (False, True))
)
