"""Models and execution modes, and trainings with and without an agent, which must be bit-identical."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import (
    CausalSelfAttention,
    Checkpoint,
    GroupedQueryAttention,
    TinyViT,
    batch,
    next_token_loss,
    tiny_gpt,
)
from tests.monitor.transformers_models import TRANSFORMERS
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import Agent, attach
from foreshock.monitor.attention.watched_layer import numerics_for
from foreshock.monitor.model.layers import local_tensor

EVERY_STEP: dict[str, Any] = {
    "attention": "kernels",
    "sample_every_steps": 1,
    "strict": True,
    "quiet": True,
    "url": None,
}


@contextmanager
def operator_without_agent(numerics: str = "auto") -> Iterator[None]:
    """F.scaled_dot_product_attention replaced by foreshock's operator, without an agent, statistics or modes."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        chosen: Any = numerics_for(query, numerics)
        return flash_attention(query, key, value, causal="top_left" if is_causal else "none", numerics=chosen)

    before = F.scaled_dot_product_attention
    vars(F)["scaled_dot_product_attention"] = attention
    try:
        yield
    finally:
        vars(F)["scaled_dot_product_attention"] = before


@dataclass
class TrainingResult:
    """Losses and weights of a training, and the agent's events."""

    losses: list[Tensor]
    weights: list[Tensor]
    listener: Listener = field(default_factory=Listener)
    run: str = ""
    report: str = ""

    @property
    def words(self) -> list[Any]:
        """The counters of each sample, [heads, SLOT_COUNT]."""
        return [sample.words() for sample in self.listener.of(wire.Sample)]

    @property
    def rows(self) -> list[int]:
        """Rows per head, over all samples."""
        return np.sum([slot_values(words, Slot.ROWS) for words in self.words], axis=0).astype(int).tolist()  # type: ignore[no-any-return]

    @property
    def norms(self) -> Any:
        """The latest spectral norms of W_Q, [heads]."""
        return self.listener.of(wire.Sample)[-1].query_norm.numpy()

    def assert_same_bits(self, other: "TrainingResult") -> None:
        """Asserts that losses and weights are bit-identical."""
        for a, b in zip(self.losses + self.weights, other.losses + other.weights, strict=True):
            assert torch.equal(a, b), float((a.double() - b.double()).abs().max())

    def assert_near(self, other: "TrainingResult", rtol: float, atol: float) -> None:
        """Asserts that losses and weights are equal within rounding."""
        for a, b in zip(self.losses + self.weights, other.losses + other.weights, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def _weights(model: nn.Module) -> list[Tensor]:
    """This rank's shard of each weight."""
    return [local_tensor(weight).clone() for weight in model.parameters()]


Loop = Callable[[nn.Module, Callable[[Tensor], None]], list[Tensor]]
"""Trains a model, passes the loss of each optimizer step to its second argument, and returns the losses."""


def train_unwatched(model: nn.Module, loop: Loop) -> TrainingResult:
    """Trains with the model's native attention, without an agent."""
    return TrainingResult(loop(model, lambda loss: None), _weights(model))


def train_with_operator(model: nn.Module, loop: Loop, numerics: str = "auto") -> TrainingResult:
    """Trains with foreshock's operator, without an agent."""
    with operator_without_agent(numerics):
        return train_unwatched(model, loop)


def train_watched(
    model: nn.Module, loop: Loop, *, during: Callable[[Agent], None] | None = None, **overrides: Any
) -> TrainingResult:
    """Trains with an agent and closes it. `during` is called after each step."""
    listener = Listener()
    with attach(model, **{**EVERY_STEP, **overrides}) as agent:
        agent.subscribe(listener)

        def stepped(loss: Tensor) -> None:
            agent.step(loss)
            if during is not None:
                during(agent)

        losses = loop(model, stepped)
    return TrainingResult(losses, _weights(model), listener, agent.run, agent.report())


STEPS = 2


@dataclass(frozen=True)
class Mode:
    """An execution mode of a training step."""

    compile: dict[str, Any] | None = None
    checkpoint: Checkpoint | None = None
    micro_batches: int = 1
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    reentrant: bool | None = None
    """for the activation checkpointing of transformers' models"""

    def loop(self, model: nn.Module, stepped: Callable[[Tensor], None]) -> list[Tensor]:
        """Trains some optimizer steps."""
        run: Any = model if self.compile is None else torch.compile(model, **self.compile)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            parts = []
            for ids in torch.split(batch(step, rows=2 * self.micro_batches), 2):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                    parts.append(next_token_loss(run(ids).float(), ids) / self.micro_batches)
                torch.autograd.backward(parts[-1])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.stack(parts).sum().detach())
            stepped(losses[-1])
        return losses


