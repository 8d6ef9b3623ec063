"""A recipe: a model, an optimizer, a text, and how attention is rounded."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from foreshock.lab.training.arm import Arm
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.real_text_split import assigned

Text = Literal["bytes", "byte pairs", "folders"]
"""The source of the standard library as bytes, what is installed as byte pairs, or the source files of folders as byte
pairs of a larger vocabulary (texts.py)."""
Truth = Literal["healthy", "rounding", "score growth", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training run up to its arm and its seed."""

    name: str
    summary: str
    model: ModelConfig
    batch: int
    """Sequences of a step."""
    micro_batch: int | None = None
    """Sequences that a process takes at once, at most; gradients of several parts add up to a step. None: all."""
    steps: int
    learning_rate: float
    bias_rate: float = 1.0
    """Learning rate of biases as a multiple of that of all else. muP scales the rate of matrices by the inverse of the
    width and leaves that of vectors: 16 is what a model has that is 16 times as wide as the one its rates are from."""
    warmup_steps: int
    """Of a rate that rises linearly."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows; the cosine ends at the last step."""
    last_rate_share: float = 0.1
    """Of the rate, where the cosine ends."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    bias_decay: float | None = None
    """Weight decay of vectors (biases and gains); None for that of all else. Not together with a `bias_rate`."""
    clip: float | None = 1.0
    """Largest gradient norm; None leaves gradients as they are."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices inside the blocks, AdamW at `learning_rate` for all else."""
    text: Text = "bytes"
    truth: Truth = "rounding"
    """What its untreated arm was made to show."""
    split: Literal["tuning", "held-out"] = "held-out"
    """Detectors may be tuned on the runs of a tuning recipe, and are scored on the others; real_text_split.json goes
    before it, by seed."""
    on_gpu: bool = False
    """Made for a GPU; it runs anywhere."""
    compiled: bool = False
    """On a GPU the model goes through torch.compile, as people train; elsewhere it is left as it is."""
    sample_every_steps: int = 25

    def rate_share(self, step: int) -> float:
        """Share of the learning rate in a step, counted from 1."""
        if step < self.warmup_steps or self.schedule == "constant":
            return min(1.0, step / self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1))
        middle, swing = (1 + self.last_rate_share) / 2, (1 - self.last_rate_share) / 2
        return middle + swing * math.cos(math.pi * done)

    def truth_of(self, arm: Arm) -> Truth:
        """What an arm was made to show: a failure does not happen where its cause is kept from the first step on."""
        held = (self.truth == "rounding" and arm.cured) or (self.truth == "score growth" and arm.qk_clip == "always")
        return "healthy" if held else self.truth

    def header(self, arm: Arm, seed: int, run: str) -> dict[str, Any]:
        """What the first line of a trace says of it."""
        switching = {"mitigation": arm.mitigation, "switch_scope": arm.switch_scope} if arm.policy == "auto" else {}
        return {
            "recipe": self.name,
            "arm": arm.name,
            "seed": seed,
            "run": run,
            "split": assigned(self.name, seed) or self.split,
            "truth": self.truth_of(arm),
            "nature": "natural",
            "policy": arm.policy,
            **switching,
            **({} if arm.backend is None else {"backend": arm.backend, "rows": arm.rows}),
        }

    def shaped(self, arm: Arm) -> ModelConfig:
        """The model of one arm: the control's attention is given float32 operands."""
        dtype = "float32" if arm.numerics == "float32" else "bfloat16"
        return replace(self.model, **{"attention_dtype": dtype, **arm.model})

    def under(self, arm: Arm) -> "Recipe":
        """The recipe as an arm of it trains."""
        return replace(self, model=self.shaped(arm))