def saving(*saved: Any) -> Checkpoint:
    """Selective checkpointing: results of the given operators are saved, all others recomputed."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda *args: checkpoint(*args, use_reentrant=False, context_fn=contexts)


MODES: dict[str, list[Mode]] = {
    "eager": [Mode()],
    "torch.compile": [Mode(compile={"backend": "aot_eager", "fullgraph": True})],
    "inductor": [Mode(compile={"fullgraph": True})],
    "checkpointing (reentrant)": [Mode(checkpoint=functools.partial(checkpoint, use_reentrant=True), reentrant=True)],
    "checkpointing (non-reentrant)": [
        Mode(checkpoint=functools.partial(checkpoint, use_reentrant=False), reentrant=False)
    ],
    "selective checkpointing": [
        Mode(checkpoint=saving(torch.ops.foreshock.attention_forward.default)),
        Mode(checkpoint=saving(torch.ops.aten.mm.default, torch.ops.aten.addmm.default)),
    ],
    "gradient accumulation": [Mode(micro_batches=2)],
    "autocast bf16": [Mode(autocast=True)],
    "pure bf16": [Mode(dtype=torch.bfloat16)],
}


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True, dropout=0.0)


def seeded(make: Callable[[Checkpoint | None], nn.Module]) -> Callable[[Mode], nn.Module]:
    def build(mode: Mode) -> nn.Module:
        torch.manual_seed(3)
        return make(mode.checkpoint).to(mode.dtype)

    return build


def gpt_of(layer: Callable[[], nn.Module]) -> Callable[[Mode], nn.Module]:
    return seeded(lambda checkpoint: tiny_gpt(layer(), layer(), seed=3, checkpoint=checkpoint))


class Logits(nn.Module):
    """Returns only the logits of a transformers model, with dropout off so that runs are reproducible."""

    def __init__(self, name: str, mode: Mode) -> None:
        super().__init__()
        model: Any = TRANSFORMERS[name]().train().to(mode.dtype)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attn_dropout", None), float):
                module.attn_dropout = 0.0
        if mode.reentrant is not None:
            old, new = (
                "gradient_checkpointing_enable",
                "activation_checkpointing_enable",
            )  # `old` before transformers 5.20
            getattr(model, new, getattr(model, old))({"use_reentrant": mode.reentrant})
            model.enable_input_require_grads()
        model.config.use_cache = mode.compile is not None  # without a cache, compiled code passes a mask
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[Mode], nn.Module], int, int]] = {
    # constructor, query heads of all layers, rows per head in a micro-batch
    "nanoGPT": (gpt_of(lambda: CausalSelfAttention(16, 2)), 4, 24),
    "plain attention": (gpt_of(lambda: GroupedQueryAttention(16, 4, 2)), 8, 24),
    "ViT": (seeded(lambda checkpoint: TinyViT(checkpoint=checkpoint)), 4, 2 * 4),
    "torch TransformerEncoder": (gpt_of(encoder_layer), 4, 24),
    **{name: (functools.partial(Logits, name), 8, 24) for name in TRANSFORMERS},
}
